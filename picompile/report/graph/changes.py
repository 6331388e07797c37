"""The differences between two dumps, node by node, and the layer that each node belongs to."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from picompile_passes.graph.dump_reader import DumpGraph, DumpNode, replace_nodes

# Which layer each node of a dump belongs to.
#
# From the canonical stage on, notes say it of all that depends on the tokens. Before, and of constants, names of
# weights say it; the others get it from what they compute with. A node of no layer is of the head, which comes before
# them (embeddings, tables that all layers read), or of the tail, which comes after (the last norm, the logits).


HEAD = -1
TAIL = 1 << 30

_IN_WEIGHT = re.compile(r"(?:^|\.)(\d+)\.|^layer_(\d+)_")


def section_title(section: int) -> str:
    """Return the name of a section in sentences."""
    return {HEAD: "before the layers", TAIL: "after the layers"}.get(section, f"layer {section}")


def constant_names(graph: DumpGraph) -> frozenset[str]:
    """Return the nodes whose values depend on no placeholder: weights and values computed from weights alone."""
    constant: set[str] = set()
    for node in graph.nodes.values():
        is_call = node.operator not in ("placeholder", "output", "weight")
        if node.operator == "weight" or (is_call and node.inputs and constant.issuperset(node.inputs)):
            constant.add(node.name)
    return frozenset(constant)


def users_of(graph: DumpGraph) -> dict[str, list[str]]:
    """Return for each node the nodes that read it, in order."""
    users: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for node in graph.nodes.values():
        for name in node.inputs:
            users[name].append(node.name)
    return users


def sections(graph: DumpGraph) -> dict[str, int]:
    """Return for each node its layer, or `HEAD` or `TAIL`."""
    constants, users = constant_names(graph), users_of(graph)
    stated = _stated(graph, constants)
    found = _along_the_tokens(graph, constants, stated)
    _pull_into_layers(graph, constants, users, found)
    for name in reversed(list(graph.nodes)):
        if name in constants:
            found[name] = stated[name] if name in stated else _of_users(found[user] for user in users[name])
    return {name: found[name] for name in graph.nodes}


def _stated(graph: DumpGraph, constants: frozenset[str]) -> dict[str, int]:
    """Return the layers that nodes name: in a note, in the name of a weight, or by the constants that they read."""
    stated: dict[str, int] = {}
    for node in graph.nodes.values():
        number = _own_number(node)
        if number is None:
            number = max((stated[name] for name in node.inputs if name in constants and name in stated), default=None)
        if number is not None:
            stated[node.name] = number
    return stated


def _own_number(node: DumpNode) -> int | None:
    if node.notes.get("layer", "").isdecimal():
        return int(node.notes["layer"])
    if "part" in node.notes:
        return TAIL if node.notes["part"] == "head" else HEAD
    match = _IN_WEIGHT.search(node.weight)
    return int(match[1] or match[2]) if match else None


def _along_the_tokens(graph: DumpGraph, constants: frozenset[str], stated: Mapping[str, int]) -> dict[str, int]:
    """Return a node that says nothing is of the latest layer it depends on.

    Behind the last node that says something, weights of no layer begin the tail.
    """
    found: dict[str, int] = {}
    names = [name for name in graph.nodes if name not in constants]
    last = max((position for position, name in enumerate(names) if name in stated), default=-1)
    for position, name in enumerate(names):
        node = graph.nodes[name]
        latest = max((found[other] for other in node.inputs if other in found), default=HEAD)
        begins_tail = position > last and latest != HEAD and constants.intersection(node.inputs)
        found[name] = stated.get(name, TAIL if begins_tail else latest)
    return found


def _pull_into_layers(
    graph: DumpGraph, constants: frozenset[str], users: Mapping[str, list[str]], found: dict[str, int]
) -> None:
    """A node of the head that only one layer reads, and that stands inside of that layer, belongs to it."""
    first: dict[int, int] = {}
    positions = {name: position for position, name in enumerate(graph.nodes) if name not in constants}
    for name, position in positions.items():
        first.setdefault(found[name], position)
    for name in reversed(positions):
        if found[name] == HEAD and graph.nodes[name].operator != "placeholder":
            layer = _of_users(found[user] for user in users[name])
            if first.get(layer, positions[name]) < positions[name]:
                found[name] = layer


def _of_users(layers: Iterable[int]) -> int:
    """Return the layer that all users belong to, or `HEAD`."""
    distinct = set(layers)
    return distinct.pop() if len(distinct) == 1 else HEAD


# What differs between two dumps, node by node.
#
# A node of one dump is the node of the other that has its name. Passes reuse names that have become free: where the two
# were made by different passes, or from different sources, and differ in what they compute as well, they are two nodes.


Change = Mapping[str, tuple[str, str]]
"""The changes of a node: `shape`, `operator`, the name of an argument or a note → before and after."""

REMOVED, ADDED, CHANGED, SAME = "removed", "added", "changed", "same"

_SYMBOL = re.compile(r"\b[su]\d+\b")


@dataclass(frozen=True)
class Comparison:
    """Two dumps, with the names of the nodes that only one of them has, and the changes of the others."""

    before: DumpGraph
    after: DumpGraph
    removed: tuple[str, ...]
    added: tuple[str, ...]
    changed: Mapping[str, Change]

    @property
    def same(self) -> int:
        """The number of nodes that are the same in both."""
        return len(self.after.nodes) - len(self.added) - len(self.changed)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, the stage included."""
        changes = self.removed or self.added or self.changed
        return not changes and self.before.stage == self.after.stage

    @cached_property
    def before_sections(self) -> Mapping[str, int]:
        """The layer of each node of the first dump, or head or tail."""
        return sections(self.before)

    @cached_property
    def after_sections(self) -> Mapping[str, int]:
        """The layer of each node of the second dump, or head or tail."""
        return sections(self.after)

    @cached_property
    def became(self) -> Mapping[str, tuple[str, ...]]:
        """The added nodes that name a removed one as a source, by the removed node."""
        made: dict[str, list[str]] = {name: [] for name in self.removed}
        for name in self.added:
            origin = self.after.nodes[name].origin
            for source in origin[1] if origin else ():
                if source in made:
                    made[source].append(name)
        return {name: tuple(names) for name, names in made.items() if names}


class Side:
    """One of the two graphs of a comparison, with what is asked of its nodes again and again."""

    def __init__(self, comparison: Comparison, *, after: bool) -> None:
        self.comparison = comparison
        self.after = after
        self.graph: DumpGraph = comparison.after if after else comparison.before
        self.section = comparison.after_sections if after else comparison.before_sections
        self.users = users_of(self.graph)
        self.own = ADDED if after else REMOVED
        self._own_nodes = frozenset(comparison.added if after else comparison.removed)

    def status(self, name: str) -> str:
        """Return what happened to a node."""
        if name in self.comparison.changed:
            return CHANGED
        return self.own if name in self._own_nodes else SAME


def compare(before: DumpGraph, after: DumpGraph) -> Comparison:
    """Return the differences between two dumps."""
    symbols = _renamed_symbols(before, after)
    removed, changed = [], {}
    for name, node in before.nodes.items():
        other = after.nodes.get(name)
        change = None if other is None else _change(node, other, symbols)
        if other is None or change is None:
            removed.append(name)
        elif change:
            changed[name] = change
    gone = set(removed)
    added = [name for name in after.nodes if name not in before.nodes or name in gone]
    return Comparison(before, after, removed=tuple(removed), added=tuple(added), changed=changed)


def _renamed_symbols(before: DumpGraph, after: DumpGraph) -> dict[str, str]:
    """Return symbols of sizes, after → before, that differ in name alone: captures may number them differently."""
    old, new = _symbols(before), _symbols(after)
    only_old, only_new = [s for s in old if s not in new], [s for s in new if s not in old]
    return dict(zip(only_new, only_old, strict=True)) if len(only_old) == len(only_new) else {}


def _symbols(graph: DumpGraph) -> list[str]:
    """Return the symbols of sizes in order of appearance."""
    return list(dict.fromkeys(symbol for node in graph.nodes.values() for symbol in _SYMBOL.findall(node.shape)))


def _change(before: DumpNode, after: DumpNode, symbols: Mapping[str, str]) -> Change | None:
    """Return the changes, empty if there are none; None if the two are different nodes with the same name."""
    old, new = _computed(before, {}), _computed(after, symbols)
    if before.origin != after.origin and old != new:
        return None
    old, new = {**old, **_annotated(before)}, {**new, **_annotated(after)}
    return {key: (old.get(key, ""), new.get(key, "")) for key in {**old, **new} if old.get(key) != new.get(key)}


def _computed(node: DumpNode, symbols: Mapping[str, str]) -> dict[str, str]:
    """Return shape, operator and arguments, with sizes in the symbols of the first dump."""

    def rename(word: str) -> str:
        return symbols.get(word, word)

    facts = {"shape": _SYMBOL.sub(lambda match: rename(match[0]), node.shape), "operator": node.operator}
    if node.weight:
        facts["weight"] = node.weight
    for position, (name, value) in enumerate(node.arguments):
        facts[name or f"argument {position}"] = replace_nodes(value, rename)
    return facts


def _annotated(node: DumpNode) -> dict[str, str]:
    origin = {"from": origin_text(node)} if node.origin else {}
    return {f"note {key}": value for key, value in node.notes.items()} | origin


def origin_text(node: DumpNode) -> str:
    """`pass(source, ...)`, or nothing."""
    return f"{node.origin[0]}({', '.join(node.origin[1])})" if node.origin else ""
