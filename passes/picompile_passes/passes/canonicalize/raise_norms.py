"""Raises root mean square and layer normalization to `rms_norm` and `layer_norm`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.graph.nodes import arguments, calls, constant_nodes, is_call
from picompile_passes.graph.operands import ADD, LAYER_NORM, RMS_NORM
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape
from picompile_passes.passes.canonicalize.layout import HeadLayout

_aten = torch.ops.aten
_MUL, _DIV, _SUB = _aten.mul.Tensor, _aten.div.Tensor, _aten.sub.Tensor
_POWER = _aten.pow.Tensor_Scalar


@dataclass(frozen=True)
class RaiseNorms(Pass):
    """Raises every normalization over the last dimension to one operator.

    1. `x · rsqrt(mean(x²) + eps) · w`, with `x / sqrt(…)` and the products in any order → `rms_norm(x, w, eps)`. The
       anchor is the root: `rsqrt`, `sqrt` or a power of ±1/2. The mean may be a sum, divided.
    2. The same without w → `rms_norm` with ones.
    3. `rms_norm(x, [D], w, eps)` of torch → `rms_norm(x, w, eps)`.
    4. `layer_norm(x, [D], w, b, eps)` → `layer_norm(x, w, b, eps)`.
    5. 1 and 2 with x less its mean in place of x → `layer_norm(x, w, None, eps)`.
    6. Any of these over the last dimension of each head, x [1, H, T, d] or [1, T, H, d] → the norm of [1, T, H · d] in
       H groups, with w and b repeated for each head.
    """

    name: ClassVar[str] = "raise-norms"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Raise written-out norms first, then those that are one operator already."""
        constant = constant_nodes(rewriter.graph)
        for anchor in calls(rewriter.graph, _aten.rsqrt.default, _aten.sqrt.default, _POWER):
            _raise_written_out(rewriter, anchor, constant)
        for node in calls(rewriter.graph, _aten.rms_norm.default):
            values = arguments(node)
            eps = torch.finfo(torch.float32).eps if values["eps"] is None else values["eps"]
            if len(values["normalized_shape"]) == 1:
                _emit_rms_norm(rewriter, node, x=values["input"], weight=values["weight"], eps=eps, sources=(node,))
        for node in calls(rewriter.graph, _aten.layer_norm.default):
            values = arguments(node)
            if len(values["normalized_shape"]) == 1:
                vectors = (values["weight"], values["bias"])
                new = _normalized(
                    rewriter,
                    op=LAYER_NORM,
                    node=node,
                    x=values["input"],
                    vectors=vectors,
                    eps=values["eps"],
                    sources=(node,),
                )
                rewriter.replace(node, new)


def _raise_written_out(rewriter: Rewriter, anchor: Node, constant: frozenset[Node]) -> None:
    matched = _mean_square(anchor.args[0])
    if matched is None:
        return
    x, eps = matched
    for normed, weight in list(_normed(anchor, x, constant)):
        if weight is None:
            _emit_weighted(rewriter, normed, x, eps, constant)
        else:
            _emit_rms_norm(rewriter, node=normed, x=x, weight=weight, eps=eps, sources=(anchor, normed))


def _normed(anchor: Node, x: Node, constant: frozenset[Node]) -> Iterator[tuple[Node, Node | None]]:
    """Yield the nodes that are x over the root `anchor`, each with the weight that it already holds, or None."""
    for node, numerator in _over_root(anchor):
        if _same(numerator, x):
            yield node, None
        elif _is_weight(numerator, x, constant):
            yield from ((product, numerator) for product, other in _products(node) if _same(other, x))
        elif is_call(numerator, _MUL):
            for weight, other in (numerator.args, numerator.args[::-1]):
                if _same(other, x) and _is_weight(weight, x, constant):
                    yield node, weight  # type: ignore[misc]


def _same(left: Any, right: Any) -> bool:
    """Return whether two nodes are one, or make the same value of the same arguments."""
    if left is right:
        return True
    both = is_call(left, _SUB) and is_call(right, _SUB)
    return both and left.kwargs == right.kwargs and all(map(_same_mean, left.args, right.args))


def _same_mean(left: Any, right: Any) -> bool:
    both = is_call(left, _aten.mean.dim) and is_call(right, _aten.mean.dim)
    return left is right or (both and (left.args, left.kwargs) == (right.args, right.kwargs))


def _centered(x: Node) -> Node | None:
    """Return the value that `x` is less its mean over the last dimension; None where it is something else."""
    if not is_call(x, _SUB) or x.kwargs:
        return None
    value, mean = x.args
    return value if isinstance(value, Node) and _averaged(mean) is value else None


def _over_root(anchor: Node) -> Iterator[tuple[Node, Node]]:
    """The products with 1 / sqrt(…) and the quotients by sqrt(…), each with its other operand."""
    if is_call(anchor, _aten.rsqrt.default) or (is_call(anchor, _POWER) and anchor.args[1] == -0.5):
        yield from _products(anchor)
    elif is_call(anchor, _aten.sqrt.default) or anchor.args[1] == 0.5:
        for inverse in _reciprocals(anchor):
            yield from _products(inverse)
        for user in anchor.users:
            if is_call(user, _DIV) and user.args[1] is anchor and isinstance(user.args[0], Node):
                yield user, user.args[0]


def _reciprocals(root: Node) -> Iterator[Node]:
    """The uses of a root as 1 / root. Export writes a number over it as its reciprocal times that number."""
    for user in root.users:
        if is_call(user, _aten.reciprocal.default) or (is_call(user, _DIV) and user.args == (1, root)):
            yield user
            yield from (scaled for scaled in user.users if is_call(scaled, _MUL) and scaled.args == (user, 1))


def _products(factor: Node) -> Iterator[tuple[Node, Node]]:
    """The products of `factor` and another value, each with that value."""
    for user in factor.users:
        if is_call(user, _MUL) and len(user.all_input_nodes) == 2:
            left, right = user.all_input_nodes
            yield user, right if left is factor else left


def _is_weight(node: Any, x: Node, constant: frozenset[Node]) -> bool:
    """Whether `node` is a constant with an element for each of the last dimension of x, for each head or for all."""
    if node not in constant:
        return False
    shape = node.meta["val"].shape
    is_of_heads = len(shape) > 1 and HeadLayout.of(x) is not None and all(isinstance(size, int) for size in shape)
    return same_shape(shape, x.meta["val"].shape[-max(1, len(shape)) :] if is_of_heads else x.meta["val"].shape[-1:])


def _emit_weighted(rewriter: Rewriter, normed: Node, x: Node, eps: float, constant: frozenset[Node]) -> None:
    """Emits the norm for `normed` = x · rsqrt(…), with the weight that all its uses multiply it by, or with ones."""
    products = [(product, other) for product, other in _products(normed) if _is_weight(other, x, constant)]
    for product, weight in products:
        _emit_rms_norm(rewriter, node=product, x=x, weight=weight, eps=eps, sources=(normed, product))
    if len(products) < len(normed.users):
        _emit_rms_norm(rewriter, node=normed, x=x, weight=None, eps=eps, sources=(normed,))


def _emit_rms_norm(
    rewriter: Rewriter, node: Node, x: Node, weight: Node | None, eps: float, sources: tuple[Node, ...]
) -> None:
    centered = _centered(x)
    if centered is not None:
        rewriter.replace(
            node,
            _normalized(
                rewriter, op=LAYER_NORM, node=node, x=centered, vectors=(weight, None), eps=eps, sources=sources
            ),
        )
        return
    if weight is None:
        weight = rewriter.constant("ones", torch.ones(int(x.meta["val"].shape[-1])), sources=sources)
    rewriter.replace(
        node, _normalized(rewriter, op=RMS_NORM, node=node, x=x, vectors=(weight,), eps=eps, sources=sources)
    )


def _normalized(
    rewriter: Rewriter,
    op: OpOverload,
    node: Node,
    x: Node,
    vectors: Sequence[Node | None],
    eps: float,
    sources: tuple[Node, ...],
) -> Node:
    """Return the norm of x over its last dimension: of all features of a token, or of each head by itself."""

    def call(op: OpOverload, *args: Any) -> Node:
        return rewriter.call(op, args, before=node, sources=sources)

    layout = HeadLayout.of(x)
    if layout is None:
        return call(op, x, *vectors, eps)
    flat = layout.flat(call, x)
    wide = [None if vector is None else layout.vector(call, vector) for vector in vectors]
    return layout.restored(call, call(op, flat, *wide, eps, layout.groups))


def _mean_square(node: Any) -> tuple[Node, float] | None:
    """(x, eps) where `node` is mean(x², last dimension, keepdim) + eps."""
    if not is_call(node, ADD) or not isinstance(node.args[1], (int, float)) or node.kwargs:
        return None
    mean, eps = node.args
    square: Any = _averaged(mean)
    if is_call(square, _aten.pow.Tensor_Scalar) and square.args[1] == 2:
        return square.args[0], float(eps)
    if is_call(square, _MUL) and square.args[0] is square.args[1]:
        return square.args[0], float(eps)
    return (square.args[0], float(eps)) if is_call(square, _aten.square.default) else None


def _averaged(node: Any) -> Node | None:
    """The x of which `node` is the mean over the last dimension, kept as one of size 1."""
    kept = not is_call(node, _aten.unsqueeze.default)
    if not kept and node.args[1] % node.meta["val"].dim() != node.meta["val"].dim() - 1:
        return None
    mean = node if kept else node.args[0]
    total = mean.args[0] if is_call(mean, _DIV) else mean
    if not is_call(total, _aten.mean.dim if total is mean else _aten.sum.dim_IntList):
        return None
    values = arguments(total)
    x: Node = values["self"]
    shape = x.meta["val"].shape
    if total is not mean and not (isinstance(shape[-1], int) and mean.args[1] == shape[-1]):
        return None
    over_last = [dim % len(shape) for dim in values["dim"] or ()] == [len(shape) - 1]
    return x if over_last and values["keepdim"] == kept else None
