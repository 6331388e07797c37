"""The axes of a parameter in a constant that is made of it by moves alone, as of a stack of matrices."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

Axes = tuple[tuple[int, ...], ...]

_aten = torch.ops.aten
_RESHAPES = (
    *(_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default),
    *(_aten.flatten.using_ints, _aten.unflatten.int),
)


MATRIX_AXES: tuple[Axes, ...] = (((0,), (1,)), ((0, 1), (2,)))
"""The axes of a matrix, and of a stack of matrices whose rows lie one behind the other."""

TRANSPOSED_AXES: tuple[Axes, ...] = (((1,), (0,)), ((0, 2), (1,)))
"""The axes of the transpose of a matrix, and of a stack of transposes."""


@dataclass(frozen=True)
class Stack:
    """A constant as a parameter whose axes were put into another order, and some of them joined.

    `axes` has, for each dimension of the constant, the axes of the parameter that it runs over, the last one fastest.
    """

    parameter: Node
    axes: Axes


def axes_of(node: Node) -> Stack | None:
    """Return the axes of the one parameter that `node` is made of; None where more than moves of whole axes make it."""
    if node.op == "get_attr":
        return Stack(node, tuple((axis,) for axis in range(node.meta["val"].dim())))
    inputs = node.all_input_nodes
    stack = axes_of(inputs[0]) if node.op == "call_function" and len(inputs) == 1 else None
    axes = None if stack is None else _moved(node, stack)
    return None if stack is None or axes is None else Stack(stack.parameter, axes)


def _moved(node: Node, stack: Stack) -> Axes | None:
    axes, args = stack.axes, node.args[1:]
    if node.target in (_aten.clone.default, _aten.contiguous.default, _aten.alias.default):
        return axes
    if node.target in (_aten.t.default, _aten.numpy_T.default, _aten.mT.default):
        return axes[::-1] if len(axes) == 2 else None
    if node.target is _aten.transpose.int:
        order = list(range(len(axes)))
        first, second = args
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
        return tuple(axes[place] for place in order)
    if node.target is _aten.permute.default:
        return tuple(axes[place] for place in args[0])  # type: ignore[union-attr, index]
    if node.target in _RESHAPES:
        return _regrouped(axes, stack.parameter.meta["val"].shape, node.meta["val"].shape)
    return None


def _regrouped(axes: Axes, sizes: Any, shape: Any) -> Axes | None:
    """Return the axes of a reshape to `shape`, whose dimensions must each run over whole axes."""
    rest = [axis for dimension in axes for axis in dimension]
    found: list[tuple[int, ...]] = []
    for size in shape:
        taken: list[int] = []
        while math.prod(sizes[axis] for axis in taken) < size and rest:
            taken.append(rest.pop(0))
        if math.prod(sizes[axis] for axis in taken) != size:
            return None
        found.append(tuple(taken))
    return None if rest else tuple(found)
