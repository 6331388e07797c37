"""Removes operators that return their argument: copies, casts to the dtype it has, dropout outside training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape

_aten = torch.ops.aten
_ALIASES = (_aten.alias.default, _aten.detach.default)
_COPIES = (_aten.clone.default, _aten.contiguous.default)
_CASTS = (
    _aten._to_copy.default,
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.type_as.default),
)


@dataclass(frozen=True)
class RemoveCopies(Pass):
    """Removes copies, so that the patterns of later passes need not look through them.

    1. `alias`, `detach` of x → x; `clone` and `contiguous` of x too, where x is contiguous as it is.
    2. `_to_copy`, `to` and `type_as` of x to the dtype that x has → x; `contiguous` of x where they lay out its memory
       anew.
    3. `copy` of x into a value of x's shape and dtype → x; `contiguous` of x as in rule 2.
    4. `dropout` of x outside training → x.
    """

    name: ClassVar[str] = "remove-copies"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Visit each candidate once; a chain of copies is removed from its first node on."""
        for node in calls(rewriter.graph, *_ALIASES, *_COPIES, *_CASTS, _aten.copy.default, _aten.dropout.default):
            if not _gives_back_argument(node):
                continue
            value: Node = node.args[1 if node.target == _aten.copy.default else 0]  # type: ignore[assignment]
            if _lays_out_anew(node, value):
                value = rewriter.call(_aten.contiguous.default, (value,), before=node, sources=(node,))
            rewriter.replace(node, value)
            rewriter.graph.erase_node(node)


def _lays_out_anew(node: Node, value: Node) -> bool:
    """Whether a view after the copy `node` may be one that `value` itself does not allow."""
    before, after = value.meta["val"], node.meta["val"]
    return not before.is_contiguous() and not same_shape(before.stride(), after.stride())


def _gives_back_argument(node: Node) -> bool:
    if node.target in _ALIASES:
        return True
    if node.target in _COPIES:
        # A view after it may need the memory laid out anew.
        return bool(node.all_input_nodes[0].meta["val"].is_contiguous())
    if node.target in _CASTS:
        return bool(node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype)
    if node.target == _aten.copy.default:
        result, value = node.meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
        return bool(result.dtype == value.dtype) and same_shape(result.shape, value.shape)
    return not arguments(node)["train"]
