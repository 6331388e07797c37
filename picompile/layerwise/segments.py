"""Cutting a graph after each layer, where the fewest bytes are alive."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.nodes import constant_nodes, is_call
from picompile_passes.operands import ATTENTION, FFN, SPARSE_FFN

# What a token count that is not known stands for where sizes are compared.
_TOKENS = 512


@dataclass(frozen=True)
class Segment:
    """A run of a graph's calls.

    `nodes` are the calls that depend on the tokens, in order; `inputs` the values of earlier segments that they read,
    placeholders left out; `outputs` what later segments, or the graph's result, read of all that is alive behind this
    one; `constants` the values that depend on weights alone. `last_uses` says which values nothing reads after a node.
    `blocks` are its feed-forward blocks.
    """

    graph_module: GraphModule
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    constants: tuple[Node, ...]
    last_uses: dict[Node, tuple[Node, ...]]

    @property
    def blocks(self) -> tuple[Node, ...]:
        """The calls of `ffn` and `sparse_ffn`."""
        return tuple(node for node in self.nodes if is_call(node, FFN, SPARSE_FFN))

    @property
    def title(self) -> str:
        """What it computes, in short: `layer 3`, `embedding`, `head`."""
        layers = sorted({node.meta["layer"] for node in self.blocks if "layer" in node.meta})
        if layers:
            return f"layer {', '.join(map(str, layers))}"
        return "embedding" if not self.inputs else "head"


def split_layers(graph_module: GraphModule) -> tuple[Segment, ...]:
    """The segments of a canonical or later graph: what comes before the layers, each layer, and what comes after.

    A cut lies behind the last feed-forward block of a layer and before the first of the next. A segment may hold no
    block, and holds several where a cut is impossible, since a value that is no tensor is alive.
    """
    constant = constant_nodes(graph_module.graph)
    order = [n for n in graph_module.graph.nodes if n.op == "call_function" and n not in constant]
    live = _live_values(order, graph_module.graph.output_node())
    cuts = [0, *_cuts(order, live), len(order)]
    return tuple(
        _segment(graph_module, order[start:end], live[start], live[end], constant)
        for start, end in itertools.pairwise(cuts)
        if start < end
    )


def _live_values(order: Sequence[Node], output: Node) -> list[list[Node]]:
    """For each place between two calls, what was computed before it and is read after it: `len(order) + 1` lists."""
    position = {node: index for index, node in enumerate(order)}
    end = len(order) + 1
    last = {node: max((end if u is output else position.get(u, 0) for u in node.users), default=0) for node in order}
    alive: list[Node] = []
    live: list[list[Node]] = [[]]
    for place, node in enumerate(order, start=1):
        alive = [other for other in (*alive, node) if last[other] >= place]
        live.append(alive)
    return live


def _cuts(order: Sequence[Node], live: Sequence[Sequence[Node]]) -> Iterator[int]:
    """Where to cut, in order. Of places of the same cost the first."""
    first = next((i for i, node in enumerate(order) if is_call(node, ATTENTION, FFN, SPARSE_FFN)), 0)
    groups = _block_positions(order)
    ranges = [(1, first)] if first > 1 else []
    ranges += [(own[-1] + 1, after[0]) for own, after in itertools.pairwise(groups)]
    if groups:
        ranges.append((groups[-1][-1] + 1, len(order) - 1))
    for start, end in ranges:
        places = range(start, end + 1)
        best = min(places, key=lambda place: _live_bytes(live[place]), default=None)
        if best is not None and math.isfinite(_live_bytes(live[best])):
            yield best


def _block_positions(order: Sequence[Node]) -> list[list[int]]:
    """Positions of the feed-forward blocks; the parts of a partitioned one are together."""
    groups: dict[Any, list[int]] = {}
    for index, node in enumerate(order):
        if is_call(node, FFN, SPARSE_FFN):
            groups.setdefault(node.meta.get("layer", node), []).append(index)
    return list(groups.values())


def _live_bytes(nodes: Sequence[Node]) -> float:
    """What a window takes to keep; infinite where something cannot be kept."""
    return sum(_bytes(node.meta.get("val")) for node in nodes)


def _bytes(value: object) -> float:
    if not isinstance(value, Tensor):
        return math.inf
    return math.prod(size if isinstance(size, int) else _TOKENS for size in value.shape) * value.element_size()


def _segment(
    graph_module: GraphModule,
    nodes: Sequence[Node],
    before: Sequence[Node],
    after: Sequence[Node],
    constant: frozenset[Node],
) -> Segment:
    own = set(nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    last_uses: dict[Node, tuple[Node, ...]] = {}
    for value in (*before, *nodes):
        user = last_use.get(value, value)
        if value not in after and user in own:
            last_uses[user] = (*last_uses.get(user, ()), value)
    read = {argument for node in nodes for argument in node.all_input_nodes}
    return Segment(
        graph_module=graph_module,
        nodes=tuple(nodes),
        inputs=tuple(node for node in before if node in read),
        outputs=tuple(after),
        constants=tuple(node for node in graph_module.graph.nodes if node in constant and node in read),
        last_uses=last_uses,
    )
