"""From a solution in fractions to placements near it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from picompile.placement.columns import Columns, Kind, Relaxed
from picompile.placement.prices import Prices, priced
from picompile.placement.program import Place
from picompile.placement.sides import CheapestSides


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
    host_prices, gpu_prices = (np.asarray([found.price for found in of_side]) for of_side in (host, gpu))
    program = columns.program
    cheapest = CheapestSides(host_prices, gpu_prices - sides, program.switch_cost, from_host=program.from_host)
    whole = int(columns.on_gpu(relaxed) + 1e-6)
    for count in (whole, whole + 1, whole - 1):
        if (found := cheapest.of(count)) is not None:
            yield [(gpu if on_gpu else host)[stage].place for stage, on_gpu in enumerate(found[1])]


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
