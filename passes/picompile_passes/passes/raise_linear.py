"""Raises matrix products with a weight, and table lookups, to `linear` and `embedding`."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from picompile_passes.infra import Pass
from picompile_passes.nodes import arguments, calls, constant_nodes, is_call
from picompile_passes.operands import EMBEDDING, LINEAR
from picompile_passes.rewriter import Rewriter
from picompile_passes.stages import Stage

_aten = torch.ops.aten
_ALWAYS_SWAPS = (_aten.t.default, _aten.numpy_T.default)
_TRANSPOSES = (_aten.permute.default, _aten.transpose.int, *_ALWAYS_SWAPS)
_COPIES = (_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.detach.default)
_PRODUCTS = (_aten.linear.default, _aten.addmm.default, _aten.mm.default, _aten.matmul.default)


@dataclass(frozen=True)
class RaiseLinear(Pass):
    """Every product of a value with a constant matrix becomes `linear`, whose weight has one row for each output.

    1. `linear(x, w, b)` → `picompile.linear(x, w, b)`.
    2. `matmul(x, wᵀ)`, `mm(x, wᵀ)` → `picompile.linear(x, w, None)`; where w itself stands in place of wᵀ, its
       transpose is the weight.
    3. `addmm(b, x, wᵀ)` → `picompile.linear(x, w, b)`.
    4. `picompile.linear(x, w, None) + b`, b a constant vector and the linear used nowhere else → `picompile.linear(x,
       w, b)`.
    5. `embedding(w, ids)` → `picompile.embedding(ids, w, 0)`.

    A matrix may be transposed and copied any number of times on the way; what is left is at most one transpose.
    """

    name: ClassVar[str] = "raise-linear"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> bool:
        """Products first, then the biases that are added to them, then lookups."""
        constant = constant_nodes(rewriter.graph)
        for node in calls(rewriter.graph, *_PRODUCTS):
            _raise_product(rewriter, node, constant)
        for node in calls(rewriter.graph, _aten.add.Tensor):
            _absorb_bias(rewriter, node, constant)
        for node in calls(rewriter.graph, _aten.embedding.default):
            matrix, ids = node.args[:2]
            if isinstance(matrix, Node) and matrix in constant:
                weight = _plain(rewriter, matrix, node)
                new = rewriter.call(EMBEDDING, (ids, weight, 0), before=node, sources=(node,))
                rewriter.replace(node, new)
        return rewriter.changes > 0


def _raise_product(rewriter: Rewriter, node: Node, constant: frozenset[Node]) -> None:
    x, matrix, bias = _operands(node)
    if matrix not in constant or x in constant or matrix.meta["val"].dim() != 2:
        return
    if bias is not None and bias not in constant:
        return
    weight = _plain(rewriter, matrix, node, transposed=not is_call(node, _aten.linear.default))
    new = rewriter.call(LINEAR, (x, weight, bias), before=node, sources=(node,))
    rewriter.replace(node, new)


def _operands(node: Node) -> tuple[Node, Node, Node | None]:
    """x, matrix and bias of a product."""
    values = arguments(node)
    if is_call(node, _aten.linear.default):
        return values["input"], values["weight"], values["bias"]
    if is_call(node, _aten.addmm.default):
        plain = values["beta"] == 1 and values["alpha"] == 1
        return values["mat1"], values["mat2"] if plain else values["mat1"], values["self"]
    return values["self"], values["mat2"] if "mat2" in values else values["other"], None


def _plain(rewriter: Rewriter, matrix: Node, before: Node, *, transposed: bool = False) -> Node:
    """The constant `matrix`, or its transpose, as no more than one transpose of what it is made from."""
    while is_call(matrix, *_TRANSPOSES, *_COPIES):
        transposed ^= not is_call(matrix, *_COPIES) and _swaps(matrix)
        matrix = matrix.all_input_nodes[0]
    if not transposed:
        return matrix
    return rewriter.call(_aten.transpose.int, (matrix, 0, 1), before=before, sources=(matrix,))


def _swaps(node: Node) -> bool:
    """Whether a transposing call on a matrix exchanges its dimensions, rather than leaving them as they are."""
    if is_call(node, *_ALWAYS_SWAPS):
        return True
    if is_call(node, _aten.permute.default):
        return [dim % 2 for dim in arguments(node)["dims"]] == [1, 0]
    values = arguments(node)
    return bool(values["dim0"] % 2 != values["dim1"] % 2)


def _absorb_bias(rewriter: Rewriter, node: Node, constant: frozenset[Node]) -> None:
    if node.kwargs or len(node.all_input_nodes) != 2:
        return
    for product, bias in (node.all_input_nodes, node.all_input_nodes[::-1]):
        if not is_call(product, LINEAR) or bias not in constant:
            continue
        x, weight, old = product.args
        if old is None and len(product.users) == 1 and bias.meta["val"].dim() == 1:
            new = rewriter.call(LINEAR, (x, weight, bias), before=node, sources=(product, node))
            rewriter.replace(node, new)
            return
