"""Values of nodes without data: each operator run on fake tensors, with the token count left a symbol.

`torch.export` leaves in every node's `meta["val"]` a fake tensor of one `FakeTensorMode`. Nodes that passes make get
theirs by running the operator's fake implementation in that same mode, so that the symbols stay the same ones.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from picompile_passes.errors import PropagateError


@functools.lru_cache(maxsize=2)
def _results(mode: FakeTensorMode) -> dict[Hashable, Any]:
    """Return the cache of results of calls in `mode`. Results keep their mode alive, so few modes are cached."""
    return {}


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """Return the fake mode that the values of `graph` belong to. Raises `PropagateError` where no node has one."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise PropagateError('no node of the graph carries a fake tensor in meta["val"]')


def fake_like(graph: Graph, tensor: Tensor) -> FakeTensor:
    """Return a fake tensor of the shape and dtype of `tensor`, in the mode and on the device of the graph's inputs."""
    device = next((n.meta["val"].device for n in graph.nodes if n.op == "placeholder" and "val" in n.meta), "cpu")
    with fake_mode_of(graph):
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not isinstance(value, FakeTensor):
        raise PropagateError(f"a value of shape {tuple(tensor.shape)} is a real tensor, not a fake one")
    return value


def fake_call(graph: Graph, op: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """Return the fake result of `op` for `args`, in which nodes stand for their values.

    Raises `PropagateError`, with the operator and the shapes it was given, where it does not accept them.
    """
    values = map_arg(tuple(args), _value)
    named = map_arg(kwargs or {}, _value)
    mode = fake_mode_of(graph)
    # The layers of a model repeat the same calls, and so does the verification after each pass.
    known = _results(mode)
    key = (op, _key(values), _key(named))
    if key in known:
        return known[key]
    try:
        with mode, torch.no_grad():
            known[key] = op(*values, **named)
        return known[key]
    except PropagateError:
        raise
    except Exception as error:
        raise PropagateError(f"{op} does not accept ({', '.join(map(value_text, values))}): {error}") from error


def fake_result(node: Node) -> Any:
    """Return the value of a call node, computed again from the values of its arguments; its own is not changed."""
    if not isinstance(node.target, OpOverload):
        raise PropagateError(f"{node.name} calls {node.target}, which is not an operator")
    return fake_call(node.graph, node.target, node.args, node.kwargs)


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values agree in dtype and shape. Symbols are compared as they stand; no guard is added."""
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and same_shape(left.shape, right.shape)
    return type(left) is type(right) and _same_size(left, right)


def same_shape(left: Any, right: Any) -> bool:
    """Return whether two shapes are known to be equal for every token count."""
    return len(left) == len(right) and all(map(_same_size, left, right))


def value_text(value: Any) -> str:
    """Return a short text of a value: `float32[s0, 96]` for a tensor."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value)


def _key(value: Any) -> Hashable:
    """Equal for arguments that an operator's fake implementation cannot tell apart."""
    if isinstance(value, Tensor):
        layout = (value.dtype, value.device, value.requires_grad)
        return (*layout, *map(_key, value.shape), "strides", *map(_key, value.stride()))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), value.node.expr)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_key, value))
    if isinstance(value, (dict, slice)):
        items = value.items() if isinstance(value, dict) else (value.start, value.stop, value.step)
        return (type(value), *map(_key, items))
    # 1, 1.0 and True are equal, but not the same to an operator.
    return (type(value), value)


def _same_size(left: Any, right: Any) -> bool:
    # It imports sympy, which those that only evaluate constants do not need.
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    return bool(statically_known_true(sym_eq(left, right)))


def _value(node: Node) -> Any:
    if "val" not in node.meta:
        raise PropagateError(f'{node.name} has no meta["val"]')
    return node.meta["val"]
