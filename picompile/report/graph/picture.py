"""The boxes of the picture: one for each node that depends on the tokens, with its weights inside.

Most nodes of a graph are weights, or are computed from weights alone. As boxes they would hide the path of the tokens.
So each is a row in the box that reads it: the weight's name, and the operators on it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from picompile.report.graph.changes import HEAD, SAME, TAIL, Comparison, Side, constant_names, origin_text
from picompile.report.graph.layout import NodePosition, Point, Route, lay_out
from picompile.report.graph.listing import change_text, layers_text
from picompile_passes.graph.dump_reader import DumpNode, words_of

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
class BoxRow:
    """An input of a box: a weight with the operators on it, or a value of another section.

    `label` is the argument it is passed for, empty where that says nothing.
    """

    label: str
    chip: Chip
    shape: str
    steps: tuple[Chip, ...] = ()


@dataclass(frozen=True)
class Box:
    """A node of the picture; `inputs` are the boxes that it reads, with the names of the arguments."""

    name: str
    title: str
    detail: str
    shape: str
    badge: str
    status: str
    hover: str
    rows: tuple[BoxRow, ...]
    inputs: Mapping[str, str]


class Panel(Side):
    """One of the two graphs as boxes. Every node is the subject of one box or one chip, and mentioned in others."""

    def __init__(self, comparison: Comparison, *, after: bool) -> None:
        super().__init__(comparison, after=after)
        self.constants = constant_names(self.graph)
        self._shown: set[str] = set()

    def boxes(self, section: int) -> Iterator[Box]:
        """Yield the boxes of a section, in the order of the graph; constants that none of them reads come first."""
        names = [name for name, number in self.section.items() if number == section]
        boxes = [self._box(name) for name in names if name not in self.constants]
        left = [name for name in names if name in self.constants and name not in self._shown]
        for name in reversed(left):
            if name not in self._shown:
                yield self._constant_box(name)
        yield from boxes

    def edge_status(self, source: str, target: str) -> str:
        """Return what happened to an edge: `same` if the other graph has it too, between the same nodes."""
        other = self.comparison.before if self.after else self.comparison.after
        kept = self.own not in (self.status(source), self.status(target))
        return SAME if kept and source in other.nodes[target].inputs else self.own

    def hover(self, name: str) -> str:
        """Return the dump's lines about a node, and its changes."""
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
        rows: list[BoxRow] = []
        inputs: dict[str, str] = {}
        for key, word in _read(node):
            if word in self.constants:
                rows += self._constant_rows(word, key, self.section[name])
            elif word in self.graph.nodes and self._is_edge(word, name):
                inputs.setdefault(word, key)
            elif word in self.graph.nodes:
                rows.append(BoxRow(key, self._chip(word, None), short_shape(self.graph.nodes[word].shape)))
        return self._make(node, rows, inputs)

    def _constant_box(self, name: str) -> Box:
        """Return a weight that nothing in its section reads, or the value computed from it."""
        node = self.graph.nodes[name]
        read = [(key, word) for key, word in _read(node) if word in self.graph.nodes]
        rows = [row for key, word in read for row in self._constant_rows(word, key, self.section[name])]
        return self._make(node, rows, {})

    def _make(self, node: DumpNode, rows: list[BoxRow], inputs: Mapping[str, str]) -> Box:
        self._shown.add(node.name)
        return Box(
            name=node.name,
            title=short_operator(node.operator),
            detail=_detail(node),
            shape=short_shape(node.shape),
            badge=node.notes.get("neurons", ""),
            status=self.status(node.name),
            hover=self.hover(node.name),
            rows=tuple(_with_labels([*_without_repeats(rows)])),
            inputs=inputs,
        )

    def _is_edge(self, word: str, user: str) -> bool:
        """Return whether a value comes by an arrow. What several layers read of the head would be arrows everywhere."""
        here, there = self.section[user], self.section[word]
        readers = {self.section[reader] for reader in self.users[word]} - {there}
        return here == there or len(readers) <= 1

    def _constant_rows(self, name: str, label: str, section: int) -> Iterator[BoxRow]:
        """Yield a row for the weight that `name` is made of, and one for each other weight that its operators read."""
        chain, others = [name], []
        while self.graph.nodes[chain[-1]].inputs:
            first, *more = [(key, word) for key, word in _read(self.graph.nodes[chain[-1]]) if word in self.constants]
            others += more
            chain.append(first[1])
        weight, *steps = [self._chip(part, section) for part in reversed(chain)]
        yield BoxRow(label, weight, short_shape(self.graph.nodes[name].shape), tuple(steps))
        for key, word in others:
            yield from self._constant_rows(word, key, section)

    def _chip(self, name: str, section: int | None) -> Chip:
        """Return the chip of a node in a box of `section`. Of another section's node it is a mention."""
        node = self.graph.nodes[name]
        text = f"{short_operator(node.operator)} {_detail(node)}".strip() if name in self.constants else name
        first = name not in self._shown and self.section[name] == section
        if first:
            self._shown.add(name)
        return Chip(name, short_weight(node.weight) or text, self.status(name), self.hover(name), first)


def _read(node: DumpNode) -> Iterator[tuple[str, str]]:
    """Return every word that a call is given, with the argument's name."""
    return ((key, word) for key, value in node.arguments for word in words_of(value))


def _without_repeats(rows: list[BoxRow]) -> Iterator[BoxRow]:
    """Yield the rows without repeats: a table that selects several weights comes once, at the end."""
    tables: dict[str, BoxRow] = {}
    for row in rows:
        if row.label != "index":
            yield row
        else:
            tables.setdefault(row.chip.name, row)
    yield from tables.values()


def _with_labels(rows: list[BoxRow]) -> Iterator[BoxRow]:
    """Yield the rows without the labels that say nothing: those of single rows, and those that repeat the text."""
    for row in rows:
        yield row if len(rows) > 1 and row.label != row.chip.text else replace(row, label="")


def short_operator(operator: str) -> str:
    """`linear` of `picompile.linear`, `add` of `aten.add.Tensor`."""
    for namespace in ("picompile.", "aten."):
        if operator.startswith(namespace):
            return operator.removeprefix(namespace).split(".")[0]
    return operator


def short_shape(shape: str) -> str:
    """Shorten a type: `float32[s52, 192]`, the usual dtype, becomes `[s52, 192]`; `int64[70]` becomes `i64[70]`."""
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
    """Return the words among a call's arguments: `relu`, `exact`, `q4`."""
    found = (match[1] for _, value in node.arguments for match in _STRING.finditer(value))
    return ", ".join(word for word in found if word != "identity")


# Boxes and arrows of one section of a graph, with their places. Lengths in pixels.


MARGIN = 6.0
_PADDING = 9.0
_HEAD_HEIGHT = 34.0
_RULE_HEIGHT = 13.0
_ROW_HEIGHT = 15.0
_STEPS_HEIGHT = 18.0
_PORT_HEIGHT = 22.0

# Text is measured before any font is known: monospaced ones are 0.6 em wide, bold sans-serif ones about as much. Sizes,
# as heights above, are those of graph.css.
_MONO = 0.602
_TITLE_SIZE, _NAME_SIZE, _ROW_SIZE, _STEP_SIZE = 13.0, 11.0, 10.5, 9.5
# Beside the text of an operator on a weight: its padding, and the sign before it.
_STEP_EXTRA = 25.0


@dataclass(frozen=True)
class Port:
    """The place where a value comes in from another section, or goes out to one."""

    text: str
    place: NodePosition
    name: str
    status: str


@dataclass(frozen=True)
class Arrow:
    """An edge as an SVG path; `label` is the argument it is passed for, where the box reads several."""

    source: str
    target: str
    path: str
    status: str
    label: str
    end: Point


@dataclass(frozen=True)
class Picture:
    """One section of one graph."""

    width: float
    height: float
    boxes: tuple[tuple[Box, NodePosition], ...]
    ports: tuple[Port, ...]
    arrows: tuple[Arrow, ...]


def draw(panel: Panel, section: int) -> Picture:
    """Return the picture of a section; without boxes where the graph has no nodes there."""
    boxes = list(panel.boxes(section))
    own = {box.name for box in boxes}
    entries = list(dict.fromkeys(name for box in boxes for name in box.inputs if name not in own))
    exits = {box.name: text for box in boxes if (text := _exit_text(panel, box.name, section))}
    sizes = {_entry(name): _port_size(name) for name in entries}
    sizes |= {box.name: _size(box) for box in boxes}
    sizes |= {_exit(name): _port_size(text) for name, text in exits.items()}
    edges = [(name if name in own else _entry(name), box.name) for box in boxes for name in box.inputs]
    edges += [(name, _exit(name)) for name in exits]
    layout = lay_out(sizes, edges)
    ports = [Port(name, layout.boxes[_entry(name)], name, panel.status(name)) for name in entries]
    ports += [Port(text, layout.boxes[_exit(name)], name, panel.status(name)) for name, text in exits.items()]
    placed = tuple((box, layout.boxes[box.name]) for box in boxes)
    arrows = tuple(_arrow(panel, route, boxes) for route in layout.routes)
    return Picture(layout.width + 2 * MARGIN, layout.height + 2 * MARGIN, placed, tuple(ports), arrows)


def _entry(name: str) -> str:
    return f"in {name}"


def _exit(name: str) -> str:
    return f"out {name}"


def _exit_text(panel: Panel, name: str, section: int) -> str:
    """Return the text on the other readers of a value: the next section, or the layers for a value of the head."""
    readers = {panel.section[user] for user in panel.users[name]} - {section}
    if not readers or name in panel.constants:
        return ""
    if section != HEAD:
        return "out"
    return layers_text(readers - {HEAD, TAIL}) if readers - {TAIL} else "after the layers"


def _port_size(text: str) -> tuple[float, float]:
    return _mono(text, _NAME_SIZE) + 2 * _PADDING, _PORT_HEIGHT


def _mono(text: str, size: float) -> float:
    return len(text) * size * _MONO


def _size(box: Box) -> tuple[float, float]:
    widths = [
        len(box.title) * _TITLE_SIZE * 0.6 + _mono(f"  {box.detail}{box.badge}", _ROW_SIZE) + 26,
        _mono(f"{box.name}  {box.shape}", _NAME_SIZE),
        *(_mono(f"{row.label} {row.chip.text} {row.shape}".strip(), _ROW_SIZE) for row in box.rows),
        *(sum(_mono(step.text, _STEP_SIZE) + _STEP_EXTRA for step in row.steps) for row in box.rows),
    ]
    rows = sum(_ROW_HEIGHT + (_STEPS_HEIGHT if row.steps else 0.0) for row in box.rows)
    return max(widths) + 2 * _PADDING, _HEAD_HEIGHT + (_RULE_HEIGHT + rows if rows else 0.0) + _PADDING


def _arrow(panel: Panel, route: Route, boxes: Iterable[Box]) -> Arrow:
    source, target = (name.removeprefix("in ").removeprefix("out ") for name in route.edge)
    status, label = panel.status(source) if source == target else panel.edge_status(source, target), ""
    if source == target and status == "changed":
        status = SAME
    for box in boxes:
        if box.name == route.edge[1] and len(box.inputs) > 1:
            label = box.inputs[source]
    label = "" if label in ("self", "other", "tensors", "input") else label
    return Arrow(source, target, path_text(route.points), status, label, route.points[-1])


def path_text(points: Sequence[Point]) -> str:
    """Return an SVG path: straight down where two points share x, else a curve that leaves and arrives vertically."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for next_x, next_y in rest:
        if abs(next_x - x) < 0.5:
            parts.append(f"V{next_y:.1f}")
            next_x = x
        else:
            middle = (y + next_y) / 2
            parts.append(f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return "".join(parts)
