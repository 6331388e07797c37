"""A layered layout of a directed graph: a box is below the boxes that it is computed from.

1. Levels: a box is one level below the lowest box that it reads; one that reads nothing is right above its first user.
2. Every level that an edge crosses gets a bend, a box without a name, so that edges keep clear of boxes.
3. Order inside of levels: sweeps by the mean of the neighbours' places; the order with the fewest crossings is kept.
4. Places: a linear program. It minimizes how far edges go sideways, and boxes beside each other keep their distance.

Steps 1 to 3 are those of Sugiyama, Tagawa, Toda (1981), "Methods for visual understanding of hierarchical system
structures", and step 4 is that of Gansner et al. (1993), "A technique for drawing directed graphs". All lengths are in
pixels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import highspy
import networkx as nx

Edge = tuple[str, str]


class Bend(NamedTuple):
    """The place where an edge crosses a level; it is treated as a box without a name."""

    edge: Edge
    level: int


Item = str | Bend
Rows = Sequence[Sequence[Item]]
Neighbours = Mapping[Item, Iterable[Item]]
Path = tuple[Item, ...]
"""A source, the bends of an edge, and its target."""
Ports = Mapping[Edge, tuple[float, float]]
"""An edge → where it leaves its source and reaches its target, from their centers."""
Point = tuple[float, float]

_ORDER_SWEEPS = 24

_GAP = 18.0
_PORT_STEP = 38.0
_LEVEL_GAP = 42.0
# How far an edge runs straight into its box: the head of the arrow, and the name of the argument beside it.
_LANDING = 13.0
_BEND_WIDTH = 8.0

# The cost of a pixel sideways, by how many of the two ends are bends. A long edge goes around; the boxes that it joins
# should not leave their column for its sake.
_COSTS = (1.0, 0.05, 1.0)
# The cost of a pixel away from the left edge of the picture, which decides between places that are as good.
_LEFT_COST = 1e-4


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
    # networkx has no type annotations.
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(sizes)
    graph.add_edges_from(edges)
    level = _levels(graph)
    paths = {edge: _path(edge, level) for edge in graph.edges}
    rows = _ordered(level, paths)
    widths = {item: _BEND_WIDTH if isinstance(item, Bend) else sizes[item][0] for row in rows for item in row}
    ports = _ports(paths, rows, widths)
    centers = _centers(rows, paths, ports, widths)
    heights = [max((sizes[item][1] for item in row if isinstance(item, str)), default=0.0) for row in rows]
    tops = [0.0, *accumulate(height + _LEVEL_GAP for height in heights)]
    boxes = {name: NodePosition(centers[name] - size[0] / 2, tops[level[name]], *size) for name, size in sizes.items()}
    spans = {item: (top, top + high) for row, top, high in zip(rows, tops, heights, strict=False) for item in row}
    routes = tuple(_route(edge, path, ports[edge], boxes, centers, spans) for edge, path in paths.items())
    width = max((center + widths[item] / 2 for item, center in centers.items()), default=0.0)
    return Layout(width, max(bottom for _, bottom in spans.values()) if spans else 0.0, boxes, routes)


def _levels(graph: Any) -> dict[str, int]:
    """Return a level for each box, from 0 on: one below the lowest that it reads, or right above its first user."""
    level = {name: number for number, names in enumerate(nx.topological_generations(graph)) for name in names}
    for name in graph:
        if not graph.pred[name] and graph.succ[name]:
            level[name] = min(level[user] for user in graph.succ[name]) - 1
    return {name: level[name] for name in graph}


def _path(edge: Edge, level: Mapping[str, int]) -> Path:
    source, target = edge
    return source, *(Bend(edge, number) for number in range(level[source] + 1, level[target])), target


def _ordered(level: Mapping[str, int], paths: Mapping[Edge, Path]) -> Rows:
    """Return the boxes and bends of each level in the order that has the fewest crossings among those tried."""
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(level)
    for path in paths.values():
        nx.add_path(graph, path)
    rows: list[list[Item]] = [[] for _ in range(1 + max(level.values(), default=-1))]
    for item in graph:
        rows[item.level if isinstance(item, Bend) else level[item]].append(item)
    tried: list[Rows] = [rows]
    for sweep in range(_ORDER_SWEEPS):
        down = sweep % 2 == 0
        tried.append(_swept(tried[-1], graph.pred if down else graph.succ, down=down))
    return min(tried, key=lambda rows: _crossings(rows, graph.succ))


def _swept(rows: Rows, towards: Neighbours, *, down: bool) -> Rows:
    """Return each row sorted by the mean place of the neighbours in the row that was sorted before it."""
    place = {item: float(number) for row in rows for number, item in enumerate(row)}
    result = list(rows)
    for number in range(len(rows)) if down else reversed(range(len(rows))):
        means = {item: fmean([place[other] for other in towards[item]] or [place[item]]) for item in rows[number]}
        result[number] = sorted(rows[number], key=means.__getitem__)
        place.update({item: float(position) for position, item in enumerate(result[number])})
    return result


def _crossings(rows: Rows, below: Neighbours) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {item: number for number, item in enumerate(lower)}
        ends = [end for item in upper for end in sorted(place[other] for other in below[item])]
        total += sum(left > right for number, left in enumerate(ends) for right in ends[number + 1 :])
    return total


def _ports(paths: Mapping[Edge, Path], rows: Rows, widths: Mapping[Item, float]) -> Ports:
    """Return where each edge leaves its source and reaches its target, from their centers: side by side, in order."""
    order = {item: number for row in rows for number, item in enumerate(row)}
    starts = _side_by_side({edge: (path[0], order[path[1]]) for edge, path in paths.items()}, widths)
    ends = _side_by_side({edge: (path[-1], order[path[-2]]) for edge, path in paths.items()}, widths)
    return {edge: (starts[edge], ends[edge]) for edge in paths}


def _side_by_side(sides: Mapping[Edge, tuple[Item, int]], widths: Mapping[Item, float]) -> dict[Edge, float]:
    at: dict[Item, list[Edge]] = {}
    for edge in sorted(sides, key=lambda edge: sides[edge][1]):
        at.setdefault(sides[edge][0], []).append(edge)
    found = {}
    for item, edges in at.items():
        step = min(_PORT_STEP, widths[item] / (len(edges) + 1))
        found.update({edge: step * (number - (len(edges) - 1) / 2) for number, edge in enumerate(edges)})
    return found


def _centers(rows: Rows, paths: Mapping[Edge, Path], ports: Ports, widths: Mapping[Item, float]) -> dict[Item, float]:
    """Return the center of each box and bend such that edges go sideways as little as their neighbours allow."""
    # highspy has no type annotations.
    make: Any = highspy.Highs
    solver = make()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    centers = {item: solver.addVariable(lb=widths[item] / 2, obj=_LEFT_COST) for row in rows for item in row}
    for left, right in (pair for row in rows for pair in pairwise(row)):
        solver.addConstr(centers[right] - centers[left] >= (widths[left] + widths[right]) / 2 + _GAP)
    for edge, path in paths.items():
        start, end = ports[edge]
        # How far right of the upper end the lower one is if the edge between them is straight.
        shifts = [start - end] if len(path) == 2 else [start, *[0.0] * (len(path) - 3), -end]
        for (upper, lower), shift in zip(pairwise(path), shifts, strict=True):
            cost = _COSTS[isinstance(upper, Bend) + isinstance(lower, Bend)]
            leftwards, rightwards = solver.addVariable(obj=cost), solver.addVariable(obj=cost)
            solver.addConstr(centers[lower] - centers[upper] + leftwards - rightwards == shift)
    solver.minimize()
    return {item: float(solver.val(center)) for item, center in centers.items()}


def _route(
    edge: Edge,
    path: Path,
    ports: tuple[float, float],
    boxes: Mapping[str, NodePosition],
    centers: Mapping[Item, float],
    spans: Mapping[Item, tuple[float, float]],
) -> Route:
    source, target = (boxes[name] for name in edge)
    leaves, reaches = (centers[name] + port for name, port in zip(edge, ports, strict=True))
    # Boxes of a level differ in height, and all edges leave the level at its bottom.
    points = [(leaves, source.y + source.height), (leaves, spans[edge[0]][1])]
    points += [(centers[bend], y) for bend in path[1:-1] for y in spans[bend]]
    return Route(edge, (*points, (reaches, target.y - _LANDING), (reaches, target.y)))
