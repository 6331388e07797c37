"""A layered layout of a directed graph: what is computed stands below what it is computed from.

1. Levels: a box is one level below the lowest box it reads; what reads nothing stands right above its first user.
2. Every level that an edge crosses gets a bend, a box without a name, so that edges keep clear of boxes.
3. Order inside of levels: sweeps by the mean of the neighbours' places; the order with the fewest crossings is kept.
4. Places: each box goes where its neighbours are, as far as those beside it allow, by isotonic regression. Then the
   bends of an edge move below one another where there is a way straight down.

Steps 1 to 3 are those of Sugiyama, Tagawa, Toda (1981), "Methods for visual understanding of hierarchical system
structures". All lengths are in pixels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from picompile.viewer.levels import Chain, Edge, Item, chain_of, levels_of, rows_of
from picompile.viewer.order import ordered
from picompile.viewer.places import Ports, centers_of, ports_of

_GAP = 42.0
# How far an edge runs straight into its box: the head of the arrow, and the name of the argument beside it.
_LANDING = 13.0
_BEND_WIDTH = 8.0

Point = tuple[float, float]
_Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Place:
    """Where a box is: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """How an edge runs: from the bottom of one box to the top of another, straight down where two points share x."""

    edge: Edge
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """A picture's geometry."""

    width: float
    height: float
    boxes: Mapping[str, Place]
    routes: tuple[Route, ...]


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Iterable[Edge]) -> Layout:
    """Places boxes of `sizes` (width, height). Edges go from boxes to boxes that stand later in `sizes`."""
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
    boxes = {name: Place(centers[name] - size[0] / 2, spans[level[name]][0], *size) for name, size in sizes.items()}
    routes = tuple(_route(chain, ports, boxes, centers, spans, level) for chain in chains)
    return Layout(right - left, spans[-1][1] if spans else 0.0, boxes, routes)


def _spans(heights: Iterable[float]) -> list[tuple[float, float]]:
    """Top and bottom of each level."""
    spans, y = [], 0.0
    for height in heights:
        spans.append((y, y + height))
        y += height + _GAP
    return spans


def _route(
    chain: Chain,
    ports: Ports,
    boxes: Mapping[str, Place],
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
