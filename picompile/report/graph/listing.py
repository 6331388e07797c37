"""The changes between two dumps as lines of text and as JSON, with layers that are alike shown once."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from picompile.report.graph.changes import (
    ADDED,
    CHANGED,
    HEAD,
    REMOVED,
    SAME,
    TAIL,
    Comparison,
    Side,
    origin_text,
    section_title,
)
from picompile_passes.graph.dump_reader import DumpGraph, DumpNode, replace_nodes

# Which layers are like which: a model of 24 layers is 24 times the same, and is shown once.
#
# A layer is written down with its nodes as positions in it, with values from the layer before as entries in order of
# use, and with its own number taken out of names; two layers that read the same are alike. Sizes are numbered in order
# of appearance, so that layers which differ in sizes alone are found too, and in which.
#
# The first layer has no layer before it: its entries are what it alone reads of the head. All others of a group must
# also take their entries from the same places of the layers before them.


_SIZE = re.compile(r"(?<!\w)\d+(?!\w)")
_COUNTER = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Fold:
    """Layer `shown` stands for the layers in `alike`; `sizes` has pairs of sizes that differ (there, in `shown`)."""

    shown: int
    sizes: Mapping[int, tuple[tuple[str, str], ...]]

    @property
    def alike(self) -> tuple[int, ...]:
        """The layers that it stands for, itself left out."""
        return tuple(self.sizes)


@dataclass
class _Written:
    """A layer as written: its text, the distinct sizes in it, and the origin of its entries."""

    lines: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)

    def size(self, text: str) -> str:
        """`text` with its numbers numbered."""
        return _SIZE.sub(lambda match: f"#{self.sizes.setdefault(match[0], len(self.sizes))}", text)


def layers_of(comparison: Comparison) -> list[int]:
    """Return the numbers of all layers, in order."""
    found = {*comparison.before_sections.values(), *comparison.after_sections.values()}
    return sorted(found - {HEAD, TAIL})


def fold(comparison: Comparison, *, whole: bool) -> list[Fold]:
    """Return the layers that have to be shown, each with those that are like it.

    `whole` compares all that is in the layers. Otherwise only changes are compared, and layers without are left out.
    """
    layers = layers_of(comparison)
    sides = [_LayeredSide(comparison, layers, after=False), _LayeredSide(comparison, layers, after=True)]
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
    """Put the first layer into the first of `groups` that reads like it, or into one of its own."""
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


class _LayeredSide(Side):
    """A side with the nodes of each layer, and their positions in it."""

    def __init__(self, comparison: Comparison, layers: list[int], *, after: bool) -> None:
        super().__init__(comparison, after=after)
        self.names: dict[int, list[str]] = {layer: [] for layer in layers}
        for name, layer in self.section.items():
            self.names.setdefault(layer, []).append(name)
        self.position = {name: number for names in self.names.values() for number, name in enumerate(names)}
        self.previous = dict(zip(layers[1:], layers, strict=False))

    def is_entry(self, name: str, layer: int) -> bool:
        """Return whether `layer` gets the value of `name` from the layer before, and not from values for all layers."""
        if layer in self.previous:
            return self.section[name] == self.previous[layer]
        readers = {self.section[user] for user in self.users[name]}
        return self.section[name] == HEAD and readers <= {HEAD, layer}

    def place(self, name: str) -> str:
        """Return a node's position in its section, its operator and its shape."""
        node = self.graph.nodes[name]
        return f"{self.position[name]} {node.operator} {node.shape}"


def _write(comparison: Comparison, layer: int, sides: Iterable[_LayeredSide], *, whole: bool) -> _Written:
    written = _Written()
    for side in sides:
        written.entries.append("after" if side.after else "before")
        entries: dict[str, int] = {}
        for name in side.names[layer]:
            status = side.status(name)
            if whole or status != SAME:
                written.lines.append(" ".join([status, *_node(side, name, layer, written, entries)]))
    if written.lines:
        written.lines += _pairs(comparison, layer, *sides)
    return written


def _pairs(comparison: Comparison, layer: int, before: _LayeredSide, after: _LayeredSide) -> Iterator[str]:
    """Yield pairs of matching nodes: one of the layer before, one of the layer after."""
    gone = set(comparison.removed)
    for name in before.names[layer]:
        if name not in gone:
            here = after.section[name] == layer
            yield f"{before.position[name]} is {after.position[name] if here else name}"


def _node(side: _LayeredSide, name: str, layer: int, written: _Written, entries: dict[str, int]) -> Iterator[str]:
    """Yield all that is said of a node, with everything that is particular to the layer taken out."""
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
    """Return a weight's name without the layer's number, and without the counter of a buffer's."""
    name = node.weight
    if "." not in name:
        name = _COUNTER.sub("", name)
    return re.sub(rf"(?:(?<=\.)|^layer_|^){layer}(?=[._])", "own", name, count=1)


def _reference(side: _LayeredSide, word: str, layer: int, written: _Written, entries: dict[str, int]) -> str:
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


# The changes between two dumps as lines of text, and as JSON.


_MARKS = {REMOVED: "-", ADDED: "+", CHANGED: "~"}
_MOST_NAMES = 4


class Line(NamedTuple):
    """One line; `kind` is removed, added, changed, section or note."""

    kind: str
    text: str


def graph_summary(graph: DumpGraph) -> str:
    """`stage canonical, 141 nodes, 57 of them weights`."""
    return f"stage {graph.stage}, {len(graph.nodes)} nodes, {weights_in(graph)} of them weights"


def weights_in(graph: DumpGraph) -> int:
    """Return how many nodes read a parameter or a buffer."""
    return sum(node.operator == "weight" for node in graph.nodes.values())


def counts(comparison: Comparison) -> dict[str, int]:
    """Return how many nodes were removed, added and changed, and how many are the same."""
    return {
        REMOVED: len(comparison.removed),
        ADDED: len(comparison.added),
        CHANGED: len(comparison.changed),
        SAME: comparison.same,
    }


def counts_text(comparison: Comparison) -> str:
    """`6 removed, 12 added, 6 changed, 129 the same`, or that nothing differs."""
    if comparison.equal:
        return "no difference"
    found = counts(comparison)
    return f"{found[REMOVED]} removed, {found[ADDED]} added, {found[CHANGED]} changed, {found[SAME]} the same"


def listing(comparison: Comparison) -> Iterator[Line]:
    """Yield every change, section by section; layers that changed alike are listed once."""
    layers = layers_of(comparison)
    folds = fold(comparison, whole=False)
    yield from _section(comparison, HEAD, titled=bool(layers))
    for shown in folds:
        yield from _section(comparison, shown.shown, titled=True)
        yield from (Line("note", text) for text in fold_texts(shown))
    unchanged = set(layers).difference(*([item.shown, *item.alike] for item in folds))
    if folds and unchanged:
        yield Line("note", f"{layers_text(unchanged)}: unchanged")
    yield from _section(comparison, TAIL, titled=True)


def fold_texts(shown: Fold) -> Iterator[str]:
    """`layers 1-23: as layer 0`, and a line for each layer that differs in sizes."""
    plain = [layer for layer, sizes in shown.sizes.items() if not sizes]
    if plain:
        yield f"{layers_text(plain)}: as layer {shown.shown}"
    for layer, sizes in shown.sizes.items():
        if sizes:
            yield f"layer {layer}: as layer {shown.shown}, with {sizes_text(sizes)}"


def sizes_text(sizes: Iterable[tuple[str, str]]) -> str:
    """`77 for 70, 627 for 634`."""
    return ", ".join(f"{there} for {here}" for there, here in sizes)


def layers_text(layers: Iterable[int]) -> str:
    """`layer 3`, or `layers 1-5, 7`."""
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and ranges[-1][-1] == layer - 1:
            ranges[-1][1:] = [layer]
        else:
            ranges.append([layer])
    single = len(ranges) == 1 and len(ranges[0]) == 1
    return f"layer{'' if single else 's'} {', '.join('-'.join(map(str, part)) for part in ranges)}"


def changes_json(comparison: Comparison) -> dict[str, Any]:
    """Return all changes, for programs. Nothing is folded; layers that could be are listed."""
    return {
        "before": _graph_json(comparison.before),
        "after": _graph_json(comparison.after),
        "removed": [_removed_json(comparison, name) for name in comparison.removed],
        "added": [_added_json(comparison, name) for name in comparison.added],
        "changed": [_changed_json(comparison, name) for name in comparison.changed],
        "same": comparison.same,
        "alike": [[item.shown, *item.alike] for item in fold(comparison, whole=False)],
    }


def _graph_json(graph: DumpGraph) -> dict[str, Any]:
    return {"stage": graph.stage, "nodes": len(graph.nodes), "weights": weights_in(graph)}


def _removed_json(comparison: Comparison, name: str) -> dict[str, Any]:
    node, layer = comparison.before.nodes[name], _layer(comparison.before_sections[name])
    became = list(comparison.became.get(name, ()))
    return {"name": name, "layer": layer, "shape": node.shape, "expression": node.expression, "became": became}


def _added_json(comparison: Comparison, name: str) -> dict[str, Any]:
    node, layer = comparison.after.nodes[name], _layer(comparison.after_sections[name])
    origin = {"pass": node.origin[0], "sources": list(node.origin[1])} if node.origin else None
    return {"name": name, "layer": layer, "shape": node.shape, "expression": node.expression, "from": origin}


def _changed_json(comparison: Comparison, name: str) -> dict[str, Any]:
    changes = {key: list(change) for key, change in comparison.changed[name].items()}
    return {"name": name, "layer": _layer(comparison.after_sections[name]), "changes": changes}


def _layer(section: int) -> int | None:
    return None if section in (HEAD, TAIL) else section


def _section(comparison: Comparison, section: int, *, titled: bool) -> Iterator[Line]:
    before, after = comparison.before_sections, comparison.after_sections
    removed = [name for name in comparison.removed if before[name] == section]
    added = [name for name in comparison.added if after[name] == section]
    changed = [name for name in comparison.changed if after[name] == section]
    if titled and (removed or added or changed):
        yield Line("section", section_title(section))
    width = max(map(len, [*removed, *added, *changed]), default=0)
    for name in removed:
        yield _line(REMOVED, name, width, _removed_text(comparison, name))
    for name in added:
        yield _line(ADDED, name, width, node_text(comparison.after.nodes[name]))
    for name in changed:
        yield _line(CHANGED, name, width, change_text(comparison.changed[name]))


def _line(kind: str, name: str, width: int, text: str) -> Line:
    return Line(kind, f"  {_MARKS[kind]} {name:{width}}  {text}")


def _removed_text(comparison: Comparison, name: str) -> str:
    node, became = comparison.before.nodes[name], became_text(comparison, name)
    return f"{node.operator} {node.shape}" + (f"  {became}" if became else "")


def became_text(comparison: Comparison, name: str) -> str:
    """`became predict, sparse_ffn`: the nodes that a removed one became; nothing if it became none."""
    became = sorted(comparison.became.get(name, ()), key=lambda new: comparison.after.nodes[new].operator == "weight")
    more = f", … ({len(became)})" if len(became) > _MOST_NAMES else ""
    return f"became {', '.join(became[:_MOST_NAMES])}{more}" if became else ""


def node_text(node: DumpNode) -> str:
    """Return a node's line of the dump without its name, and without what the title of its section says."""
    notes = "".join(f", {text}" for text in _notes(node.notes))
    origin = f"  from {origin_text(node)}" if node.origin else ""
    return f"{node.shape} = {node.expression}{notes}{origin}"


# What the title of a section says of all its nodes.
_IN_TITLES = ("layer", "part")


def _notes(notes: Mapping[str, str]) -> Iterator[str]:
    """Return the texts of the notes that the section's title does not have already."""
    return (value if key == "neurons" else f"{key} {value}" for key, value in notes.items() if key not in _IN_TITLES)


def change_text(change: Mapping[str, tuple[str, str]]) -> str:
    """`weight: a → b; shape: c → d`."""
    return "; ".join(f"{key}: {old or 'none'} → {new or 'none'}" for key, (old, new) in change.items())
