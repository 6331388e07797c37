"""Raises matrix products with a weight, and table lookups, to `linear` and `embedding`."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.graph.nodes import arguments, calls, constant_nodes, is_call, positions_input
from picompile_passes.graph.operands import EMBEDDING, LINEAR
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape
from picompile_passes.passes.canonicalize.forms import Forms

_aten = torch.ops.aten
_ALWAYS_SWAPS = (_aten.t.default, _aten.numpy_T.default, _aten.mT.default)
_TRANSPOSES = (_aten.permute.default, _aten.transpose.int, *_ALWAYS_SWAPS)
_COPIES = (_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.detach.default)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default)
_PRODUCTS = (_aten.linear.default, _aten.addmm.default, _aten.mm.default, _aten.matmul.default)


@dataclass(frozen=True)
class RaiseLinear(Pass):
    """Raises every product of a value with a constant matrix to `linear`, whose weight has one row for each output.

    1. `linear(x, w, b)` → `picompile.linear(x, w, b)`.
    2. `matmul(x, wᵀ)`, `mm(x, wᵀ)` → `picompile.linear(x, w, None)`; where w itself stands in place of wᵀ, its
       transpose is the weight.
    3. `addmm(b, x, wᵀ)` → `picompile.linear(x, w, b)`.
    4. `picompile.linear(x, w, None) + b`, b a constant vector and the linear used nowhere else → `picompile.linear(x,
       w, b)`. Views may lie between the two, and are put behind.
    5. `embedding(w, ids)` → `picompile.embedding(ids, w, 0)`; where all ids are one number, as types of tokens are, row
       ids of w. `index(w, [ids])` and `index_select(w, 0, ids)` alike.
    6. The first rows of a parameter, as many as there are tokens → `picompile.embedding(positions, w, 0)`. Those of a
       buffer are known by themselves, and may be a mask.

    A matrix may be transposed and copied any number of times on the way; what is left is at most one transpose.
    """

    name: ClassVar[str] = "raise-linear"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Raise products first, then the biases that are added to them, then lookups."""
        constant = constant_nodes(rewriter.graph)
        for node in calls(rewriter.graph, _aten.slice.Tensor):
            _raise_slice(rewriter, node, constant)
        for node in calls(rewriter.graph, *_PRODUCTS):
            _raise_product(rewriter, node, constant)
        for node in calls(rewriter.graph, _aten.add.Tensor):
            _absorb_bias(rewriter, node, constant)
        for node in calls(rewriter.graph, _aten.embedding.default, _aten.index.Tensor, _aten.index_select.default):
            matrix, ids = _lookup(node)
            if not isinstance(matrix, Node) or matrix not in constant:
                continue
            row = _only_row(rewriter, ids)
            if row is not None:
                rewriter.replace(node, rewriter.call(_aten.select.int, (matrix, 0, row), before=node, sources=(node,)))
            else:
                weight = _plain(rewriter, matrix, node)
                new = rewriter.call(EMBEDDING, (ids, weight, 0), before=node, sources=(node,))
                rewriter.replace(node, new)


def _raise_slice(rewriter: Rewriter, node: Node, constant: frozenset[Node]) -> None:
    """Raise the first rows of a matrix, as many as there are tokens, to a lookup by position."""
    values = arguments(node)
    matrix, size = values["self"], node.meta["val"].shape[0]
    if matrix not in constant or node in constant or values["dim"] or values["step"] != 1 or isinstance(size, int):
        return
    if Forms(rewriter.graph_module).is_known(matrix):
        return
    positions = positions_input(rewriter.graph)
    if same_shape((size,), positions.meta["val"].shape) and isinstance(values["start"] or 0, int):
        args = (positions, _plain(rewriter, matrix, node), values["start"] or 0)
        rewriter.replace(node, rewriter.call(EMBEDDING, args, before=node, sources=(node,)))


def _lookup(node: Node) -> tuple[Any, Any]:
    """Return the matrix and the ids of a lookup of rows, (None, None) where a call looks up something else."""
    if is_call(node, _aten.embedding.default):
        return node.args[0], node.args[1]
    if is_call(node, _aten.index.Tensor):
        matrix, indices = node.args
        only = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
        return (matrix, only) if only is not None and matrix.meta["val"].dim() == 2 else (None, None)  # type: ignore[union-attr]
    matrix, dim, ids = node.args
    plain = dim == 0 and matrix.meta["val"].dim() == 2  # type: ignore[union-attr]
    return (matrix, ids) if plain and isinstance(ids, Node) and ids.op != "get_attr" else (None, None)


def _only_row(rewriter: Rewriter, ids: Any) -> int | None:
    """Return the one row that `ids` look up for all tokens, None where they depend on tokens or positions."""
    if not isinstance(ids, Node) or ids.op == "placeholder":
        return None
    forms = Forms(rewriter.graph_module)
    if not forms.is_known(ids):
        return None
    rows = torch.as_tensor(forms.known(ids)).flatten()
    return int(rows[0]) if bool((rows == rows[0]).all()) else None


def _raise_product(rewriter: Rewriter, node: Node, constant: frozenset[Node]) -> None:
    x, matrix, bias = _operands(node)
    if matrix not in constant or x in constant or matrix.meta["val"].dim() != 2:
        return
    bias = None if bias is None else _vector(bias)
    if bias is not None and (bias not in constant or bias.meta["val"].dim() != 1):
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
    for value, addend in (node.all_input_nodes, node.all_input_nodes[::-1]):
        views, bias = _views(value), _vector(addend)
        product: Node = views[-1].all_input_nodes[0] if views else value
        if not is_call(product, LINEAR) or bias not in constant or not _same_dimensions(node, value):
            continue
        x, weight, old = product.args
        if old is None and len(product.users) == 1 and bias.meta["val"].dim() == 1:
            new = rewriter.call(LINEAR, (x, weight, bias), before=node, sources=(product, node))
            for view in reversed(views):
                new = rewriter.call(view.target, (new, *view.args[1:]), before=node, sources=(view,))  # type: ignore[arg-type]
            rewriter.replace(node, new)
            return


def _views(value: Node) -> list[Node]:
    """The views, outermost first, through which `value` shows the same columns of another and nothing else does."""
    views: list[Node] = []
    while is_call(value, *_VIEWS) and not value.kwargs and len(value.users) == 1:
        inner = value.all_input_nodes[0]
        if not same_shape(value.meta["val"].shape[-1:], inner.meta["val"].shape[-1:]):
            break
        views.append(value)
        value = inner
    return views


def _vector(constant: Node) -> Node:
    """Return the vector for its last dimension that `constant` is a view of; `constant` itself if it is of none."""
    inner = constant
    while is_call(inner, *_VIEWS, *_COPIES):
        inner = inner.all_input_nodes[0]
    value, vector = constant.meta["val"], inner.meta["val"]
    # The token count is left a symbol: a plain comparison would fix it.
    is_vector = same_shape(vector.shape, value.shape[-1:]) and same_shape((vector.numel(),), (value.numel(),))
    return inner if is_vector else constant


def _same_dimensions(left: Node, right: Node) -> bool:
    return bool(left.meta["val"].dim() == right.meta["val"].dim())
