"""`reduce_graph`, which makes a graph smaller while it keeps a property: for reproducers.

A node may be left out where one of its arguments has a value of the same shape and dtype: its users take that instead.
A residual addition is such a node, so whole blocks go at once. What is left out is searched for as in delta debugging
(Zeller and Hildebrandt, 2002): halves first, then quarters, down to single nodes.
"""

import time
from collections.abc import Callable, Sequence

from torch.fx import Graph, GraphModule, Node

from picompile_passes.base import copy_graph_module
from picompile_passes.graph.nodes import argument_position, calls
from picompile_passes.graph.operands import ATTENTION, FFN, PREDICT, SPARSE_FFN
from picompile_passes.graph.values import same_value

Keeps = Callable[[GraphModule], bool]


def reduce_graph(graph_module: GraphModule, keeps: Keeps, seconds: float) -> GraphModule:
    """Return a smaller graph for which `keeps` holds, as it does for `graph_module`. Stops after `seconds`."""
    end = time.monotonic() + seconds
    size = -1
    while size != len(graph_module.graph.nodes) and time.monotonic() < end:
        size = len(graph_module.graph.nodes)
        # By the first argument of that kind, the residual stream; then by the last.
        for choice in (0, -1):
            graph_module = _round(graph_module, keeps, choice, end)
    return graph_module


def _round(graph_module: GraphModule, keeps: Keeps, choice: int, end: float) -> GraphModule:
    names = [node.name for node in graph_module.graph.nodes if _substitutes(node)]
    chunk = len(names)
    while chunk >= 1:
        for start in range(0, len(names), chunk):
            if time.monotonic() > end:
                return graph_module
            graph_module = _attempt(graph_module, names[start : start + chunk], keeps, choice) or graph_module
        chunk //= 2
    return graph_module


def _attempt(graph_module: GraphModule, names: Sequence[str], keeps: Keeps, choice: int) -> GraphModule | None:
    """The graph without `names`, as it is or with its layers numbered anew, if `keeps` holds for it."""
    smaller = _without(graph_module, names, choice)
    if smaller is None:
        return None
    if keeps(smaller):
        return smaller
    _number_layers(smaller.graph)
    return smaller if keeps(smaller) else None


def _without(graph_module: GraphModule, names: Sequence[str], choice: int) -> GraphModule | None:
    result = copy_graph_module(graph_module)
    left_out = False
    for node in result.graph.nodes:
        if node.name in names and (substitutes := _substitutes(node)):
            node.replace_all_uses_with(substitutes[choice])
            left_out = True
    if not left_out:
        return None
    for node in reversed(result.graph.nodes):
        # Not left to torch, which keeps what it takes for random.
        if not node.users and node.op not in ("placeholder", "output"):
            result.graph.erase_node(node)
    smaller = GraphModule(result, result.graph)
    smaller.meta = dict(result.meta)
    return smaller


def _substitutes(node: Node) -> list[Node]:
    """The arguments of `node` that have values like its own."""
    if node.op != "call_function" or "val" not in node.meta:
        return []
    return [other for other in node.all_input_nodes if same_value(other.meta.get("val"), node.meta["val"])]


def _number_layers(graph: Graph) -> None:
    """Numbers attentions 0, 1, …; a block gets the number of the attention before it."""
    count = 0
    for node in calls(graph, ATTENTION, FFN, PREDICT, SPARSE_FFN):
        if node.target is ATTENTION:
            node.update_arg(argument_position(node, "layer"), count)
            count += 1
        node.meta["layer"] = max(0, count - 1)
