"""Solves a placement program with HiGHS, to a proven gap.

Each piece of a choice (`pieces.py`) has a column for whether it is chosen, one for its groups on the GPU and one for
its cost; the cost is bounded from below by lines of the piece's hull. A layer of 768 groups so takes a few columns
instead of 768, and needs only the lines near its best number of groups:

1. The linear relaxation is solved, lines that its solution violates are added, until there are none. Near its solution
   placements are looked for. Mostly one is within the gap of the relaxation, and is the answer.
2. Else what the relaxation's prices rule out is left away (`prices.py`), and it is branched on how many stages choose
   alike. Layers are nearly the same, so it matters less which of them have their attention on the GPU than how many: of
   22.4 in the relaxation, at most 22 or at least 23. Branching layer by layer finds nearly the same solution over and
   over, with two layers exchanged.
3. In what is left HiGHS branches on everything. Its solution's costs may still be above the hull: lines are added, or
   the piece is cut where the solution lies, and it branches again, until cost and bound agree.

All bounds hold for the program itself, since lines are never above the costs.
"""

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from picompile.errors import SolverError
from picompile.placement.columns import ON_GPU, Columns, Kind, Limit, Limits, Relaxed
from picompile.placement.exchange import exchange
from picompile.placement.improve import Improver
from picompile.placement.pieces import Piece, cut_at_bends, first_pieces, split
from picompile.placement.prices import lagrange_bound, remaining
from picompile.placement.program import Place, Program, Totals, evaluate
from picompile.placement.rounding import best_places, round_relaxed

GAP = 1e-4
TIME_LIMIT_S = 10.0

# Of the size of the costs: what is taken for rounding of the solver's arithmetic.
_ROUNDING = 1e-9
_MOST_ROUNDS = 200
# How often it is branched on numbers of stages before HiGHS branches on everything.
_MOST_NODES = 150
# Looking for placements takes longer than a relaxation; of these every so many is enough.
_ROUND_EVERY = 8
# Of a relaxation's numbers: what is taken for whole.
_WHOLE = 1e-5


@dataclass(frozen=True)
class Solution:
    """A placement and what was proved of it.

    `bound` is no more than the cost of any placement; `gap` = (cost - bound) / |cost|. `seconds` is the time it took,
    `nodes` how many relaxations were branched from, 0 where the first was enough.
    """

    places: tuple[Place, ...]
    totals: Totals
    bound: float
    gap: float
    seconds: float
    nodes: int


class _Best(NamedTuple):
    places: tuple[Place, ...]
    totals: Totals


class _Node(NamedTuple):
    """A part of the program that is still to be searched: no placement in it costs less than `bound`."""

    bound: float
    number: int
    limits: Limits


def solve(
    program: Program,
    gap: float = GAP,
    known: Sequence[Sequence[Place]] = (),
    time_limit_s: float = TIME_LIMIT_S,
) -> Solution | None:
    """The placement of least cost, to within `gap`; None where none fits.

    None of the `known` placements that fit is better than what is returned. After `time_limit_s` the best so far is
    returned with the gap that it has. Raises `SolverError` where HiGHS fails, or finds nothing in that time.
    """
    return _Search(program, gap, known, time_limit_s).run()


class _Search:
    def __init__(self, program: Program, gap: float, known: Sequence[Sequence[Place]], time_limit_s: float) -> None:
        self._program, self._gap = program, gap
        self._started = time.perf_counter()
        self._deadline = self._started + time_limit_s
        self._improver = Improver(program)
        self._best: _Best | None = None
        self._nodes = 0
        for places in known:
            self._offer(places)

    def run(self) -> Solution | None:
        pieces = first_pieces(self._program)
        if len({piece.stage for piece in pieces}) < len(self._program.stages):
            return None
        columns = Columns(self._program, pieces, self._gap)
        relaxed = columns.relax()
        if relaxed is None:
            return None
        bound = self._round(columns, relaxed)
        if not self._closed(bound):
            bound = max(bound, self._search(self._cut(columns, self._gap / 4 * abs(bound))))
        return self._solution(bound)

    def _search(self, columns: Columns) -> float:
        """Looks for the best placement of all in `columns`; returns the bound of what was not looked at."""
        if columns.relax() is None:
            return math.inf
        columns = self._narrowed(columns)
        root = columns.limits
        self._dive(columns)
        columns.limit(root)
        if columns.relax() is None:
            return math.inf
        return self._branch(self._narrowed(columns))

    def _round(self, columns: Columns, relaxed: Relaxed, *, alike: bool = False) -> float:
        """Looks for placements near a relaxation's solution; returns the bound that the relaxation proves.

        With `alike` only at the likeliest two.
        """
        prices = columns.prices()
        best = best_places(columns, prices)
        options = [[priced.place for priced in kinds.values()] for kinds in best]
        for places in islice(round_relaxed(columns, relaxed, best, prices.sides), 2 if alike else None):
            self._offer(self._improver.improve(places))
            fitting = self._improver.shrink(places)
            self._offer(self._improver.improve(exchange(self._program, fitting, options)))
        return max(relaxed.bound, lagrange_bound(self._program, columns.pieces, prices))

    def _dive(self, columns: Columns) -> None:
        """Looks for a placement: rounds how many stages choose alike, one kind after another.

        What it ends at is mostly so good that little is left to search.
        """
        limits: Limits | None = columns.limits
        while limits is not None and not self._late():
            columns.limit(limits)
            relaxed = columns.relax()
            if relaxed is None or (self._best is not None and relaxed.bound >= self._best.totals.cost):
                return
            self._nodes += 1
            self._round(columns, relaxed, alike=True)
            limits = _rounded(limits, columns.totals(relaxed))

    def _cut(self, columns: Columns, tolerance: float) -> Columns:
        """The same cut at bends, without what the prices of its relaxation rule out."""
        prices, left = columns.prices(), {(piece.stage, piece.choice) for piece in self._left(columns)}
        pieces, beside = list[Piece](), list[float]()
        for piece, price in zip(columns.pieces, prices.pieces, strict=True):
            if (piece.stage, piece.choice) in left:
                pieces += cut_at_bends(self._program, piece, tolerance)
                beside += [price] * (len(pieces) - len(beside))
        if self._best is not None:
            pieces = remaining(self._program, pieces, replace(prices, pieces=beside), self._best.totals.cost)
        return Columns(self._program, pieces, self._gap)

    def _narrowed(self, columns: Columns) -> Columns:
        """The same without what the prices of its relaxation rule out."""
        left = self._left(columns)
        return columns if left == columns.pieces else Columns(self._program, left, self._gap)

    def _left(self, columns: Columns) -> Sequence[Piece]:
        """What the prices of the last relaxation do not rule out."""
        if self._best is None:
            return columns.pieces
        return tuple(remaining(self._program, columns.pieces, columns.prices(), self._best.totals.cost))

    def _branch(self, columns: Columns) -> float:
        """Branches on how many stages choose alike, the part with the least bound first; returns the bound of all."""
        root = _Node(-math.inf, 0, columns.limits)
        open_nodes, whole = [root], list[_Node]()
        bounds: list[float] = []
        while open_nodes and not self._closed(open_nodes[0].bound) and self._nodes < _MOST_NODES and not self._late():
            node = heapq.heappop(open_nodes)
            columns.limit(node.limits)
            relaxed = columns.relax()
            if relaxed is None:
                continue
            self._nodes += 1
            bound, parts = max(node.bound, relaxed.bound), _parts(node.limits, columns.totals(relaxed))
            if not self._closed(bound) and (not parts or self._nodes % _ROUND_EVERY == 0):
                bound = max(bound, self._round(columns, relaxed, alike=True))
            parts = [] if self._closed(bound) else parts
            if self._closed(bound):
                bounds.append(bound)
            elif not parts:
                whole.append(node._replace(bound=bound))
            for number, limits in enumerate(parts):
                heapq.heappush(open_nodes, _Node(bound, 2 * self._nodes + number, limits))
        left = [node.bound for node in (*open_nodes, *whole)]
        if open_nodes and not self._closed(open_nodes[0].bound):
            # Stages that are nothing like each other: their number says little.
            return max(min([*bounds, *left]), self._branch_on_all(columns, root))
        # By now the best placement mostly closes these.
        for node in whole:
            bounds.append(node.bound if self._closed(node.bound) else self._branch_on_all(columns, node))
        return min([*bounds, *(node.bound for node in open_nodes)], default=math.inf)

    def _branch_on_all(self, columns: Columns, node: _Node) -> float:
        """Lets HiGHS branch within the limits of a node; returns the bound of what it searched."""
        columns.limit(node.limits)
        relaxed = columns.relax()
        if relaxed is None:
            return math.inf
        bound = max(node.bound, self._round(columns, relaxed))
        if self._closed(bound):
            return bound
        # Anew, for these become whole numbers.
        columns = Columns(self._program, self._left(columns), self._gap)
        if len({piece.stage for piece in columns.pieces}) < len(self._program.stages):
            return math.inf
        for _ in range(_MOST_ROUNDS):
            columns.limit(node.limits)
            left_s = self._deadline - time.perf_counter()
            if left_s <= 0:
                return bound
            try:
                found = columns.branch(0.8 * self._gap, self._best and self._best.places, left_s)
                if found is None:
                    return math.inf
                self._nodes += 1
                bound = max(bound, found.bound)
                places = columns.places(found)
                self._offer(places)
                self._offer(self._improver.improve(places))
                if self._closed(bound) or found.timed_out:
                    return bound
                if not columns.tighten(found):
                    columns = self._refined(columns, found)
            except SolverError:
                # HiGHS comes to the end of its precision. What was proved until now still holds.
                if self._best is None:
                    raise
                return bound
        raise SolverError("branching on the placement program does not come to an end")

    def _refined(self, columns: Columns, found: Relaxed) -> Columns:
        """The same with pieces cut where the hull is below the cost of the solution."""
        cuts: dict[tuple[int, int, int, bytes], int] = {}
        for piece, groups in columns.chosen(found):
            cost = self._program.stages[piece.stage].choices[piece.choice].cost(groups)
            if cost > piece.hull(groups) + _ROUNDING * abs(cost):
                # Layers that are alike would bring the same solution back by turns.
                cuts[_likeness(piece)] = groups
        if not cuts:
            raise SolverError("the placement program's solution is neither exact nor can it be refined")
        pieces: list[Piece] = []
        for piece in columns.pieces:
            groups = cuts.get(_likeness(piece), -1)
            pieces += split(self._program, piece, groups) if groups >= 0 else [piece]
        return Columns(self._program, pieces, self._gap)

    def _offer(self, places: Sequence[Place]) -> None:
        totals = evaluate(self._program, places)
        if totals.fits(self._program) and (self._best is None or totals.cost < self._best.totals.cost):
            self._best = _Best(tuple(places), totals)

    def _late(self) -> bool:
        return time.perf_counter() > self._deadline

    def _closed(self, bound: float) -> bool:
        """Whether what has this bound need not be searched: nothing in it is better by more than the gap."""
        return self._best is not None and self._gap_to(self._best, bound) <= self._gap

    def _gap_to(self, best: _Best, bound: float) -> float:
        chosen = zip(self._program.stages, best.places, strict=True)
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
        return Solution(places, totals, min(bound, totals.cost), self._gap_to(self._best, bound), seconds, self._nodes)


def _parts(limits: Limits, totals: Mapping[Kind, float]) -> list[Limits]:
    """The two parts of what is within `limits`, by the total that is furthest from whole; none where all are whole."""
    away = {kind: abs(total - round(total)) for kind, total in totals.items()}
    # How many have their attention on the GPU matters most: nothing else that is placed whole is as large.
    first = ON_GPU if away.get(ON_GPU, 0.0) >= _WHOLE else None
    kind = first or max(away, key=lambda kind: away[kind], default=None)
    if kind is None or away[kind] < _WHOLE:
        return []
    total, limit = math.floor(totals[kind]), limits[kind]
    return [{**limits, kind: part} for part in (Limit(limit.low, total), Limit(total + 1, limit.high))]


def _rounded(limits: Limits, totals: Mapping[Kind, float]) -> Limits | None:
    """`limits` with the total that is nearest to whole, of those that are not, as this whole number; None: all are."""
    away = {kind: abs(total - round(total)) for kind, total in totals.items()}
    parts = (kind for kind in away if away[kind] >= _WHOLE)
    kind = min(parts, key=lambda kind: (kind != ON_GPU, away[kind]), default=None)
    return None if kind is None else {**limits, kind: Limit(round(totals[kind]), round(totals[kind]))}


def _likeness(piece: Piece) -> tuple[int, int, int, bytes]:
    """What pieces of layers that are alike have in common."""
    return piece.choice, piece.low, piece.high, piece.value.tobytes()
