"""From a solution in fractions to placements near it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from picompile.placement.columns import Columns, Kind, Relaxed
from picompile.placement.prices import Prices, priced
from picompile.placement.program import Place, Program


class Priced(NamedTuple):
    """A place and what it costs at given prices."""

    price: float
    place: Place


_NOWHERE = Priced(np.inf, Place(-1, 0))


def round_relaxed(
    columns: Columns, relaxed: Relaxed, best: Sequence[Mapping[Kind, Priced]], sides: NDArray[np.float64]
) -> Iterator[list[Place]]:
    """Placements near a solution in fractions, of the `best_places` at its prices; they need not fit.

    In the first each kind of choice is made by as many stages as in the solution, by those that have most of it. In
    the others as many stages are on the GPU as in the solution, one more or one less: the cheapest at these prices, of
    which those of the `sides` are in the transfers' place.
    """
    yield _alike(columns, relaxed, best)
    host, gpu = (_cheapest(columns, best, on_gpu) for on_gpu in (False, True))
    by_count = _Sides(
        np.asarray([priced.price for priced in host]),
        np.asarray([priced.price for priced in gpu]) - sides,
        columns.program,
    )
    whole = int(columns.on_gpu(relaxed) + 1e-6)
    for count in (whole, whole + 1, whole - 1):
        chosen = by_count.cheapest(count)
        if chosen is not None:
            yield [(gpu if on_gpu else host)[stage].place for stage, on_gpu in enumerate(chosen)]


class _Sides:
    """The cheapest sides of all stages by how many are on the GPU, transfers counted: found stage by stage."""

    def __init__(self, host: NDArray[np.float64], gpu: NDArray[np.float64], program: Program) -> None:
        stages, switch = len(host), program.switch_cost
        # By side and number on the GPU; nothing is dearer than what cannot be.
        costs = np.full((2, stages + 1), np.inf)
        costs[0, 0] = 0.0
        self._came_over = np.zeros((stages, 2, stages + 1), dtype=bool)
        for stage in range(stages):
            over = costs[::-1] + (switch if stage or program.from_host else 0.0)
            self._came_over[stage] = over < costs
            costs = np.minimum(costs, over)
            costs[0] += host[stage]
            costs[1, 1:] = costs[1, :-1] + gpu[stage]
            costs[1, 0] = np.inf
        self._costs = costs + np.asarray([[0.0], [switch if program.from_host else 0.0]])

    def cheapest(self, count: int) -> list[bool] | None:
        """Whether each stage is on the GPU, of `count` that are; None where it cannot be so many."""
        if not 0 <= count < self._costs.shape[1] or not np.isfinite(self._costs[:, count]).any():
            return None
        side = int(np.argmin(self._costs[:, count]))
        found = []
        for came_over in self._came_over[::-1]:
            found.append(side == 1)
            count -= side
            side ^= int(came_over[side, count])
        return found[::-1]


def best_places(columns: Columns, prices: Prices) -> list[dict[Kind, Priced]]:
    """Of each stage the best number of groups at these prices, by kind of choice."""
    best: list[dict[Kind, Priced]] = [{} for _ in columns.program.stages]
    for piece, kind, beside in zip(columns.pieces, columns.piece_kinds, prices.pieces, strict=True):
        values = priced(columns.program, piece, prices, beside)
        place = int(np.argmin(values))
        found = Priced(float(values[place]), Place(piece.choice, piece.low + place))
        best[piece.stage][kind] = min(found, best[piece.stage].get(kind, _NOWHERE))
    return best


def _cheapest(columns: Columns, best: Sequence[Mapping[Kind, Priced]], on_gpu: bool) -> list[Priced]:
    """Of each stage the best place on one side; at no price where there is none."""
    found = []
    for stage, kinds in zip(columns.program.stages, best, strict=True):
        side = (priced for priced in kinds.values() if stage.choices[priced.place.choice].on_gpu == on_gpu)
        found.append(min(side, default=_NOWHERE))
    return found


def _alike(columns: Columns, relaxed: Relaxed, best: Sequence[Mapping[Kind, Priced]]) -> list[Place]:
    """As many stages of each kind of choice as in the solution, in whole numbers."""
    weights = columns.weights(relaxed)
    left = {kind: int(total + 1e-6) for kind, total in columns.totals(relaxed).items()}
    # Of equal ones the first stages, so that those of a kind follow each other.
    wanted = sorted(weights, key=lambda pair: (-round(weights[pair], 6), pair[0]))
    found: dict[int, Place] = {}
    for again in (False, True):
        for stage, kind in wanted:
            if stage not in found and (again or left.get(kind, 1) > 0):
                left[kind] = left.get(kind, 1) - 1
                found[stage] = best[stage][kind].place
    return [found[stage] for stage in range(len(best))]
