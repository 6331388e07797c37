"""Pieces of choices, and the pieces that prices rule out.

A piece is a range of one choice's numbers of groups, with the lower convex hull of the costs in it: that is all of them
that a linear problem can express. Costs need not be convex in the number of groups: a transfer that is saved with the
last group makes a step, a GPU that is the slower side makes a bend. Within a range the hull may be below the costs;
once a range is split where it matters, hull and costs agree there.

The duals of a solved relaxation put a price on each byte of the devices and on each piece. With these, the choices of a
stage can be compared by themselves, and the sum of the best is a bound on every placement (Lagrangian relaxation). A
choice that is dearer than the best of its stage by more than the difference of bound and best known placement is in no
better placement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picompile.placement.problem import Choice, PlacementProblem, PlacementStage

# As a share of the cost: the most that rounding of duals and sums may come to.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Piece:
    """The numbers of groups from `low` to `high` of one choice. `at` and `value` are the hull's vertices.

    An `early` piece has the costs that the choice has before a stage that predicts early, and needs one behind it.
    """

    stage: int
    choice: int
    low: int
    high: int
    at: NDArray[np.float64]
    value: NDArray[np.float64]
    early: bool = False

    @property
    def single(self) -> bool:
        """Whether it is a single number of groups."""
        return self.low == self.high

    def hull(self, groups: float) -> float:
        """Return the hull's value at `groups`."""
        return float(np.interp(groups, self.at, self.value))

    def segment(self, groups: float) -> int:
        """Return the number of the hull's segment that contains `groups`."""
        return int(np.clip(np.searchsorted(self.at, groups, side="right") - 1, 0, len(self.at) - 2))

    def line(self, segment: int) -> tuple[float, float]:
        """Return (value at no groups, slope) of the line through a segment, which no cost of the piece is below."""
        run = self.at[segment + 1] - self.at[segment]
        slope = (self.value[segment + 1] - self.value[segment]) / run
        return float(self.value[segment] - slope * self.at[segment]), float(slope)


def make_piece(stage: int, number: int, choice: Choice, low: int, high: int, early: bool = False) -> Piece:
    """Return the piece of choice `number` of a stage from `low` to `high` groups; `choice` has the costs to take."""
    costs = choice.costs[low - choice.first : high - choice.first + 1]
    kept = lower_hull(costs)
    return Piece(
        stage, choice=number, low=low, high=high, at=(low + kept).astype(np.float64), value=costs[kept], early=early
    )


def choice_of(problem: PlacementProblem, piece: Piece) -> Choice:
    """Return the choice that a piece is of, with the costs that the piece has."""
    choice = problem.stages[piece.stage].choices[piece.choice]
    return choice.before_early if piece.early else choice


def first_pieces(problem: PlacementProblem) -> list[Piece]:
    """Return every choice in up to three pieces: its fewest groups, its most, and all between; twice if it has early
    costs.

    Left out is what no best solution needs: what does not fit the GPU by itself; and, where the host could hold
    everything, groups beyond the cheapest number.
    """
    worst = sum(max(choice.host_bytes for choice in stage.choices) for stage in problem.stages)
    host_is_enough = worst <= problem.host_capacity_bytes
    pieces = []
    for stage_number, stage in enumerate(problem.stages):
        for number, choice, early in _variants(stage, stage_number + 1 < len(problem.stages)):
            last = choice.last
            if stage.group_bytes > 0:
                last = min(last, (problem.gpu_capacity_bytes - choice.gpu_bytes) // stage.group_bytes)
            if choice.gpu_bytes > problem.gpu_capacity_bytes or last < choice.first:
                continue
            if host_is_enough:
                last = choice.first + int(np.argmin(choice.costs[: last - choice.first + 1]))
            for low, high in _ranges(choice.first, last):
                pieces.append(make_piece(stage_number, number, choice, low, high, early))
    return pieces


def _variants(stage: PlacementStage, has_next: bool) -> Iterator[tuple[int, Choice, bool]]:
    """Yield (number, choice, whether it has its early costs) of all choices; the last stage has no use for those."""
    for number, choice in enumerate(stage.choices):
        yield number, choice, False
        if has_next and choice.early_costs is not None:
            yield number, choice.before_early, True


def split(problem: PlacementProblem, piece: Piece, groups: int) -> Iterator[Piece]:
    """Yield the piece as up to three, of which one is `groups` alone."""
    choice = choice_of(problem, piece)
    for low, high in ((piece.low, groups - 1), (groups, groups), (groups + 1, piece.high)):
        if low <= high:
            yield make_piece(piece.stage, number=piece.choice, choice=choice, low=low, high=high, early=piece.early)


def _ranges(first: int, last: int) -> Iterator[tuple[int, int]]:
    yield first, first
    if last - first > 1:
        yield first + 1, last - 1
    if last > first:
        yield last, last


def lower_hull(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of the vertices of the lower convex hull (Andrew 1979), both ends included."""
    if len(costs) < 3 or (np.diff(costs, 2) > 0).all():
        return np.arange(len(costs))
    kept: list[int] = []
    values = costs.tolist()
    for place, value in enumerate(values):
        while len(kept) > 1:
            before, middle = kept[-2], kept[-1]
            rise = (values[middle] - values[before]) * (place - before)
            if rise < (value - values[before]) * (middle - before):
                break
            kept.pop()
        kept.append(place)
    return np.asarray(kept, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Prices:
    """Duals in the problem's units of cost.

    Attributes:
        gpu_byte: price of a byte of the GPU, at least 0.
        host_byte: price of a byte of the host, at least 0.
        pieces: price of each piece beside its bytes: for the side that the stream is on, for predicting early or being
            before a stage that does, and for the limits on how many stages choose alike.
        given: the part of the bound that these limits contribute by themselves.
        sides: float64 [stages], the part of `pieces` for having the stream on the GPU. It stands for the cost of
            transfers.
    """

    gpu_byte: float
    host_byte: float
    pieces: Sequence[float]
    given: float
    sides: NDArray[np.float64]


def remaining(problem: PlacementProblem, pieces: Sequence[Piece], prices: Prices, best_cost: float) -> list[Piece]:
    """Return the pieces without numbers of groups that are in no placement of less cost than `best_cost`."""
    best, of_pieces = _stage_best(problem, pieces, prices)
    slack = best_cost - _bound(problem, best, prices) + _ROUNDING * np.abs(best).sum()
    return [
        part
        for piece, values in zip(pieces, of_pieces, strict=True)
        for part in _kept(problem, piece, values, best, slack)
    ]


def priced(problem: PlacementProblem, piece: Piece, prices: Prices, beside: float) -> NDArray[np.float64]:
    """Return the cost of each number of groups of a piece with everything that has a price: float64 [high - low + 1].

    `beside` is the price of the piece beside its bytes.
    """
    stage, choice = problem.stages[piece.stage], choice_of(problem, piece)
    moved = np.arange(piece.low, piece.high + 1) * float(stage.group_bytes)
    values = choice.costs[piece.low - choice.first : piece.high - choice.first + 1]
    bytes_price = prices.gpu_byte * (choice.gpu_bytes + moved) + prices.host_byte * (choice.host_bytes - moved)
    return values + bytes_price + beside


def _kept(
    problem: PlacementProblem, piece: Piece, values: NDArray[np.float64], best: NDArray[np.float64], slack: float
) -> Iterator[Piece]:
    kept = np.flatnonzero(values <= best[piece.stage] + slack)
    if len(kept) == len(values):
        yield piece
    elif len(kept):
        choice = choice_of(problem, piece)
        for run in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1):
            low, high = (piece.low + int(run[end]) for end in (0, -1))
            yield make_piece(piece.stage, number=piece.choice, choice=choice, low=low, high=high, early=piece.early)


def _bound(problem: PlacementProblem, best: NDArray[np.float64], prices: Prices) -> float:
    capacities = prices.gpu_byte * problem.gpu_capacity_bytes + prices.host_byte * problem.host_capacity_bytes
    return float(best.sum()) - capacities + prices.given


def _stage_best(
    problem: PlacementProblem, pieces: Sequence[Piece], prices: Prices
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Return (the least priced cost of each stage, float64 [stages]; the priced costs of every piece)."""
    best, found = np.full(len(problem.stages), np.inf), []
    for piece, beside in zip(pieces, prices.pieces, strict=True):
        found.append(priced(problem, piece, prices, beside))
        best[piece.stage] = min(best[piece.stage], float(found[-1].min()))
    return best, found
