"""Raises root mean square and layer normalization to `rms_norm` and `layer_norm`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from picompile_passes.infra import Pass
from picompile_passes.nodes import arguments, calls, constant_nodes, is_call
from picompile_passes.operands import ADD, LAYER_NORM, RMS_NORM
from picompile_passes.rewriter import Rewriter
from picompile_passes.stages import Stage

_aten = torch.ops.aten
_MUL, _DIV = _aten.mul.Tensor, _aten.div.Tensor


@dataclass(frozen=True)
class RaiseNorms(Pass):
    """Every normalization over the last dimension becomes one operator.

    1. `x · rsqrt(mean(x²) + eps) · w`, with `x / sqrt(…)` and the products in any order → `rms_norm(x, w, eps)`. The
       anchor is the `rsqrt` or `sqrt`.
    2. The same without w → `rms_norm` with ones.
    3. `rms_norm(x, [D], w, eps)` of torch → `rms_norm(x, w, eps)`.
    4. `layer_norm(x, [D], w, b, eps)` → `layer_norm(x, w, b, eps)`.
    """

    name: ClassVar[str] = "raise-norms"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> bool:
        """Written-out norms first, then those that are one operator already."""
        constant = constant_nodes(rewriter.graph)
        for anchor in calls(rewriter.graph, _aten.rsqrt.default, _aten.sqrt.default):
            _raise_written_out(rewriter, anchor, constant)
        for node in calls(rewriter.graph, _aten.rms_norm.default):
            values = arguments(node)
            eps = torch.finfo(torch.float32).eps if values["eps"] is None else values["eps"]
            if len(values["normalized_shape"]) == 1:
                _emit_rms_norm(rewriter, node, values["input"], values["weight"], eps, (node,))
        for node in calls(rewriter.graph, _aten.layer_norm.default):
            values = arguments(node)
            if len(values["normalized_shape"]) == 1:
                arguments_ = (values["input"], values["weight"], values["bias"], values["eps"])
                rewriter.replace(node, rewriter.call(LAYER_NORM, arguments_, before=node, sources=(node,)))
        return rewriter.changes > 0


def _raise_written_out(rewriter: Rewriter, anchor: Node, constant: frozenset[Node]) -> None:
    matched = _mean_square(anchor.args[0])
    if matched is None:
        return
    x, eps = matched
    inverse = anchor if is_call(anchor, _aten.rsqrt.default) else _reciprocal(anchor)
    for normed in [] if inverse is None else list(inverse.users):
        if is_call(normed, _MUL) and set(normed.args) == {x, inverse}:
            _emit_weighted(rewriter, normed, x, eps, constant)
    for normed in list(anchor.users):
        if is_call(anchor, _aten.sqrt.default) and is_call(normed, _DIV) and normed.args == (x, anchor):
            _emit_weighted(rewriter, normed, x, eps, constant)


def _emit_weighted(rewriter: Rewriter, normed: Node, x: Node, eps: float, constant: frozenset[Node]) -> None:
    """Emits the norm for `normed` = x · rsqrt(…), with the weight that all its uses multiply it by, or with ones."""
    products = list(_weighted(normed, constant))
    for product, weight in products:
        _emit_rms_norm(rewriter, product, x, weight, eps, (normed, product))
    if len(products) < len(normed.users):
        _emit_rms_norm(rewriter, normed, x, None, eps, (normed,))


def _weighted(normed: Node, constant: frozenset[Node]) -> Iterator[tuple[Node, Node]]:
    """The products of `normed` and a constant vector, each with the vector."""
    for user in list(normed.users):
        if is_call(user, _MUL) and isinstance(user.args[0], Node) and isinstance(user.args[1], Node):
            weight = user.args[1] if user.args[0] is normed else user.args[0]
            if weight in constant and weight.meta["val"].dim() == 1:
                yield user, weight


def _emit_rms_norm(
    rewriter: Rewriter, node: Node, x: Node, weight: Node | None, eps: float, sources: tuple[Node, ...]
) -> None:
    if weight is None:
        weight = rewriter.constant("ones", torch.ones(int(x.meta["val"].shape[-1])), sources=sources)
    rewriter.replace(node, rewriter.call(RMS_NORM, (x, weight, eps), before=node, sources=sources))


def _mean_square(node: Any) -> tuple[Node, float] | None:
    """(x, eps) where `node` is mean(x², last dimension, keepdim) + eps."""
    if not is_call(node, ADD) or not isinstance(node.args[1], (int, float)) or node.kwargs:
        return None
    mean, eps = node.args
    if not is_call(mean, _aten.mean.dim):
        return None
    values = arguments(mean)
    square = values["self"]
    last = square.meta["val"].dim() - 1
    if [dim % (last + 1) for dim in values["dim"]] != [last] or not values["keepdim"]:
        return None
    if is_call(square, _aten.pow.Tensor_Scalar) and square.args[1] == 2:
        return square.args[0], float(eps)
    if is_call(square, _MUL) and square.args[0] is square.args[1]:
        return square.args[0], float(eps)
    return (square.args[0], float(eps)) if is_call(square, _aten.square.default) else None


def _reciprocal(anchor: Node) -> Node | None:
    """The one use of a `sqrt` as 1 / sqrt."""
    for user in anchor.users:
        if is_call(user, _aten.reciprocal.default) or (is_call(user, _DIV) and user.args == (1, anchor)):
            return user
    return None
