"""The order of boxes and bends inside of levels, such that few edges cross."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from picompile.viewer.levels import Chain, Item, Rows

_SWEEPS = 24

Neighbours = Mapping[Item, Sequence[Item]]


def ordered(rows: Rows, chains: Iterable[Chain]) -> Rows:
    """The order that has the fewest crossings among those that the sweeps come by."""
    above, below = _neighbours(rows, chains)
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(_SWEEPS):
        if fewest == 0:
            break
        down = sweep % 2 == 0
        rows = _swept(rows, above if down else below, down=down)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _neighbours(rows: Rows, chains: Iterable[Chain]) -> tuple[Neighbours, Neighbours]:
    """What stands on the next level above, and below, and is joined."""
    above: dict[Item, list[Item]] = {item: [] for row in rows for item in row}
    below: dict[Item, list[Item]] = {item: [] for item in above}
    for chain in chains:
        for upper, lower in pairwise(chain.items):
            above[lower].append(upper)
            below[upper].append(lower)
    return above, below


def _swept(rows: Rows, towards: Neighbours, *, down: bool) -> Rows:
    """Each row sorted by the mean place of the neighbours in the row that was sorted before it."""
    place: dict[Item, float] = {item: float(number) for row in rows for number, item in enumerate(row)}
    result = list(rows)
    for number in range(len(rows)) if down else reversed(range(len(rows))):
        means = {item: _mean([place[other] for other in towards[item]], place[item]) for item in rows[number]}
        result[number] = sorted(rows[number], key=lambda item, means=means: means[item])  # type: ignore[misc]
        place.update({item: float(position) for position, item in enumerate(result[number])})
    return result


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(rows: Rows, below: Neighbours) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {item: number for number, item in enumerate(lower)}
        ends = [end for item in upper for end in sorted(place[other] for other in below[item])]
        total += sum(left > right for number, left in enumerate(ends) for right in ends[number + 1 :])
    return total
