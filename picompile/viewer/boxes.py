"""What a box of the picture says: one box for each node that depends on the tokens, with its weights inside.

Most nodes of a graph are weights and what is computed from them alone. Drawn as boxes they would hide the way of the
tokens; so each is a row of the box that reads it: the weight's name, and the operators on it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from picompile.viewer.changes import SAME, Comparison, origin_text
from picompile.viewer.layers import constant_names, users_of
from picompile.viewer.listing import change_text
from picompile_passes.dump_reader import DumpGraph, DumpNode, words_of

_STRING = re.compile(r"'([^']*)'")
_SHORT_TYPES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i"}


@dataclass(frozen=True)
class Chip:
    """The text of one node. `first` is false where the node was shown before, in another box or row."""

    name: str
    text: str
    status: str
    hover: str
    first: bool


@dataclass(frozen=True)
class Row:
    """One thing a box reads: a weight with the operators on it, or a value of another section."""

    label: str
    chip: Chip
    shape: str
    steps: tuple[Chip, ...] = ()


@dataclass(frozen=True)
class Box:
    """One node of the picture; `inputs` are the boxes it reads, with the names of the arguments."""

    name: str
    title: str
    detail: str
    shape: str
    badge: str
    status: str
    hover: str
    rows: tuple[Row, ...]
    inputs: Mapping[str, str]


class Panel:
    """One of the two graphs as boxes. Every node is the subject of one box or one chip, and mentioned in others."""

    def __init__(self, comparison: Comparison, *, after: bool) -> None:
        self.after = after
        self.comparison = comparison
        self.graph: DumpGraph = comparison.after if after else comparison.before
        self.section = comparison.after_sections if after else comparison.before_sections
        self.users = users_of(self.graph)
        self.constants = constant_names(self.graph)
        self._shown: set[str] = set()

    def boxes(self, section: int) -> Iterator[Box]:
        """The boxes of a section, in the order of the graph; constants that none of them reads come first."""
        names = [name for name, number in self.section.items() if number == section]
        boxes = [self._box(name) for name in names if name not in self.constants]
        left = [name for name in names if name in self.constants and name not in self._shown]
        for name in reversed(left):
            if name not in self._shown:
                yield self._constant_box(name)
        yield from boxes

    def status(self, name: str) -> str:
        """What happened to a node."""
        return self.comparison.status(name, after=self.after)

    def edge_status(self, source: str, target: str) -> str:
        """What happened to an edge: `same` where the other graph has it too, between the same nodes."""
        other = self.comparison.before if self.after else self.comparison.after
        own = "added" if self.after else "removed"
        kept = self.status(source) != own and self.status(target) != own
        return SAME if kept and source in other.nodes[target].inputs else own

    def hover(self, name: str) -> str:
        """All that the dump says of a node, and what changed."""
        node = self.graph.nodes[name]
        lines = [f"{name}  {node.shape}", f"= {node.expression}"]
        lines += [f"{key} {value}" for key, value in node.notes.items()]
        if node.origin:
            lines.append(f"from {origin_text(node)}")
        if name in self.comparison.changed:
            lines.append(f"changed: {change_text(self.comparison.changed[name])}")
        if not self.after and name in self.comparison.became:
            lines.append(f"became {', '.join(self.comparison.became[name])}")
        return "\n".join(lines)

    def _box(self, name: str) -> Box:
        node = self.graph.nodes[name]
        rows: list[Row] = []
        inputs: dict[str, str] = {}
        for key, word in _read(node):
            if word in self.constants:
                rows += self._constant_rows(word, key, self.section[name])
            elif word in self.graph.nodes and self._is_edge(word, name):
                inputs.setdefault(word, key)
            elif word in self.graph.nodes:
                rows.append(Row(key, self._chip(word, None), short_shape(self.graph.nodes[word].shape)))
        return self._make(node, rows, inputs)

    def _constant_box(self, name: str) -> Box:
        """A weight that nothing of its section reads, or what is computed from it."""
        node = self.graph.nodes[name]
        read = [(key, word) for key, word in _read(node) if word in self.graph.nodes]
        rows = [row for key, word in read for row in self._constant_rows(word, key, self.section[name])]
        return self._make(node, rows, {})

    def _make(self, node: DumpNode, rows: list[Row], inputs: Mapping[str, str]) -> Box:
        self._shown.add(node.name)
        return Box(
            name=node.name,
            title=short_operator(node.operator),
            detail=_detail(node),
            shape=short_shape(node.shape),
            badge=node.notes.get("device", ""),
            status=self.status(node.name),
            hover=self.hover(node.name),
            rows=tuple(_without_repeats(rows)),
            inputs=inputs,
        )

    def _is_edge(self, word: str, user: str) -> bool:
        """Whether a value comes by an arrow. What several layers read of the head would be arrows everywhere."""
        here, there = self.section[user], self.section[word]
        readers = {self.section[reader] for reader in self.users[word]} - {there}
        return here == there or len(readers) <= 1

    def _constant_rows(self, name: str, label: str, section: int) -> Iterator[Row]:
        """A row for the weight that `name` is made of by operators on it, and one for each other weight they read."""
        chain, others = [name], []
        while self.graph.nodes[chain[-1]].inputs:
            first, *more = [(key, word) for key, word in _read(self.graph.nodes[chain[-1]]) if word in self.constants]
            others += more
            chain.append(first[1])
        weight, *steps = [self._chip(part, section) for part in reversed(chain)]
        yield Row(label, weight, short_shape(self.graph.nodes[name].shape), tuple(steps))
        for key, word in others:
            yield from self._constant_rows(word, key, section)

    def _chip(self, name: str, section: int | None) -> Chip:
        """The chip of a node in a box of `section`. Of another section's node it is a mention."""
        node = self.graph.nodes[name]
        text = f"{short_operator(node.operator)} {_detail(node)}".strip() if name in self.constants else name
        first = name not in self._shown and self.section[name] == section
        if first:
            self._shown.add(name)
        return Chip(name, short_weight(node.weight) or text, self.status(name), self.hover(name), first)


def _read(node: DumpNode) -> Iterator[tuple[str, str]]:
    """Every word that a call is given, with the argument's name."""
    return ((key, word) for key, value in node.arguments for word in words_of(value))


def _without_repeats(rows: list[Row]) -> Iterator[Row]:
    """Without rows that say nothing new: a table by which several weights are selected stands once, at the end."""
    tables: dict[str, Row] = {}
    for row in rows:
        if row.label != "index":
            yield row
        else:
            tables.setdefault(row.chip.name, row)
    yield from tables.values()


def short_operator(operator: str) -> str:
    """`linear` of `picompile.linear`, `add` of `aten.add.Tensor`."""
    for namespace in ("picompile.", "aten."):
        if operator.startswith(namespace):
            return operator.removeprefix(namespace).split(".")[0]
    return operator


def short_shape(shape: str) -> str:
    """`[s52, 192]` of `float32[s52, 192]`, which most values are; `i64[70]` of `int64[70]`."""
    kind, bracket, sizes = shape.partition("[")
    if not bracket or not kind or kind == "float32":
        return f"{bracket}{sizes}" if bracket else shape
    for long, short in _SHORT_TYPES.items():
        if kind.startswith(long):
            kind = short + kind.removeprefix(long)
            break
    return f"{kind}[{sizes}"


def short_weight(name: str) -> str:
    """`mlp.gate_proj` of `model.layers.0.mlp.gate_proj.weight`."""
    return re.sub(r"^.*?\.\d+\.|^layer_\d+_", "", name).removesuffix(".weight")


def _detail(node: DumpNode) -> str:
    """What a call is told by words: `relu`, `exact`, `q4`."""
    found = (match[1] for _, value in node.arguments for match in _STRING.finditer(value))
    return ", ".join(word for word in found if word != "identity")
