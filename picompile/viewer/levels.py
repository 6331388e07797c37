"""The first half of a layout: on which level each box stands, and the bends of edges that cross a level."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Edge = tuple[str, str]


class Bend(NamedTuple):
    """Where an edge crosses a level: a box without a name."""

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
    """A level for each box, from 0 on: one below the lowest that it reads, or right above its first user."""
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
    """The edge with its bends."""
    source, target = edge
    return Chain(edge, tuple(Bend(edge, number) for number in range(level[source] + 1, level[target])))


def rows_of(level: Mapping[str, int], chains: Iterable[Chain]) -> list[list[Item]]:
    """What stands on each level, in the order of the graph."""
    rows: list[list[Item]] = [[] for _ in range(1 + max(level.values(), default=-1))]
    for name, number in level.items():
        rows[number].append(name)
    for chain in chains:
        for bend in chain.bends:
            rows[bend.level].append(bend)
    return rows
