"""Solve a placement problem with HiGHS, to a proven gap.

Each piece of a choice (`pieces.py`) has a column for whether it is chosen, one for its groups on the GPU and one for
its cost; the cost is bounded from below by lines of the piece's hull. A layer of 768 groups so takes a few relaxation
instead of 768, and needs only the lines near its best number of groups:

1. The linear relaxation (`relaxation.py`) is solved, and lines that its solution violates are added, until there are
   none. Placements near its solution are tried (`local_search.py`). Mostly one is within the gap of the relaxation, and
   is the answer.
2. Else what the prices of the relaxation rule out is removed, and the search branches on how many stages choose alike.
   Layers are nearly the same, so it matters less which of them have their attention on the GPU than how many: of 22.4
   in the relaxation, at most 22 or at least 23. Branching layer by layer finds nearly the same solution over and over,
   with two layers swapped.
3. In what remains HiGHS branches on everything. The costs of its solution may still be above the hull: lines are added,
   or the piece is split where the solution lies, and it branches again, until cost and bound agree.

HiGHS alone, in one model with all lines, takes 1 to 7 s for models of 30B parameters on, at ten times the usual gap,
and for OPT-175B it sometimes has not come to that after 10 s.

All bounds hold for the problem itself, since lines are never above the costs.
"""

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picompile.errors import SolverError
from picompile.placement.local_search import Improver, best_places, round_relaxed, swap_choices
from picompile.placement.pieces import Piece, choice_of, first_pieces, remaining, split
from picompile.placement.problem import PlacementProblem, StagePlace, Totals, evaluate
from picompile.placement.relaxation import ON_ACCELERATOR, Kind, Limit, Limits, Relaxation, Relaxed

GAP = 1e-4
TIME_LIMIT_S = 10.0

# As a share of the costs: differences up to this are rounding of the solver's arithmetic.
_ROUNDING = 1e-9
_MOST_ROUNDS = 200
# How many relaxations are solved for numbers of stages before HiGHS branches on everything.
_MOST_NODES = 150
# How far from whole the numbers of a relaxation may be and still count as whole.
_WHOLE = 1e-5


@dataclass(frozen=True)
class Solution:
    """A placement and what is proved about it.

    Attributes:
        places: the choice and the groups of each stage.
        totals: cost and bytes of the placement.
        bound: no placement costs less.
        gap: (cost - bound) / |cost|.
        seconds: wall time of the search.
        nodes: how many relaxations were branched from, 0 where the first was enough.
    """

    places: tuple[StagePlace, ...]
    totals: Totals
    bound: float
    gap: float
    seconds: float
    nodes: int


class _Best(NamedTuple):
    places: tuple[StagePlace, ...]
    totals: Totals


class _Node(NamedTuple):
    """A part of the problem that is still to be searched: no placement in it costs less than `bound`."""

    bound: float
    number: int
    limits: Limits


def solve(
    problem: PlacementProblem,
    gap: float = GAP,
    known: Sequence[Sequence[StagePlace]] = (),
    time_limit_s: float = TIME_LIMIT_S,
) -> Solution | None:
    """Return the placement of least cost, to within `gap`; None where none fits.

    The same arguments give the same placement, unless the time limit ends the search.

    Args:
        problem: the placement problem.
        gap: the most that may remain of (cost - bound) / |cost|.
        known: placements to start from, which may not fit. None of those that fit is better than what is returned.
        time_limit_s: the best placement until then is returned with the gap that it has.

    Raises:
        SolverError: HiGHS fails, or finds nothing in the time limit.
    """
    return _Search(problem, gap, known, time_limit_s).run()


class _Search:
    def __init__(
        self, problem: PlacementProblem, gap: float, known: Sequence[Sequence[StagePlace]], time_limit_s: float
    ) -> None:
        self._problem, self._gap = problem, gap
        self._started = time.perf_counter()
        self._deadline = self._started + time_limit_s
        self._improver = Improver(problem)
        self._best: _Best | None = None
        self._nodes = 0
        for places in known:
            self._offer(places)

    def run(self) -> Solution | None:
        pieces = first_pieces(self._problem)
        if len({piece.stage for piece in pieces}) < len(self._problem.stages):
            return None
        relaxation = Relaxation(self._problem, pieces, self._gap)
        relaxed = relaxation.relax()
        if relaxed is None:
            return None
        self._round(relaxation, relaxed)
        bound = relaxed.bound
        if not self._closed(bound):
            bound = max(bound, self._search(self._narrowed(relaxation)))
        return self._solution(bound)

    def _search(self, relaxation: Relaxation) -> float:
        """Search all of `relaxation`; return the bound of what was not ruled out."""
        if relaxation.relax() is None:
            return math.inf
        relaxation = self._narrowed(relaxation)
        root = relaxation.limits
        self._dive(relaxation)
        relaxation.limit(root)
        if relaxation.relax() is None:
            return math.inf
        return self._branch(self._narrowed(relaxation))

    def _round(self, relaxation: Relaxation, relaxed: Relaxed) -> None:
        """Offer placements near the solution of the last relaxation, improved."""
        prices = relaxation.prices()
        best = best_places(relaxation, prices)
        options = [[priced.place for priced in kinds.values()] for kinds in best]
        for places in round_relaxed(relaxation, relaxed, best, prices.sides):
            self._offer(self._improver.improve(places))
            self._offer(self._improver.improve(swap_choices(self._problem, places, options)))

    def _dive(self, relaxation: Relaxation) -> None:
        """Offer placements while fixing how many stages choose alike, one kind of choice after another.

        The last is mostly so good that little is left to search.
        """
        limits: Limits | None = relaxation.limits
        while limits is not None and not self._late():
            relaxation.limit(limits)
            relaxed = relaxation.relax()
            if relaxed is None or (self._best is not None and relaxed.bound >= self._best.totals.cost):
                return
            self._nodes += 1
            self._round(relaxation, relaxed)
            limits = _rounded(limits, relaxation.totals(relaxed))

    def _narrowed(self, relaxation: Relaxation) -> Relaxation:
        """Return a relaxation without what the prices of this one rule out."""
        left = self._left(relaxation)
        return relaxation if left == relaxation.pieces else Relaxation(self._problem, left, self._gap)

    def _left(self, relaxation: Relaxation) -> Sequence[Piece]:
        """Return the pieces that the prices of the last relaxation do not rule out."""
        if self._best is None:
            return relaxation.pieces
        return tuple(remaining(self._problem, relaxation.pieces, relaxation.prices(), self._best.totals.cost))

    def _branch(self, relaxation: Relaxation) -> float:
        """Branch on how many stages choose alike, the part with the least bound first; return the bound of all."""
        root = _Node(-math.inf, 0, relaxation.limits)
        open_nodes, whole = [root], list[_Node]()
        bounds: list[float] = []
        while open_nodes and not self._closed(open_nodes[0].bound) and self._nodes < _MOST_NODES and not self._late():
            node = heapq.heappop(open_nodes)
            relaxation.limit(node.limits)
            relaxed = relaxation.relax()
            if relaxed is None:
                continue
            self._nodes += 1
            bound, parts = max(node.bound, relaxed.bound), _parts(node.limits, relaxation.totals(relaxed))
            # Searching placements takes longer than a relaxation; the dive has found what there mostly is.
            if not self._closed(bound) and not parts:
                self._round(relaxation, relaxed)
            parts = [] if self._closed(bound) else parts
            if self._closed(bound):
                bounds.append(bound)
            elif not parts:
                whole.append(node._replace(bound=bound))
            for number, limits in enumerate(parts):
                heapq.heappush(open_nodes, _Node(bound, 2 * self._nodes + number, limits))
        left = [node.bound for node in (*open_nodes, *whole)]
        if open_nodes and not self._closed(open_nodes[0].bound):
            # The stages are so different that their number says little.
            return max(min([*bounds, *left]), self._branch_on_all(relaxation, root))
        # By now the best placement mostly closes these.
        for node in whole:
            bounds.append(node.bound if self._closed(node.bound) else self._branch_on_all(relaxation, node))
        return min([*bounds, *(node.bound for node in open_nodes)], default=math.inf)

    def _branch_on_all(self, relaxation: Relaxation, node: _Node) -> float:
        """Let HiGHS branch within the limits of a node; return the bound of what it searched."""
        relaxation.limit(node.limits)
        relaxed = relaxation.relax()
        if relaxed is None:
            return math.inf
        self._round(relaxation, relaxed)
        bound = max(node.bound, relaxed.bound)
        if self._closed(bound):
            return bound
        # A new relaxation is made, since HiGHS keeps its columns whole numbers once it has branched.
        relaxation = Relaxation(self._problem, self._left(relaxation), self._gap)
        if len({piece.stage for piece in relaxation.pieces}) < len(self._problem.stages):
            return math.inf
        for _ in range(_MOST_ROUNDS):
            relaxation.limit(node.limits)
            left_s = self._deadline - time.perf_counter()
            if left_s <= 0:
                return bound
            try:
                found = relaxation.branch(0.8 * self._gap, self._best and self._best.places, left_s)
                if found is None:
                    return math.inf
                self._nodes += 1
                bound = max(bound, found.bound)
                places = relaxation.places(found)
                self._offer(places)
                self._offer(self._improver.improve(places))
                if self._closed(bound) or found.timed_out:
                    return bound
                if not relaxation.tighten(found):
                    relaxation = self._refined(relaxation, found)
            except SolverError:
                # HiGHS fails for numerical reasons. What was proved until now still holds.
                if self._best is None:
                    raise
                return bound
        raise SolverError("branching on the placement problem does not come to an end")

    def _refined(self, relaxation: Relaxation, found: Relaxed) -> Relaxation:
        """Return a relaxation with pieces split where the hull is below the cost of the solution."""
        cuts: dict[tuple[int, bool, int, int, bytes], int] = {}
        for piece, groups in relaxation.chosen(found):
            cost = choice_of(self._problem, piece).cost(groups)
            if cost > piece.hull(groups) + _ROUNDING * abs(cost):
                # Pieces of identical layers are split together: else the solution would come back in another of them.
                cuts[_likeness(piece)] = groups
        if not cuts:
            raise SolverError("the placement problem's solution is neither exact nor can it be refined")
        pieces: list[Piece] = []
        for piece in relaxation.pieces:
            groups = cuts.get(_likeness(piece), -1)
            pieces += split(self._problem, piece, groups) if groups >= 0 else [piece]
        return Relaxation(self._problem, pieces, self._gap)

    def _offer(self, places: Sequence[StagePlace]) -> None:
        totals = evaluate(self._problem, places)
        if totals.fits(self._problem) and (self._best is None or totals.cost < self._best.totals.cost):
            self._best = _Best(tuple(places), totals)

    def _late(self) -> bool:
        return time.perf_counter() > self._deadline

    def _closed(self, bound: float) -> bool:
        """Return whether a part with this bound need not be searched: nothing in it is better by more than the gap."""
        return self._best is not None and self._gap_to(self._best, bound) <= self._gap

    def _gap_to(self, best: _Best, bound: float) -> float:
        chosen = zip(self._problem.stages, best.places, strict=True)
        size = sum(abs(stage.choices[place.choice].cost(place.groups)) for stage, place in chosen)
        difference = best.totals.cost - bound
        return 0.0 if difference <= _ROUNDING * size else difference / max(abs(best.totals.cost), 1e-300)

    def _solution(self, bound: float) -> Solution | None:
        if self._best is None:
            if self._late():
                raise SolverError("no placement was found in the time that there was")
            return None
        seconds = time.perf_counter() - self._started
        places, totals = self._best
        return Solution(
            places,
            totals,
            bound=min(bound, totals.cost),
            gap=self._gap_to(self._best, bound),
            seconds=seconds,
            nodes=self._nodes,
        )


def _parts(limits: Limits, totals: Mapping[Kind, float]) -> list[Limits]:
    """Return the two parts of `limits` by the total that is furthest from whole; none where all are whole."""
    away = {kind: abs(total - round(total)) for kind, total in totals.items()}
    # How many have their attention on the GPU comes first: nothing else that is placed whole is as large.
    first = ON_ACCELERATOR if away.get(ON_ACCELERATOR, 0.0) >= _WHOLE else None
    kind = first or max(away, key=lambda kind: away[kind], default=None)
    if kind is None or away[kind] < _WHOLE:
        return []
    total, limit = math.floor(totals[kind]), limits[kind]
    return [{**limits, kind: part} for part in (Limit(limit.low, total), Limit(total + 1, limit.high))]


def _rounded(limits: Limits, totals: Mapping[Kind, float]) -> Limits | None:
    """Return `limits` with the total nearest to whole fixed to that whole number; None where all are whole."""
    away = {kind: abs(total - round(total)) for kind, total in totals.items()}
    parts = (kind for kind in away if away[kind] >= _WHOLE)
    kind = min(parts, key=lambda kind: (kind != ON_ACCELERATOR, away[kind]), default=None)
    return None if kind is None else {**limits, kind: Limit(round(totals[kind]), round(totals[kind]))}


def _likeness(piece: Piece) -> tuple[int, bool, int, int, bytes]:
    """Return what pieces of identical layers have in common."""
    return piece.choice, piece.early, piece.low, piece.high, piece.value.tobytes()
