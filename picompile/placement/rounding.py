"""From a solution in fractions to placements near it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from picompile.placement.columns import Columns, Kind, Relaxed
from picompile.placement.prices import Prices, priced
from picompile.placement.program import Place


class Priced(NamedTuple):
    """A place and what it costs at given prices."""

    price: float
    place: Place


_NOWHERE = Priced(np.inf, Place(-1, 0))


def round_relaxed(columns: Columns, relaxed: Relaxed, best: Sequence[Mapping[Kind, Priced]]) -> Iterator[list[Place]]:
    """Placements near a solution in fractions, of the `best_places` at its prices; they need not fit.

    In the first each kind of choice is made by as many stages as in the solution, by those that have most of it. In
    the others as many stages are on the GPU as in the solution, one more or one less: the first, the last, or those
    that gain most by it at the solution's prices.
    """
    yield _alike(columns, relaxed, best)
    host, gpu = (_cheapest(columns, best, on_gpu) for on_gpu in (False, True))
    in_order = list(range(len(best)))
    by_gain = sorted(in_order, key=lambda stage: gpu[stage].price - host[stage].price)
    whole = int(columns.on_gpu(relaxed) + 1e-6)
    for count in (whole, whole + 1, whole - 1):
        for order in (in_order, in_order[::-1], by_gain):
            chosen = set(order[: max(count, 0)])
            pairs = [(gpu[stage], host[stage]) if stage in chosen else (host[stage], gpu[stage]) for stage in in_order]
            yield [(first if first.price < np.inf else second).place for first, second in pairs]


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
