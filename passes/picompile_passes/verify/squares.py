"""The rule of blocks whose outputs are normalized across their neurons."""

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import ADD, DIVIDE_BY_RMS, SPARSE_FFN
from picompile_passes.verify.rule import Fault


def check_squares(graph_module: GraphModule) -> Iterator[Fault]:
    """A block with `squares` has no down_bias, and one `divide_by_rms` reads it, or the sum of all parts of its layer.

    A `divide_by_rms` reads nothing else, and has a bias with an element for each column of its result. What it divides
    the squares by is the number of neurons of the layer.
    """
    parts: dict[object, list[Node]] = {}
    for block in calls(graph_module.graph, SPARSE_FFN):
        parts.setdefault(block.meta.get("layer"), []).append(block)
    for block in calls(graph_module.graph, SPARSE_FFN):
        values = arguments(block)
        if values["squares"] and values["down_bias"] is not None:
            yield Fault(block, "has squares, so that its down_bias would be divided; divide_by_rms adds it")
        if values["squares"] and not all(_reads_sum(user, block) for user in block.users):
            yield Fault(block, "has squares, but what reads it is no divide_by_rms")
    for node in calls(graph_module.graph, DIVIDE_BY_RMS):
        yield from _check_division(node, parts)


def _reads_sum(user: Node, block: Node) -> bool:
    """Return whether `user` divides `block`, or adds it to another part that somebody divides."""
    if is_call(user, ADD):
        other = [part for part in user.all_input_nodes if part is not block]
        is_parts = len(other) == 1 and is_call(other[0], SPARSE_FFN)
        return is_parts and all(is_call(each, DIVIDE_BY_RMS) for each in user.users)
    return is_call(user, DIVIDE_BY_RMS)


def _check_division(node: Node, parts: dict[object, list[Node]]) -> Iterator[Fault]:
    values = arguments(node)
    x, bias = values["x"], values["bias"]
    blocks = x.all_input_nodes if is_call(x, ADD) else [x]
    if not all(is_call(block, SPARSE_FFN) and arguments(block)["squares"] for block in blocks):
        yield Fault(node, f"{x} is no block with squares, nor the sum of two")
        return
    layer = blocks[0].meta.get("layer")
    if set(blocks) != set(parts[layer]):
        yield Fault(node, f"reads {', '.join(map(str, blocks))}, not all parts of layer {layer}")
    neurons = sum(int(arguments(block)["up"].meta["val"].shape[0]) for block in blocks)
    if values["neurons"] != neurons:
        yield Fault(node, f"divides by {values['neurons']} neurons, but there are {neurons}")
    if bias is not None and bias.meta["val"].shape[0] != node.meta["val"].shape[1]:
        yield Fault(node, f"its bias has {bias.meta['val'].shape[0]} elements, not {node.meta['val'].shape[1]}")
