"""What is left to choose once a relaxation is solved: what its prices do not rule out.

The relaxation's duals put a price on each byte of the devices and on each choice. With these, a stage's choices
can be compared by themselves, and the sum of the best is a bound on every placement (Lagrange). A choice that is dearer
than its stage's best by more than what lies between bound and the best known placement is in no better placement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picompile.placement.pieces import Piece, make_piece
from picompile.placement.program import Program

# Of the cost: what rounding of duals and sums may come to.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Prices:
    """Duals in the program's units: what a byte of each device costs, at least 0, and each piece beside its bytes.

    `pieces` has the price of each piece: of the side that the stream is on, and of what is given of how many stages
    choose alike. `given` is what these prices come to by themselves. `sides` float64 [stages] is what there is in
    `pieces` for having the stream on the GPU, so that transfers cost nothing beside.
    """

    gpu_byte: float
    host_byte: float
    pieces: Sequence[float]
    given: float
    sides: NDArray[np.float64]


def lagrange_bound(program: Program, pieces: Sequence[Piece], prices: Prices) -> float:
    """A cost that no placement within `pieces` is below, where `prices` are the duals of a relaxation."""
    best, _ = _stage_best(program, pieces, prices)
    return _bound(program, best, prices)


def remaining(program: Program, pieces: Sequence[Piece], prices: Prices, best_cost: float) -> list[Piece]:
    """The pieces without numbers of groups that are in no placement of less cost than `best_cost`."""
    best, priced = _stage_best(program, pieces, prices)
    slack = best_cost - _bound(program, best, prices) + _ROUNDING * np.abs(best).sum()
    return [
        part
        for piece, values in zip(pieces, priced, strict=True)
        for part in _kept(program, piece, values, best, slack)
    ]


def _kept(
    program: Program, piece: Piece, values: NDArray[np.float64], best: NDArray[np.float64], slack: float
) -> Iterator[Piece]:
    kept = np.flatnonzero(values <= best[piece.stage] + slack)
    if len(kept) == len(values):
        yield piece
    elif len(kept):
        choice = program.stages[piece.stage].choices[piece.choice]
        for run in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1):
            low, high = (piece.low + int(run[end]) for end in (0, -1))
            yield make_piece(piece.stage, piece.choice, choice, low, high, piece.region)


def _bound(program: Program, best: NDArray[np.float64], prices: Prices) -> float:
    capacities = prices.gpu_byte * program.gpu_capacity_bytes + prices.host_byte * program.host_capacity_bytes
    return float(best.sum()) - capacities + prices.given


def _stage_best(
    program: Program, pieces: Sequence[Piece], prices: Prices
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """(the least of each stage, float64 [stages]; the priced costs of every piece)."""
    best, found = np.full(len(program.stages), np.inf), []
    for piece, beside in zip(pieces, prices.pieces, strict=True):
        found.append(priced(program, piece, prices, beside))
        best[piece.stage] = min(best[piece.stage], float(found[-1].min()))
    return best, found


def priced(program: Program, piece: Piece, prices: Prices, beside: float) -> NDArray[np.float64]:
    """What each number of groups of a piece costs with all that has a price: float64 [high - low + 1].

    `beside` is what the piece costs beside its bytes.
    """
    stage = program.stages[piece.stage]
    choice = stage.choices[piece.choice]
    moved = np.arange(piece.low, piece.high + 1) * float(stage.group_bytes)
    values = choice.costs[piece.low - choice.first : piece.high - choice.first + 1]
    bytes_price = prices.gpu_byte * (choice.gpu_bytes + moved) + prices.host_byte * (choice.host_bytes - moved)
    return values + bytes_price + beside
