"""A layered layout of a directed graph: a box is below the boxes that it is computed from.

1. Levels: a box is one level below the lowest box that it reads; one that reads nothing is right above its first user.
2. Every level that an edge crosses gets a bend, a box without a name, so that edges keep clear of boxes.
3. Order inside of levels: sweeps by the mean of the neighbours' places; the order with the fewest crossings is kept.
4. Places: each box goes where its neighbours are, as far as those beside it allow, by isotonic regression. Then the
   bends of an edge move below one another where there is a way straight down.

Steps 1 to 3 are those of Sugiyama, Tagawa, Toda (1981), "Methods for visual understanding of hierarchical system
structures". All lengths are in pixels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

Edge = tuple[str, str]


class Bend(NamedTuple):
    """The place where an edge crosses a level; it is treated as a box without a name."""

    edge: Edge
    level: int


Item = str | Bend
Rows = Sequence[Sequence[Item]]


@dataclass(frozen=True)
class Chain:
    """An edge from box to box with its bends, one on each level between the two."""

    edge: Edge
    bends: tuple[Bend, ...]

    @property
    def items(self) -> list[Item]:
        """Source, bends and target."""
        return [self.edge[0], *self.bends, self.edge[1]]


def levels_of(names: Sequence[str], edges: Iterable[Edge]) -> dict[str, int]:
    """Return a level for each box, from 0 on: one below the lowest that it reads, or right above its first user."""
    above: dict[str, list[str]] = {name: [] for name in names}
    below: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        above[target].append(source)
        below[source].append(target)
    level: dict[str, int] = {}
    for name in names:
        level[name] = 1 + max((level[other] for other in above[name]), default=-1)
    for name in reversed(names):
        if not above[name] and below[name]:
            level[name] = min(level[other] for other in below[name]) - 1
    return level


def chain_of(edge: Edge, level: Mapping[str, int]) -> Chain:
    """Return the edge with its bends."""
    source, target = edge
    return Chain(edge, tuple(Bend(edge, number) for number in range(level[source] + 1, level[target])))


def rows_of(level: Mapping[str, int], chains: Iterable[Chain]) -> list[list[Item]]:
    """Return the boxes and bends of each level, in the order of the graph."""
    rows: list[list[Item]] = [[] for _ in range(1 + max(level.values(), default=-1))]
    for name, number in level.items():
        rows[number].append(name)
    for chain in chains:
        for bend in chain.bends:
            rows[bend.level].append(bend)
    return rows


# The order of boxes and bends inside of levels, such that few edges cross.


_ORDER_SWEEPS = 24

Neighbours = Mapping[Item, Sequence[Item]]


def ordered(rows: Rows, chains: Iterable[Chain]) -> Rows:
    """Return the order that has the fewest crossings among those that the sweeps come by."""
    above, below = _neighbours(rows, chains)
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(_ORDER_SWEEPS):
        if fewest == 0:
            break
        down = sweep % 2 == 0
        rows = _swept(rows, above if down else below, down=down)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _neighbours(rows: Rows, chains: Iterable[Chain]) -> tuple[Neighbours, Neighbours]:
    """Return for each box and bend the ones it is joined to on the next level above, and below."""
    above: dict[Item, list[Item]] = {item: [] for row in rows for item in row}
    below: dict[Item, list[Item]] = {item: [] for item in above}
    for chain in chains:
        for upper, lower in pairwise(chain.items):
            above[lower].append(upper)
            below[upper].append(lower)
    return above, below


def _swept(rows: Rows, towards: Neighbours, *, down: bool) -> Rows:
    """Return each row sorted by the mean place of the neighbours in the row that was sorted before it."""
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


# Where boxes and bends stand from left to right, in their order, and where edges end at boxes. In pixels.


_GAP = 18.0
_PORT_STEP = 38.0
_PLACES_SWEEPS = 120

# How strongly neighbours pull at each other, by how many of the two are bends. A long edge goes around; the boxes that
# it joins should not leave their column for its sake.
_PULLS = (1.0, 0.005, 1.0)

Ports = Mapping[Edge, tuple[float, float]]
_Link = tuple[Item, float]


def ports_of(chains: Sequence[Chain], rows: Rows, widths: Mapping[Item, float]) -> Ports:
    """Return where each edge leaves its source and reaches its target, from their centers: side by side, in order."""
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
    """Return the center of each box and bend: where its neighbours are, as far as those beside it allow."""
    links = _links(chains, ports)
    centers: dict[Item, float] = {}
    for row in rows:
        centers.update(_spread(row, dict.fromkeys(row, 0.0), widths, dict.fromkeys(row, 1.0)))
    for sweep in range(_PLACES_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            pulls = {item: _pull(item, links.get(item, ()), centers) for item in row}
            wanted = {item: pull[0] for item, pull in pulls.items()}
            centers.update(_spread(row, wanted, widths, {item: pull[1] for item, pull in pulls.items()}))
    _straighten(rows, chains, widths, centers)
    return centers


def _links(chains: Iterable[Chain], ports: Ports) -> dict[Item, list[_Link]]:
    """Return for each box and bend those it is joined to, and how far right of them it is with straight edges."""
    links: dict[Item, list[_Link]] = {}
    for chain in chains:
        start, end = ports[chain.edge]
        shifts = [start, *[0.0] * (len(chain.bends) - 1), -end] if chain.bends else [start - end]
        for (upper, lower), shift in zip(pairwise(chain.items), shifts, strict=True):
            links.setdefault(lower, []).append((upper, shift))
            links.setdefault(upper, []).append((lower, -shift))
    return links


def _pull(item: Item, links: Sequence[_Link], centers: Mapping[Item, float]) -> tuple[float, float]:
    """Return where the neighbours want a box or a bend to be, and how strongly."""
    if not links:
        return centers[item], 0.1
    pulls = [_PULLS[isinstance(item, Bend) + isinstance(other, Bend)] for other, _ in links]
    wanted = sum((centers[other] + shift) * pull for (other, shift), pull in zip(links, pulls, strict=True))
    return wanted / sum(pulls), sum(pulls)


def _spread(
    row: Sequence[Item], wanted: Mapping[Item, float], widths: Mapping[Item, float], weights: Mapping[Item, float]
) -> dict[Item, float]:
    """Return the centers in the order of `row` that keep their distances and are nearest to the wanted ones.

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
    """Put all bends of an edge below one another where the boxes beside them leave a way."""
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


_LEVEL_GAP = 42.0
# How far an edge runs straight into its box: the head of the arrow, and the name of the argument beside it.
_LANDING = 13.0
_BEND_WIDTH = 8.0

Point = tuple[float, float]
_Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class NodePosition:
    """The place of a box: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """The course of an edge from the bottom of one box to the top of another, straight down where points share x."""

    edge: Edge
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """A picture's geometry."""

    width: float
    height: float
    boxes: Mapping[str, NodePosition]
    routes: tuple[Route, ...]


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Iterable[Edge]) -> Layout:
    """Place boxes of `sizes` (width, height). Edges go from boxes to boxes that stand later in `sizes`."""
    edges = list(dict.fromkeys(edges))
    level = levels_of(list(sizes), edges)
    chains = [chain_of(edge, level) for edge in edges]
    rows = ordered(rows_of(level, chains), chains)
    widths = {item: sizes[item][0] if isinstance(item, str) else _BEND_WIDTH for row in rows for item in row}
    ports = ports_of(chains, rows, widths)
    centers = centers_of(rows, chains, ports, widths)
    left = min((centers[item] - widths[item] / 2 for item in centers), default=0.0)
    right = max((centers[item] + widths[item] / 2 for item in centers), default=0.0)
    centers = {item: center - left for item, center in centers.items()}
    spans = _spans([max((sizes[item][1] for item in row if isinstance(item, str)), default=0.0) for row in rows])
    boxes = {
        name: NodePosition(centers[name] - size[0] / 2, spans[level[name]][0], *size) for name, size in sizes.items()
    }
    routes = tuple(_route(chain, ports, boxes, centers, spans, level) for chain in chains)
    return Layout(right - left, spans[-1][1] if spans else 0.0, boxes, routes)


def _spans(heights: Iterable[float]) -> list[tuple[float, float]]:
    """Return the top and the bottom of each level."""
    spans, y = [], 0.0
    for height in heights:
        spans.append((y, y + height))
        y += height + _LEVEL_GAP
    return spans


def _route(
    chain: Chain,
    ports: Ports,
    boxes: Mapping[str, NodePosition],
    centers: Mapping[Item, float],
    spans: _Spans,
    level: Mapping[str, int],
) -> Route:
    source, target = chain.edge
    start, end = ports[chain.edge]
    x = centers[source] + start
    # Boxes of a level differ in height, and all edges leave the level at its bottom.
    points = [(x, boxes[source].y + boxes[source].height), (x, spans[level[source]][1])]
    for bend in chain.bends:
        points += [(centers[bend], spans[bend.level][0]), (centers[bend], spans[bend.level][1])]
    x, y = centers[target] + end, boxes[target].y
    return Route(chain.edge, (*points, (x, y - _LANDING), (x, y)))
