"""Which layers are like which: a model of 24 layers is 24 times the same, and is shown once.

A layer is written down with its nodes as positions in it, with values from the layer before as entries in order of
use, and with its own number taken out of names; two layers that read the same are alike. Sizes are numbered in order
of appearance, so that layers which differ in sizes alone are found too, and in which.

The first layer has no layer before it: its entries are what it alone reads of the head. All others of a group must
also take their entries from the same places of the layers before them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from picompile.report.graph.changes import SAME, Comparison
from picompile.report.graph.sections import HEAD, TAIL, users_of
from picompile_passes.graph.dump_reader import DumpGraph, DumpNode, replace_nodes

_SIZE = re.compile(r"(?<!\w)\d+(?!\w)")
_COUNTER = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Fold:
    """Layer `shown` stands for those in `alike`, and `sizes` says what is other in them: pairs (there, in `shown`)."""

    shown: int
    sizes: Mapping[int, tuple[tuple[str, str], ...]]

    @property
    def alike(self) -> tuple[int, ...]:
        """The layers that it stands for, itself left out."""
        return tuple(self.sizes)


@dataclass
class _Written:
    """One layer: its text, the distinct sizes in it, and where its entries come from."""

    lines: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)

    def size(self, text: str) -> str:
        """`text` with its numbers numbered."""
        return _SIZE.sub(lambda match: f"#{self.sizes.setdefault(match[0], len(self.sizes))}", text)


def layers_of(comparison: Comparison) -> list[int]:
    """The numbers of all layers, in order."""
    found = {*comparison.before_sections.values(), *comparison.after_sections.values()}
    return sorted(found - {HEAD, TAIL})


def fold(comparison: Comparison, *, whole: bool) -> list[Fold]:
    """The layers that have to be shown, each with those that are like it.

    `whole` compares all that is in the layers. Otherwise only changes are compared, and layers without are left out.
    """
    layers = layers_of(comparison)
    sides = [_Side(comparison, layers, after=False), _Side(comparison, layers, after=True)]
    written = {layer: _write(comparison, layer, sides, whole=whole) for layer in layers}
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in layers[1:]:
        groups.setdefault((*written[layer].lines, "entries", *written[layer].entries), []).append(layer)
    found = list(groups.values())
    if layers:
        _join(layers[0], found, written)
    shown = sorted(found, key=lambda group: group[0])
    return [_fold(group, written) for group in shown if whole or written[group[0]].lines]


def _join(first: int, groups: list[list[int]], written: Mapping[int, _Written]) -> None:
    """Puts the first layer into the first of `groups` that reads like it, or into one of its own."""
    for group in groups:
        if written[group[0]].lines == written[first].lines:
            group.insert(0, first)
            return
    groups.append([first])


def _fold(group: list[int], written: Mapping[int, _Written]) -> Fold:
    shown, *alike = group
    sizes = {}
    for layer in alike:
        pairs = zip(written[layer].sizes, written[shown].sizes, strict=True)
        sizes[layer] = tuple((there, here) for there, here in pairs if there != here)
    return Fold(shown, sizes)


class _Side:
    """One of the two graphs, with what is asked of it again and again."""

    def __init__(self, comparison: Comparison, layers: list[int], *, after: bool) -> None:
        self.after = after
        self.graph: DumpGraph = comparison.after if after else comparison.before
        self.section = comparison.after_sections if after else comparison.before_sections
        self.names: dict[int, list[str]] = {layer: [] for layer in layers}
        for name, layer in self.section.items():
            self.names.setdefault(layer, []).append(name)
        self.position = {name: number for names in self.names.values() for number, name in enumerate(names)}
        self.previous = dict(zip(layers[1:], layers, strict=False))
        self.users = users_of(self.graph)

    def is_entry(self, name: str, layer: int) -> bool:
        """Whether `layer` gets the value of `name` from what comes before it, and not from what all layers read."""
        if layer in self.previous:
            return self.section[name] == self.previous[layer]
        readers = {self.section[user] for user in self.users[name]}
        return self.section[name] == HEAD and readers <= {HEAD, layer}

    def place(self, name: str) -> str:
        """Position in its section, operator and shape."""
        node = self.graph.nodes[name]
        return f"{self.position[name]} {node.operator} {node.shape}"


def _write(comparison: Comparison, layer: int, sides: Iterable[_Side], *, whole: bool) -> _Written:
    written = _Written()
    for side in sides:
        written.entries.append("after" if side.after else "before")
        entries: dict[str, int] = {}
        for name in side.names[layer]:
            status = comparison.status(name, after=side.after)
            if whole or status != SAME:
                written.lines.append(" ".join([status, *_node(side, name, layer, written, entries)]))
    if written.lines:
        written.lines += _pairs(comparison, layer, *sides)
    return written


def _pairs(comparison: Comparison, layer: int, before: _Side, after: _Side) -> Iterator[str]:
    """Which node of the layer before is which node after."""
    gone = set(comparison.removed)
    for name in before.names[layer]:
        if name not in gone:
            here = after.section[name] == layer
            yield f"{before.position[name]} is {after.position[name] if here else name}"


def _node(side: _Side, name: str, layer: int, written: _Written, entries: dict[str, int]) -> Iterator[str]:
    """All that is said of a node, with everything that is particular to the layer taken out."""
    node = side.graph.nodes[name]

    def refer(word: str) -> str:
        return _reference(side, word, layer, written, entries)

    yield f"{side.position[name]} {written.size(node.shape)} {node.operator} {_weight(node, layer)}"
    for key, value in node.arguments:
        yield f"{key}={'own' if key == 'layer' and value == str(layer) else replace_nodes(value, refer)}"
    for key, value in node.notes.items():
        yield f"{key}:{'own' if key == 'layer' and value == str(layer) else written.size(value)}"
    if node.origin:
        yield f"from {node.origin[0]} {len(node.origin[1])}"


def _weight(node: DumpNode, layer: int) -> str:
    """A weight's name without the layer's number, and without the counter of a buffer's."""
    name = node.weight
    if "." not in name:
        name = _COUNTER.sub("", name)
    return re.sub(rf"(?:(?<=\.)|^layer_|^){layer}(?=[._])", "own", name, count=1)


def _reference(side: _Side, word: str, layer: int, written: _Written, entries: dict[str, int]) -> str:
    if word not in side.graph.nodes:
        return word
    section = side.section[word]
    if section == layer:
        return f"@{written.size(side.place(word))}"
    if side.is_entry(word, layer):
        if word not in entries:
            entries[word] = len(entries)
            if layer in side.previous:
                written.entries.append(side.place(word))
        return f"@entry {entries[word]} {written.size(side.graph.nodes[word].shape)}"
    return f"@{word}" if section in (HEAD, TAIL) else f"@{section - layer} {side.place(word)}"
