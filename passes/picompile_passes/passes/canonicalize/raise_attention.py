"""Raises scaled dot product attention to `attention`, which has a window and slopes instead of a mask."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import EqualValues, arguments, calls
from picompile_passes.graph.operands import ATTENTION, SharedConstants
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize.forms import Form, Forms
from picompile_passes.passes.canonicalize.masks import MASK_TOKENS, VisibleSpan, read_mask

_aten = torch.ops.aten


@dataclass(frozen=True)
class RaiseAttention(Pass):
    """Raises every `scaled_dot_product_attention` to `attention` over heads laid side by side.

    1. q, k, v [H, T, d] → views [T, H · d] of them, and the result back to [H, T, d].
    2. `is_causal`, or a mask that depends on positions alone and shows each token itself and all before it → window 0;
       one that shows the last w tokens only → window w. Any other mask but those of rule 3 cannot be expressed.
    3. Such a mask that adds to the visible scores of each head a constant times the key's position, or times the
       distance of key and query, as ALiBi does (arXiv 2108.12409) → `slopes`. Equal slopes are one constant.
    4. k and v whose heads come in groups of n equal ones (repeated for grouped-query attention) → every n-th head.
    """

    name: ClassVar[str] = "raise-attention"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Raise all attentions; layers are numbered in the order in which their attentions appear."""
        found = list(calls(rewriter.graph, _aten.scaled_dot_product_attention.default))
        if not found:
            return
        forms = Forms(rewriter.graph_module)
        mask_forms = Forms(rewriter.graph_module, MASK_TOKENS)
        constants = SharedConstants(rewriter)
        # Every layer may compute the same mask anew, and to read one takes seconds.
        equal, spans = EqualValues(), dict[Any, VisibleSpan]()
        repeats = [_repeats(forms, node) for node in found]
        for layer, (node, repeat) in enumerate(zip(found, repeats, strict=True)):
            values = arguments(node)
            mask, is_causal = values["attn_mask"], values["is_causal"]
            key = (None if mask is None else equal.number(mask), is_causal, int(node.meta["val"].shape[-3]))
            if key not in spans:
                spans[key] = read_mask(mask_forms, node, mask, is_causal)
            span = spans[key]
            slopes = None if span.slopes is None else constants.get("slopes", span.slopes, values["attn_mask"])
            _emit(
                rewriter, node, layer, options=[span.window, *([] if slopes is None else [0.0, slopes])], repeat=repeat
            )


def _emit(rewriter: Rewriter, node: Node, layer: int, options: list[Any], repeat: int) -> None:
    """Replace `node` by an attention with `options`, the window and all arguments behind it."""
    values = arguments(node)
    dims = {value.meta["val"].dim() for value in (node, values["query"], values["key"], values["value"])}
    if len(dims) != 1 or min(dims) < 3:
        raise UnsupportedGraphError(f"{node.name} ({node.target}): its q, k and v are not of its dimensions")

    def call(op: Any, *args: Any) -> Node:
        return rewriter.call(op, args, before=node, sources=(node,))

    def side_by_side(value: Node) -> Node:
        return call(_aten.flatten.using_ints, call(_aten.transpose.int, value, -2, -3), -2, -1)

    q, k, v = values["query"], values["key"], values["value"]
    if repeat > 1:
        head_dimension = k.meta["val"].dim() - 3
        k, v = (call(_aten.slice.Tensor, x, head_dimension, 0, 2**63 - 1, repeat) for x in (k, v))
    heads, kv_heads = int(q.meta["val"].shape[-3]), int(k.meta["val"].shape[-3])
    scale = 1.0 / math.sqrt(q.meta["val"].shape[-1]) if values["scale"] is None else values["scale"]
    sides = [side_by_side(x) for x in (q, k, v)]
    result = call(ATTENTION, *sides, heads, kv_heads, float(scale), layer, *options)
    rewriter.replace(node, call(_aten.transpose.int, call(_aten.unflatten.int, result, -1, [heads, -1]), -2, -3))
    # torch takes it for a random operator, which stays even where nothing uses it.
    rewriter.graph.erase_node(node)


def _repeats(forms: Forms, node: Node) -> int:
    """Return the number of equal heads that stand side by side, in k and in v alike."""
    values = arguments(node)
    return math.gcd(*(_equal_heads(forms, values[name]) for name in ("key", "value")))


def _equal_heads(forms: Forms, node: Node) -> int:
    if forms.is_known(node):
        return 1
    form = forms.form(node)
    heads = form.shape[-3]
    for size in range(heads, 1, -1):
        if heads % size == 0 and all(map(_repeats_every(size), _tensors(form))):
            return size
    return 1


def _repeats_every(size: int) -> Any:
    def check(tensor: Tensor) -> bool:
        groups = tensor.reshape(*tensor.shape[:-3], -1, size, *tensor.shape[-2:])
        return bool((groups == groups.narrow(-3, 0, 1)).all())

    return check


def _tensors(form: Form) -> list[Tensor]:
    return [tensor for term in form.terms for tensor in (term.index, term.factor)]
