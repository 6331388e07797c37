"""Find placements near the solution of a relaxation, and improve placements.

1. Rounding: `round_relaxed` turns a solution in fractions into placements that need not fit.
2. Groups: `Improver` makes a placement fit by moving groups to the host, then fills the GPU's free memory.
3. Choices: `swap_choices` changes the choices of a few stages at a time, as long as that lowers the cost.

Nothing here proves a bound: the relaxation does. A better placement only ends the search earlier.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from picompile.placement.pieces import Prices, lower_hull, priced
from picompile.placement.problem import Choice, PlacementProblem, StagePlace, evaluate, made_choices
from picompile.placement.relaxation import Kind, Relaxation, Relaxed

_MOST_SWAPS = 30
_MOST_ALIKE = 8
# How many of the best pairs are tried: some would change the same stage twice.
_MOST_TRIED = 30


class Priced(NamedTuple):
    """A place and its cost at given prices."""

    price: float
    place: StagePlace


_NOWHERE = Priced(np.inf, StagePlace(-1, 0))


def round_relaxed(
    relaxation: Relaxation, relaxed: Relaxed, best: Sequence[Mapping[Kind, Priced]], sides: NDArray[np.float64]
) -> Iterator[list[StagePlace]]:
    """Yield placements near a solution in fractions; they need not fit.

    The first placement has each kind of choice as often as the solution, in the stages where its share is largest. The
    second has as many stages on the accelerator as the solution, rounded down: those that are cheapest there.

    Args:
        relaxation: the relaxation that was solved.
        relaxed: its solution.
        best: for each stage the place to take for each kind of choice, from `best_places`.
        sides: float64 [stages], `Prices.sides`. The actual cost of transfers replaces these prices.
    """
    yield _match_totals(relaxation, relaxed, best)
    host, gpu = (_cheapest(relaxation, best, on_accelerator) for on_accelerator in (False, True))
    host_prices, gpu_prices = (np.asarray([found.price for found in of_side]) for of_side in (host, gpu))
    problem = relaxation.problem
    cheapest = CheapestSides(host_prices, gpu_prices - sides, problem.switch_cost, from_host=problem.from_host)
    if (found := cheapest.of(int(relaxation.on_accelerator(relaxed) + 1e-6))) is not None:
        yield [(gpu if on_accelerator else host)[stage].place for stage, on_accelerator in enumerate(found[1])]


def best_places(relaxation: Relaxation, prices: Prices) -> list[dict[Kind, Priced]]:
    """Return for each stage, by kind of choice, the number of groups that is cheapest at these prices."""
    best: list[dict[Kind, Priced]] = [{} for _ in relaxation.problem.stages]
    for piece, kind, beside in zip(relaxation.pieces, relaxation.piece_kinds, prices.pieces, strict=True):
        values = priced(relaxation.problem, piece, prices, beside)
        place = int(np.argmin(values))
        found = Priced(float(values[place]), StagePlace(piece.choice, piece.low + place))
        best[piece.stage][kind] = min(found, best[piece.stage].get(kind, _NOWHERE))
    return best


def _cheapest(relaxation: Relaxation, best: Sequence[Mapping[Kind, Priced]], on_accelerator: bool) -> list[Priced]:
    """Return the best place of each stage on one side; `_NOWHERE` for a stage that cannot be there."""
    found = []
    for stage, kinds in zip(relaxation.problem.stages, best, strict=True):
        side = (
            priced for priced in kinds.values() if stage.choices[priced.place.choice].on_accelerator == on_accelerator
        )
        found.append(min(side, default=_NOWHERE))
    return found


def _match_totals(relaxation: Relaxation, relaxed: Relaxed, best: Sequence[Mapping[Kind, Priced]]) -> list[StagePlace]:
    """Return a placement with each kind of choice as often as in the solution, rounded down.

    The remaining stages take the kind of choice that has the largest share in them.
    """
    weights = relaxation.weights(relaxed)
    left = {kind: int(total + 1e-6) for kind, total in relaxation.totals(relaxed).items()}
    # Of equal weights the first stages come first, so that stages of a kind follow each other.
    wanted = sorted(weights, key=lambda pair: (-round(weights[pair], 6), pair[0]))
    found: dict[int, StagePlace] = {}
    for again in (False, True):
        for stage, kind in wanted:
            if stage not in found and (again or left.get(kind, 1) > 0):
                left[kind] = left.get(kind, 1) - 1
                found[stage] = best[stage][kind].place
    return [found[stage] for stage in range(len(best))]


class CheapestSides:
    """The cheapest side of each stage, by how many stages are on the GPU: dynamic programming over the stages.

    Args:
        host: float64 [stages], the cost of each stage on the host; infinite where it cannot be there.
        gpu: float64 [stages], the same on the GPU.
        switch_cost: added for each stage on the other side than the stage before.
        from_host: whether the stream begins and ends on the host.
    """

    def __init__(
        self, host: NDArray[np.float64], gpu: NDArray[np.float64], switch_cost: float, *, from_host: bool
    ) -> None:
        stages, at_ends = len(host), switch_cost if from_host else 0.0
        # By the side of the last stage and the number of stages on the GPU so far.
        costs = np.full((2, stages + 1), np.inf)
        costs[0, 0] = 0.0
        self._crossed = np.zeros((stages, 2, stages + 1), dtype=bool)
        for stage in range(stages):
            over = costs[::-1] + (switch_cost if stage else at_ends)
            self._crossed[stage] = over < costs
            costs = np.minimum(costs, over)
            costs[0] += host[stage]
            costs[1, 1:] = costs[1, :-1] + gpu[stage]
            costs[1, 0] = np.inf
        self._costs = costs + np.asarray([[0.0], [at_ends]])

    def of(self, count: int) -> tuple[float, list[bool]] | None:
        """Return (cost, whether each stage is on the GPU) with `count` stages on it; None where that cannot be."""
        if not 0 <= count < self._costs.shape[1]:
            return None
        side, left = int(np.argmin(self._costs[:, count])), count
        cost = float(self._costs[side, count])
        if not np.isfinite(cost):
            return None
        found = []
        for crossed in self._crossed[::-1]:
            found.append(side == 1)
            left -= side
            side ^= int(crossed[side, left])
        return cost, found[::-1]


class Improver:
    """Changes the numbers of groups on the accelerator, not the choices: fewer if it is too full, more where that pays.

    A step goes from one vertex of the lower convex hull of a choice's costs to the next, since several groups together
    can gain more than each alone if the costs are not convex. The step with the best cost for its bytes comes first. If
    a step does not fit, the number of groups is taken that gains most in the free memory.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        # The choices of the placement that is improved.
        self._choices: list[Choice] = []
        self._vertices: dict[Choice, list[int]] = {}

    def improve(self, places: Sequence[StagePlace]) -> list[StagePlace]:
        """Return the placement with other numbers of groups. It may still not fit."""
        counts = [place.groups for place in places]
        self._choices = made_choices(self._problem, places)
        free_bytes = self._problem.gpu_capacity_bytes - evaluate(self._problem, places).gpu_bytes
        free_bytes = self._shrink(counts, free_bytes)
        if free_bytes > 0:
            self._grow(counts, free_bytes)
        return [StagePlace(place.choice, count) for place, count in zip(places, counts, strict=True)]

    def _shrink(self, counts: list[int], free_bytes: int) -> int:
        heap = [step for stage, groups in enumerate(counts) for step in self._down(stage, groups)]
        heapq.heapify(heap)
        while heap and free_bytes < 0:
            _, stage, after = heapq.heappop(heap)
            free_bytes += (counts[stage] - after) * self._problem.stages[stage].group_bytes
            counts[stage] = after
            for step in self._down(stage, after):
                heapq.heappush(heap, step)
        return free_bytes

    def _grow(self, counts: list[int], free_bytes: int) -> None:
        heap = [step for stage, groups in enumerate(counts) for step in self._up(stage, groups)]
        heapq.heapify(heap)
        while heap:
            _, stage, after = heapq.heappop(heap)
            size = self._problem.stages[stage].group_bytes
            if (after - counts[stage]) * size > free_bytes:
                after = self._filling(stage, counts[stage], free_bytes)
            if after == counts[stage]:
                continue
            free_bytes -= (after - counts[stage]) * size
            counts[stage] = after
            for step in self._up(stage, after):
                heapq.heappush(heap, step)

    def _down(self, stage: int, groups: int) -> list[tuple[float, int, int]]:
        """Return [(cost for its bytes, stage, groups after)] of the next step down; empty where there is none."""
        choice, hull = self._choices[stage], self._hull(self._choices[stage])
        below = bisect_left(hull, groups)
        if below == 0:
            return []
        after = hull[below - 1]
        return [((choice.cost(after) - choice.cost(groups)) / (groups - after) / self._size(stage), stage, after)]

    def _up(self, stage: int, groups: int) -> list[tuple[float, int, int]]:
        """Return [(cost for its bytes, stage, groups after)] of the next step up; empty where none gains."""
        choice, hull = self._choices[stage], self._hull(self._choices[stage])
        above = bisect_right(hull, groups)
        if above == len(hull):
            return []
        after = hull[above]
        change = choice.cost(after) - choice.cost(groups)
        return [(change / (after - groups) / self._size(stage), stage, after)] if change < 0 else []

    def _filling(self, stage: int, groups: int, free_bytes: int) -> int:
        """Return the best number of groups from `groups` on that takes at most `free_bytes` more."""
        choice = self._choices[stage]
        most = groups + free_bytes // self._size(stage)
        return groups + int(np.argmin(choice.costs[groups - choice.first : most - choice.first + 1]))

    def _hull(self, choice: Choice) -> list[int]:
        """Return the vertices of the choice's lower hull, as numbers of groups."""
        if choice not in self._vertices:
            self._vertices[choice] = (lower_hull(choice.costs) + choice.first).tolist()
        return self._vertices[choice]

    def _size(self, stage: int) -> int:
        return max(1, self._problem.stages[stage].group_bytes)


class _Bundle(NamedTuple):
    """A change made in several stages: their new places, the total cost and the total bytes on the accelerator."""

    places: dict[int, StagePlace]
    cost: float
    size: int


def swap_choices(
    problem: PlacementProblem, places: Sequence[StagePlace], options: Sequence[Sequence[StagePlace]]
) -> list[StagePlace]:
    """Change stages to one of their `options`, two bundles of changes at a time, as long as that lowers the cost.

    Where the attention and predictors of a few stages decide how well the GPU is filled, single changes don't help: two
    stages give up their predictors on the GPU so that the attention of a third fits. So the same change is bundled over
    the stages where it costs least, and all pairs of bundles are compared at once.
    """
    current, totals = list(places), evaluate(problem, places)
    for _ in range(_MOST_SWAPS):
        for changed in _best_pairs(_bundles(problem, current, options), problem.gpu_capacity_bytes - totals.gpu_bytes):
            after = [changed.get(stage, place) for stage, place in enumerate(current)]
            found = evaluate(problem, after)
            # Bundles leave out transfers, the host's memory, and what the stage before hides; this counts them.
            if found.fits(problem) and found.cost < totals.cost:
                current, totals = after, found
                break
        else:
            return current
    return current


def _bundles(
    problem: PlacementProblem, places: Sequence[StagePlace], options: Sequence[Sequence[StagePlace]]
) -> list[_Bundle]:
    """Return bundles of the one, two, … cheapest changes of each kind; the first bundle of all is empty."""
    kinds: dict[tuple[int, int, bool], list[tuple[float, int, int, StagePlace]]] = {}
    choices = made_choices(problem, places)
    for number, (stage, now) in enumerate(zip(problem.stages, places, strict=True)):
        is_early = number + 1 < len(choices) and choices[number + 1].predicts_early
        for place in options[number]:
            if place == now:
                continue
            before, after = choices[number], stage.choices[place.choice]
            after = after.before_early if is_early else after
            size = after.gpu_bytes - before.gpu_bytes + (place.groups - now.groups) * stage.group_bytes
            cost = after.cost(place.groups) - before.cost(now.groups)
            whole = place.groups == after.last
            kinds.setdefault((now.choice, place.choice, whole), []).append((cost, size, number, place))
    bundles = [_Bundle({}, 0.0, 0)]
    for changes in kinds.values():
        together = bundles[0]
        for cost, size, number, place in sorted(changes, key=lambda change: change[:3])[:_MOST_ALIKE]:
            together = _Bundle({**together.places, number: place}, together.cost + cost, together.size + size)
            bundles.append(together)
    return bundles


def _best_pairs(bundles: Sequence[_Bundle], free_bytes: int) -> list[dict[int, StagePlace]]:
    """Return the changes of the pairs of bundles that fit and lower the cost, the best pair first."""
    costs = np.asarray([bundle.cost for bundle in bundles])
    sizes = np.asarray([bundle.size for bundle in bundles], dtype=np.float64)
    together = np.where(sizes[:, None] + sizes <= free_bytes, costs[:, None] + costs, 0.0)
    found = []
    for pair in np.argsort(together, axis=None)[:_MOST_TRIED]:
        first, second = (bundles[int(number)] for number in np.unravel_index(pair, together.shape))
        if together.flat[pair] < -1e-12 * float(np.abs(costs).max()) and not first.places.keys() & second.places.keys():
            found.append({**first.places, **second.places})
    return found
