"""Complex numbers in an exported graph, which DeepSeek V2 turns queries and keys by, written as pairs of real ones.

A complex value [..., n] becomes a real one [..., n, 2], as `view_as_real` gives it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from picompile.errors import UnsupportedModelError
from picompile_passes.graph.values import fake_call

_aten = torch.ops.aten
# Operators that change neither values nor shapes here: parameters are float32, on one device.
_COPIES = (
    *(_aten.to.device, _aten.to.dtype, _aten.to.dtype_layout, _aten.to.other),
    *(_aten._to_copy.default, _aten.clone.default),
)


def remove_complex(graph: Graph) -> None:
    """Write complex arithmetic of `graph` as real arithmetic, in place.

    Raises `UnsupportedModelError` for an operator on complex numbers other than products and moves.
    """
    pairs: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _aten.view_as_real.default:
            node.replace_all_uses_with(pairs[node.args[0]])
        elif _is_complex(node):
            with graph.inserting_before(node):
                pairs[node] = _pair(graph, node, pairs)
    for node in reversed(list(graph.nodes)):
        if node in pairs or node.target is _aten.view_as_real.default:
            graph.erase_node(node)


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.is_complex()


def _pair(graph: Graph, node: Node, pairs: dict[Node, Node]) -> Node:
    """Return the real value [..., 2] of the complex call `node`, whose complex arguments have `pairs`."""

    def call(op: OpOverload, *args: Any) -> Node:
        new = graph.call_function(op, args)
        new.meta = {key: value for key, value in node.meta.items() if key != "val"}
        new.meta["val"] = fake_call(graph, op, args)
        return new

    first, *rest = node.args
    if node.target is _aten.view_as_complex.default:
        return first  # type: ignore[return-value]
    if node.target is _aten.polar.default:
        parts = [call(_aten.mul.Tensor, first, call(turn, rest[0])) for turn in (_aten.cos.default, _aten.sin.default)]
        return call(_aten.stack.default, parts, -1)
    if node.target in _COPIES and first in pairs:
        return pairs[first]  # type: ignore[index]
    if node.target is _aten.unsqueeze.default:
        (dim,) = rest
        return call(_aten.unsqueeze.default, pairs[first], dim if dim >= 0 else dim - 1)  # type: ignore[index, operator]
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        return _product(call, node, pairs)
    raise UnsupportedModelError(f"{node.name} ({node.target}) works on complex numbers, which is not supported")


def _product(call: Callable[..., Node], node: Node, pairs: dict[Node, Node]) -> Node:
    """Return the product of two complex values, or of one and a real number or value."""
    left, right = node.args
    if not (_is_complex(left) and _is_complex(right)):
        pair, factor = (pairs[left], right) if _is_complex(left) else (pairs[right], left)  # type: ignore[index]
        if isinstance(factor, Node):
            factor = call(_aten.unsqueeze.default, factor, -1)
        return call(_aten.mul.Tensor, pair, factor)
    values = (pairs[left], pairs[right])  # type: ignore[index]
    (a, b), (c, d) = ([call(_aten.select.int, value, -1, part) for part in (0, 1)] for value in values)
    real = call(_aten.sub.Tensor, call(_aten.mul.Tensor, a, c), call(_aten.mul.Tensor, b, d))
    imaginary = call(_aten.add.Tensor, call(_aten.mul.Tensor, a, d), call(_aten.mul.Tensor, b, c))
    return call(_aten.stack.default, [real, imaginary], -1)
