"""The operators of torch through which a value stays linear in another: moves, sums, products with known factors."""

from typing import Any

import torch

_aten = torch.ops.aten

# Operators that only move elements of their first argument.
MOVES: frozenset[Any] = frozenset(
    {
        _aten.alias.default,
        _aten.broadcast_to.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.flatten.using_ints,
        _aten.flip.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.mT.default,
        _aten.narrow.default,
        _aten.numpy_T.default,
        _aten.permute.default,
        _aten.repeat.default,
        _aten.repeat_interleave.self_int,
        _aten.reshape.default,
        _aten.roll.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unflatten.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._unsafe_view.default,
    }
)
# Operators that move elements of their first argument into several results.
SPLITS: frozenset[Any] = frozenset(
    {
        _aten.chunk.default,
        _aten.split.Tensor,
        _aten.split.sizes,
        _aten.split_with_sizes.default,
        _aten.unbind.int,
    }
)
JOINS: frozenset[Any] = frozenset({_aten.cat.default, _aten.stack.default})
SUMS: dict[Any, float] = {_aten.add.Tensor: 1.0, _aten.sub.Tensor: -1.0}
MULTIPLY: frozenset[Any] = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
DIVIDE: frozenset[Any] = frozenset({_aten.div.Tensor, _aten.div.Scalar})
NEGATE = _aten.neg.default
# A view of a tensor of other strides may be refused; element for element it is a reshape.
AS_RESHAPE: frozenset[Any] = frozenset({_aten.view.default, _aten._unsafe_view.default})
