"""Which layer each node of a dump belongs to.

Dumps say it of a few nodes: attention and feed-forward blocks carry it as a note, weights in their names. The others
get it from what they compute with. A node of no layer is of the head, which comes before them (embeddings, tables that
all layers read), or of the tail, which comes after (the last norm, the logits).
"""

import re
from collections.abc import Iterable, Mapping

from picompile_passes.graph.dump_reader import DumpGraph, DumpNode

HEAD = -1
TAIL = 1 << 30

_IN_WEIGHT = re.compile(r"(?:^|\.)(\d+)\.|^layer_(\d+)_")


def section_title(section: int) -> str:
    """The name of a section in sentences."""
    return {HEAD: "before the layers", TAIL: "after the layers"}.get(section, f"layer {section}")


def constant_names(graph: DumpGraph) -> frozenset[str]:
    """The nodes whose values depend on no placeholder: weights and what is computed from them alone."""
    constant: set[str] = set()
    for node in graph.nodes.values():
        is_call = node.operator not in ("placeholder", "output", "weight")
        if node.operator == "weight" or (is_call and node.inputs and constant.issuperset(node.inputs)):
            constant.add(node.name)
    return frozenset(constant)


def users_of(graph: DumpGraph) -> dict[str, list[str]]:
    """For each node, the nodes that read it, in order."""
    users: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for node in graph.nodes.values():
        for name in node.inputs:
            users[name].append(node.name)
    return users


def sections(graph: DumpGraph) -> dict[str, int]:
    """For each node, its layer, or `HEAD` or `TAIL`."""
    constants, users = constant_names(graph), users_of(graph)
    stated = _stated(graph, constants)
    found = _along_the_tokens(graph, constants, stated)
    _pull_into_layers(graph, constants, users, found)
    for name in reversed(list(graph.nodes)):
        if name in constants:
            found[name] = stated[name] if name in stated else _of_users(found[user] for user in users[name])
    return {name: found[name] for name in graph.nodes}


def _stated(graph: DumpGraph, constants: frozenset[str]) -> dict[str, int]:
    """What nodes say themselves: by a note, by the name of a weight, by what they read of the constants."""
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
    match = _IN_WEIGHT.search(node.weight)
    return int(match[1] or match[2]) if match else None


def _along_the_tokens(graph: DumpGraph, constants: frozenset[str], stated: Mapping[str, int]) -> dict[str, int]:
    """A node that says nothing is of the latest layer it depends on.

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
    """The layer that all users are of; `HEAD` where there is no such layer."""
    distinct = set(layers)
    return distinct.pop() if len(distinct) == 1 else HEAD
