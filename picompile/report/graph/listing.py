"""The changes between two dumps as lines of text, and as JSON."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from picompile.report.graph.changes import ADDED, CHANGED, REMOVED, SAME, Comparison, origin_text
from picompile.report.graph.folds import Fold, fold, layers_of
from picompile.report.graph.sections import HEAD, TAIL, section_title
from picompile_passes.graph.dump_reader import DumpGraph

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
    """How many nodes read a parameter or a buffer."""
    return sum(node.operator == "weight" for node in graph.nodes.values())


def counts(comparison: Comparison) -> dict[str, int]:
    """How many nodes were removed, added and changed, and how many are the same."""
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
    """Every change, section by section; layers that changed alike are listed once."""
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
    """All changes, for programs; nothing is folded, but what could be is said."""
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
        yield _line(ADDED, name, width, _added_text(comparison, name))
    for name in changed:
        yield _line(CHANGED, name, width, change_text(comparison.changed[name]))


def _line(kind: str, name: str, width: int, text: str) -> Line:
    return Line(kind, f"  {_MARKS[kind]} {name:{width}}  {text}")


def _removed_text(comparison: Comparison, name: str) -> str:
    node = comparison.before.nodes[name]
    became = sorted(comparison.became.get(name, ()), key=lambda new: comparison.after.nodes[new].operator == "weight")
    more = f", … ({len(became)})" if len(became) > _MOST_NAMES else ""
    return f"{node.operator} {node.shape}" + (f"  became {', '.join(became[:_MOST_NAMES])}{more}" if became else "")


def _added_text(comparison: Comparison, name: str) -> str:
    node = comparison.after.nodes[name]
    notes = "".join(f", {text}" for text in _notes(node.notes))
    origin = f"  from {origin_text(node)}" if node.origin else ""
    return f"{node.shape} = {node.expression}{notes}{origin}"


def _notes(notes: Mapping[str, str]) -> Iterator[str]:
    """What the section's title does not say already."""
    return (value if key == "device" else f"{key} {value}" for key, value in notes.items() if key != "layer")


def change_text(change: Mapping[str, tuple[str, str]]) -> str:
    """`weight: a → b; shape: c → d`."""
    return "; ".join(f"{key}: {old or 'none'} → {new or 'none'}" for key, (old, new) in change.items())
