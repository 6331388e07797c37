"""Calls of an exported graph that change one of their arguments, as `div_` does, in place of which others do not.

`run_decompositions` of torch.export does it for every graph, and traces all of it once more for that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from picompile_passes.errors import PropagateError
from picompile_passes.graph.values import fake_call, same_value

# Operators that are made of others, and whose results are new.
_NEW = (torch.ops.aten.softmax.int, torch.ops.aten.linear.default, torch.ops.aten.matmul.default)


def writes_in_place(graph: Graph) -> bool:
    """Return whether a call changes one of its arguments."""
    return any(True for _ in _writes(graph))


def remove_writes(graph: Graph) -> bool:
    """Replace calls that change a value which nothing else shares memory with, in place.

    Return whether no other is left.
    """
    for node in list(_writes(graph)):
        changed, pure = node.args[0], _pure(node.target)
        if pure is None or not isinstance(changed, Node) or not _is_alone(changed, node):
            return False
        try:
            value = fake_call(graph, pure, node.args, node.kwargs)
        except PropagateError:
            return False
        if not isinstance(value, Tensor) or not same_value(value, changed.meta["val"]):
            return False
        with graph.inserting_before(node):
            new = graph.call_function(pure, node.args, node.kwargs)
        new.meta = node.meta | {"val": value}
        node.replace_all_uses_with(new)
        for user in [user for user in changed.users if new < user]:
            user.replace_input_with(changed, new)
        graph.erase_node(node)
    return True


def _writes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            yield node


def _pure(target: object) -> OpOverload | None:
    """Return the operator that gives what `target` writes into its first argument, None where there is none."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not target._opname.endswith("_"):
        return None
    first, *others = target._schema.arguments
    if first.alias_info is None or any(each.alias_info is not None and each.alias_info.is_write for each in others):
        return None
    packet = getattr(torch.ops.aten, target._opname[:-1], None)
    pure = getattr(packet, target._overloadname, None)
    return pure if isinstance(pure, OpOverload) and not pure._schema.is_mutable else None


def _is_alone(changed: Node, write: Node) -> bool:
    """Return whether no value made before `write` shares memory with `changed`."""
    source = changed.args[0] if "getitem" in str(changed.target) else changed
    if not isinstance(source, Node) or source.op != "call_function" or _shares(source):
        return False
    return not any(_shares(user) for user in changed.users if user < write)


def _shares(node: Node) -> bool:
    """Return whether the result of a call may share memory with an argument."""
    target = node.target
    if not isinstance(target, OpOverload) or any(result.alias_info is not None for result in target._schema.returns):
        return True
    # An operator that is made of others may give its argument back, as dropout does, whatever its schema says.
    return bool(target._can_decompose()) and target not in _NEW
