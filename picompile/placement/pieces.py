"""Ranges of a choice, with the lower convex hull of its costs: what a linear program can know of them.

Costs need not be convex in the number of groups: an exchange that is saved with the last group makes a step, a GPU
that is the slower side makes a bend. On a single range the hull is below the costs; once a range is cut where it
matters, hull and costs agree there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from picompile.placement.program import Choice, Program


class Region(Enum):
    """Where a piece lies among those of its choice, as far as they were cut at a bend."""

    BELOW = "below"
    BETWEEN = "between"
    ABOVE = "above"


@dataclass(frozen=True, eq=False)
class Piece:
    """The numbers of groups from `low` to `high` of one choice. `at` and `value` are the hull's vertices."""

    stage: int
    choice: int
    low: int
    high: int
    at: NDArray[np.float64]
    value: NDArray[np.float64]
    region: Region = Region.BELOW

    @property
    def single(self) -> bool:
        """Whether there is nothing to choose in it."""
        return self.low == self.high

    def hull(self, groups: float) -> float:
        """The hull's value."""
        return float(np.interp(groups, self.at, self.value))

    def segment(self, groups: float) -> int:
        """The number of the hull's segment that lies over `groups`."""
        return int(np.clip(np.searchsorted(self.at, groups, side="right") - 1, 0, len(self.at) - 2))

    def line(self, segment: int) -> tuple[float, float]:
        """(value at no groups, slope) of the line through a segment, which no cost of the piece is below."""
        run = self.at[segment + 1] - self.at[segment]
        slope = (self.value[segment + 1] - self.value[segment]) / run
        return float(self.value[segment] - slope * self.at[segment]), float(slope)


def make_piece(stage: int, number: int, choice: Choice, low: int, high: int, region: Region = Region.BELOW) -> Piece:
    """The piece of `choice` from `low` to `high` groups."""
    costs = choice.costs[low - choice.first : high - choice.first + 1]
    kept = lower_hull(costs)
    return Piece(stage, number, low, high, (low + kept).astype(np.float64), costs[kept], region)


def first_pieces(program: Program) -> list[Piece]:
    """Every choice in pieces: no group on the GPU, some, all that can be. Left out is what can be in no best solution.

    That is what no GPU of the capacity holds; and, where the host holds everything, groups beyond the cheapest number.
    """
    worst = sum(max(choice.host_bytes for choice in stage.choices) for stage in program.stages)
    host_is_enough = worst <= program.host_capacity_bytes
    pieces = []
    for stage_number, stage in enumerate(program.stages):
        for number, choice in enumerate(stage.choices):
            last = choice.last
            if stage.group_bytes > 0:
                last = min(last, (program.gpu_capacity_bytes - choice.gpu_bytes) // stage.group_bytes)
            if choice.gpu_bytes > program.gpu_capacity_bytes or last < choice.first:
                continue
            if host_is_enough:
                last = choice.first + int(np.argmin(choice.costs[: last - choice.first + 1]))
            for low, high in _ranges(choice.first, last):
                pieces.append(make_piece(stage_number, number, choice, low, high))
    return pieces


def split(program: Program, piece: Piece, groups: int) -> Iterator[Piece]:
    """The piece as up to three, of which one is `groups` alone."""
    choice = program.stages[piece.stage].choices[piece.choice]
    for low, high in ((piece.low, groups - 1), (groups, groups), (groups + 1, piece.high)):
        if low <= high:
            yield make_piece(piece.stage, piece.choice, choice, low, high, piece.region)


def cut_at_bends(program: Program, piece: Piece, tolerance: float) -> Iterator[Piece]:
    """The piece, cut where its costs bend the other way, if its hull is further below them than `tolerance`.

    Then few numbers of groups are any good: those before the bend, and those after it. How many layers are on which
    side is a number to branch on. What lies between is cut on until hull and costs are close.
    """
    choice = program.stages[piece.stage].choices[piece.choice]
    worst, below = _worst(piece, choice)
    if below <= tolerance:
        yield piece
        return
    segment = piece.segment(worst)
    low, high = int(piece.at[segment]), int(piece.at[segment + 1])
    yield make_piece(piece.stage, piece.choice, choice, piece.low, low, Region.BELOW)
    between = make_piece(piece.stage, piece.choice, choice, low + 1, high - 1, Region.BETWEEN)
    yield from _close(between, choice, tolerance)
    yield make_piece(piece.stage, piece.choice, choice, high, piece.high, Region.ABOVE)


def _close(piece: Piece, choice: Choice, tolerance: float) -> Iterator[Piece]:
    worst, below = _worst(piece, choice)
    if below <= tolerance:
        yield piece
        return
    for low, high in ((piece.low, worst), (worst + 1, piece.high)):
        yield from _close(make_piece(piece.stage, piece.choice, choice, low, high, piece.region), choice, tolerance)


def _worst(piece: Piece, choice: Choice) -> tuple[int, float]:
    """(the number of groups at which the hull is furthest below the costs, how far)."""
    costs = choice.costs[piece.low - choice.first : piece.high - choice.first + 1]
    below = costs - np.interp(np.arange(piece.low, piece.high + 1), piece.at, piece.value)
    worst = int(np.argmax(below))
    return piece.low + worst, float(below[worst])


def _ranges(first: int, last: int) -> Iterator[tuple[int, int]]:
    yield first, first
    if last - first > 1:
        yield first + 1, last - 1
    if last > first:
        yield last, last


def lower_hull(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places of the vertices of the lower convex hull (Andrew 1979), the ends among them."""
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
