"""From a placement to a better one by changing the choices of a few stages at a time.

Where attention and predictors of a few stages more or less decide how well the GPU is filled, single changes don't
help: two stages give up their predictors there, and a third can have its attention. So changes of a kind are bundled,
those of the stages where they cost least, and all pairs of bundles are compared at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from picompile.placement.program import Place, Program, evaluate

_MOST_EXCHANGES = 30
_MOST_ALIKE = 8
# Of the pairs that gain most, how many are looked at: some would change a stage twice.
_MOST_TRIED = 30


class _Bundle(NamedTuple):
    """Changes of several stages, what they cost together and what they take on the GPU."""

    places: dict[int, Place]
    cost: float
    size: int


def exchange(program: Program, places: Sequence[Place], options: Sequence[Sequence[Place]]) -> list[Place]:
    """Changes stages to one of their `options`, two bundles at a time, as long as that gains."""
    current, totals = list(places), evaluate(program, places)
    for _ in range(_MOST_EXCHANGES):
        for changed in _best_pairs(_bundles(program, current, options), program.gpu_capacity_bytes - totals.gpu_bytes):
            after = [changed.get(stage, place) for stage, place in enumerate(current)]
            found = evaluate(program, after)
            # Sides and the host are only counted here.
            if found.fits(program) and found.cost < totals.cost:
                current, totals = after, found
                break
        else:
            return current
    return current


def _bundles(program: Program, places: Sequence[Place], options: Sequence[Sequence[Place]]) -> list[_Bundle]:
    """The best changes of each kind, one to some of them; and none at all."""
    kinds: dict[tuple[int, int, int], list[tuple[float, int, int, Place]]] = {}
    for number, (stage, now) in enumerate(zip(program.stages, places, strict=True)):
        for place in options[number]:
            if place == now:
                continue
            before, after = stage.choices[now.choice], stage.choices[place.choice]
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


def _best_pairs(bundles: Sequence[_Bundle], free_bytes: int) -> list[dict[int, Place]]:
    """What pairs of bundles change that fit and gain, the best first."""
    costs = np.asarray([bundle.cost for bundle in bundles])
    sizes = np.asarray([bundle.size for bundle in bundles], dtype=np.float64)
    together = np.where(sizes[:, None] + sizes <= free_bytes, costs[:, None] + costs, 0.0)
    found = []
    for pair in np.argsort(together, axis=None)[:_MOST_TRIED]:
        first, second = (bundles[int(number)] for number in np.unravel_index(pair, together.shape))
        if together.flat[pair] < -1e-12 * float(np.abs(costs).max()) and not first.places.keys() & second.places.keys():
            found.append({**first.places, **second.places})
    return found
