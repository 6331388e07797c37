"""The layer and the part of the model that a value belongs to: `meta["layer"]` and `meta["part"]` of its node.

`mark_layers` derives both from the mixers and the blocks, once, where a graph becomes canonical. `Rewriter.call` hands
them on to what later passes make. Everything else reads them. Constants have neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from picompile_passes.dialect import operator_of
from picompile_passes.graph.nodes import constant_nodes, is_call
from picompile_passes.graph.operands import ELEMENTWISE, LINEAR, makes_logits

PARTS = ("embedding", "mixer", "block", "head")
"""The parts of a model. What is of a mixer's or a block's part has the number of its layer; the others have none."""


def operator_part(node: Node) -> str | None:
    """Return the part that the operator of `node` is declared to be, such as `mixer`; None for any other call."""
    operator = operator_of(node.target)
    return None if operator is None else operator.part


def token_calls(graph: Graph) -> list[Node]:
    """Return the calls that depend on tokens or positions, in order."""
    constant = constant_nodes(graph)
    return [node for node in graph.nodes if node.op == "call_function" and node not in constant]


def layer_of(node: Node) -> float:
    """Return the number of the layer of `node`: -1 for inputs and the embedding part, infinity for the head."""
    return math.inf if node.meta.get("part") == "head" else int(node.meta.get("layer", -1))


def mark_layers(graph: Graph) -> None:
    """Mark each call that depends on the tokens and has no marks yet.

    1. Each mixer begins a layer. A block is of the layer before the first mixer that depends on it.
    2. What leads to mixers and blocks of one layer only, such as the norm before them, is of this layer: of the part
       `block` if it leads to blocks alone.
    3. Any other value, such as a sum of the residual stream, is a result of the layer before the first mixer that
       depends on it: of the part `block` if it depends on a block of this layer. Before the first layer it is of the
       part `embedding`, as embeddings always are.
    4. The linear that makes the logits is of the part `head`, with the arithmetic behind it, and with what it alone
       reads, back to a sum, a mixer or a block.
    """
    nodes = token_calls(graph)
    head, places = _head(nodes), _places(nodes)
    latest: dict[Node, int] = {}  # the layer of the latest block that a value depends on
    for node in nodes:
        place = places[node]
        latest[node] = max((latest.get(source, -1) for source in node.all_input_nodes), default=-1)
        if operator_part(node) == "block":
            latest[node] = place.layer
        if "part" in node.meta:
            continue
        if node in head:
            node.meta["part"] = "head"
        elif place.layer < 0 or operator_part(node) == "embedding":
            node.meta["part"] = "embedding"
        else:
            of_block = latest[node] == place.layer if place.leads_to is None else "mixer" not in place.leads_to
            node.meta["part"] = "block" if of_block else "mixer"
            node.meta.setdefault("layer", place.layer)


@dataclass(frozen=True)
class _Place:
    """The layer of a value, and the parts of the layer that all ways from it lead to: None if it is a result of it."""

    layer: int
    leads_to: frozenset[str] | None


def _places(nodes: Sequence[Node]) -> dict[Node, _Place]:
    numbers = {node: number for number, node in enumerate(node for node in nodes if operator_part(node) == "mixer")}
    first: dict[Node, int] = {}  # the number of the first mixer that depends on a value
    places: dict[Node, _Place] = {}
    for node in reversed(nodes):
        users = [user for user in node.users if user.op != "output"]
        first[node] = min((numbers.get(user, first[user]) for user in users), default=len(numbers))
        if node in numbers:
            places[node] = _Place(numbers[node], frozenset({"mixer"}))
        elif operator_part(node) == "block":
            places[node] = _Place(first[node] - 1, frozenset({"block"}))
        else:
            ahead = [places[user] for user in users]
            parts = [place.leads_to for place in ahead if place.leads_to is not None]
            if len(parts) == len(node.users) and len({place.layer for place in ahead}) == 1:
                places[node] = _Place(ahead[0].layer, frozenset().union(*parts))
            else:
                places[node] = _Place(first[node] - 1, None)
    return places


def _head(nodes: Sequence[Node]) -> set[Node]:
    """Return the calls that make logits of the last sum, mixer or block."""
    of_tokens = frozenset(nodes)
    head = {node for node in nodes if is_call(node, LINEAR, ELEMENTWISE) and makes_logits(node)}
    waiting = [node for node in head if is_call(node, LINEAR)]
    while waiting:
        for value in of_tokens.intersection(waiting.pop().all_input_nodes):
            one_value = len(of_tokens.intersection(value.all_input_nodes)) == 1
            if one_value and head.issuperset(value.users) and operator_part(value) not in ("mixer", "block"):
                head.add(value)
                waiting.append(value)
    return head
