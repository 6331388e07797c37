"""Where boxes and bends stand from left to right, in their order, and where edges end at boxes. In pixels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from picompile.viewer.levels import Bend, Chain, Edge, Item, Rows

_GAP = 18.0
_PORT_STEP = 38.0
_SWEEPS = 120

# How strongly neighbours pull at each other, by how many of the two are bends. A long edge goes around; the boxes that
# it joins should not leave their column for its sake.
_PULLS = (1.0, 0.005, 1.0)

Ports = Mapping[Edge, tuple[float, float]]
_Link = tuple[Item, float]


def ports_of(chains: Sequence[Chain], rows: Rows, widths: Mapping[Item, float]) -> Ports:
    """Where each edge leaves its source and reaches its target, from their centers: side by side, in order."""
    order = {item: number for row in rows for number, item in enumerate(row)}
    starts = _side_by_side({chain.edge: (chain.edge[0], order[chain.items[1]]) for chain in chains}, widths)
    ends = _side_by_side({chain.edge: (chain.edge[1], order[chain.items[-2]]) for chain in chains}, widths)
    return {chain.edge: (starts[chain.edge], ends[chain.edge]) for chain in chains}


def _side_by_side(sides: Mapping[Edge, tuple[str, int]], widths: Mapping[Item, float]) -> dict[Edge, float]:
    at: dict[str, list[Edge]] = {}
    for edge, (name, _) in sides.items():
        at.setdefault(name, []).append(edge)
    found = {}
    for name, edges in at.items():
        step = min(_PORT_STEP, widths[name] / (len(edges) + 1))
        for number, edge in enumerate(sorted(edges, key=lambda edge: sides[edge][1])):
            found[edge] = step * (number - (len(edges) - 1) / 2)
    return found


def centers_of(rows: Rows, chains: Sequence[Chain], ports: Ports, widths: Mapping[Item, float]) -> dict[Item, float]:
    """The center of each box and bend: where its neighbours are, as far as those beside it allow."""
    links = _links(chains, ports)
    centers: dict[Item, float] = {}
    for row in rows:
        centers.update(_spread(row, dict.fromkeys(row, 0.0), widths, dict.fromkeys(row, 1.0)))
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            pulls = {item: _pull(item, links.get(item, ()), centers) for item in row}
            wanted = {item: pull[0] for item, pull in pulls.items()}
            centers.update(_spread(row, wanted, widths, {item: pull[1] for item, pull in pulls.items()}))
    _straighten(rows, chains, widths, centers)
    return centers


def _links(chains: Iterable[Chain], ports: Ports) -> dict[Item, list[_Link]]:
    """For each box and bend, those it is joined to, and how far right of them it stands if all is straight."""
    links: dict[Item, list[_Link]] = {}
    for chain in chains:
        start, end = ports[chain.edge]
        shifts = [start, *[0.0] * (len(chain.bends) - 1), -end] if chain.bends else [start - end]
        for (upper, lower), shift in zip(pairwise(chain.items), shifts, strict=True):
            links.setdefault(lower, []).append((upper, shift))
            links.setdefault(upper, []).append((lower, -shift))
    return links


def _pull(item: Item, links: Sequence[_Link], centers: Mapping[Item, float]) -> tuple[float, float]:
    """Where the neighbours want a box or a bend to be, and how strongly."""
    if not links:
        return centers[item], 0.1
    pulls = [_PULLS[isinstance(item, Bend) + isinstance(other, Bend)] for other, _ in links]
    wanted = sum((centers[other] + shift) * pull for (other, shift), pull in zip(links, pulls, strict=True))
    return wanted / sum(pulls), sum(pulls)


def _spread(
    row: Sequence[Item], wanted: Mapping[Item, float], widths: Mapping[Item, float], weights: Mapping[Item, float]
) -> dict[Item, float]:
    """The centers in the order of `row` that keep their distances and are nearest to the wanted ones.

    With the distances taken off, that is isotonic regression: neighbours in the wrong order share their weighted mean.
    """
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (widths[left] + widths[right]) / 2 + _GAP)
    blocks: list[tuple[float, float, int]] = []
    for item, offset in zip(row, offsets, strict=True):
        mean, weight, count = wanted[item] - offset, weights[item], 1
        while blocks and blocks[-1][0] > mean:
            other, other_weight, other_count = blocks.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        blocks.append((mean, weight, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return {item: mean + offset for item, mean, offset in zip(row, means, offsets, strict=True)}


def _straighten(rows: Rows, chains: Iterable[Chain], widths: Mapping[Item, float], centers: dict[Item, float]) -> None:
    """Puts all bends of an edge below one another where the boxes beside them leave a way."""
    left_of = {right: left for row in rows for left, right in pairwise(row)}
    right_of = {left: right for row in rows for left, right in pairwise(row)}

    def gap(item: Item, other: Item) -> float:
        return (widths[item] + widths[other]) / 2 + _GAP

    for chain in chains:
        bends = chain.bends
        least = max((centers[x] + gap(bend, x) for bend in bends if (x := left_of.get(bend))), default=-math.inf)
        most = min((centers[x] - gap(bend, x) for bend in bends if (x := right_of.get(bend))), default=math.inf)
        if len(bends) > 1 and least <= most:
            wanted = sum(centers[bend] for bend in bends) / len(bends)
            centers.update({bend: min(max(wanted, least), most) for bend in bends})
