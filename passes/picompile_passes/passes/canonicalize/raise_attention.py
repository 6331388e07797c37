"""Raises scaled dot product attention to `attention`, which has a window instead of a mask."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize.forms import Form, Forms

_aten = torch.ops.aten

# A mask is evaluated for this many tokens, or for as many as the graph takes: one more than the widest window in use
# (Mistral's 4096), to tell it from none.
_MASK_TOKENS = 4097


@dataclass(frozen=True)
class RaiseAttention(Pass):
    """Raises every `scaled_dot_product_attention` to `attention` over heads laid side by side.

    1. q, k, v [H, T, d] → views [T, H · d] of them, and the result back to [H, T, d].
    2. `is_causal`, or a mask that depends on positions alone and shows each token itself and all before it → window 0;
       one that shows the last w tokens only → window w. Any other mask cannot be expressed.
    3. k and v whose heads come in groups of n equal ones (repeated for grouped-query attention) → every n-th head.
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
        mask_forms = Forms(rewriter.graph_module, _MASK_TOKENS)
        windows: dict[Any, int] = {}
        repeats = [_repeats(forms, node) for node in found]
        for layer, (node, repeat) in enumerate(zip(found, repeats, strict=True)):
            values = arguments(node)
            key = (values["attn_mask"], values["is_causal"])
            if key not in windows:
                windows[key] = _window(mask_forms, node, *key)
            _emit(rewriter, node, layer, windows[key], repeat)


def _emit(rewriter: Rewriter, node: Node, layer: int, window: int, repeat: int) -> None:
    values = arguments(node)
    dims = {value.meta["val"].dim() for value in (node, values["query"], values["key"], values["value"])}
    if len(dims) != 1 or min(dims) < 3:
        raise UnsupportedGraphError(f"{node.name} ({node.target}): its q, k and v are not of its dimensions")

    def call(op: Any, *args: Any) -> Node:
        return rewriter.call(op, args, before=node, sources=(node,), layer=layer)

    def side_by_side(value: Node) -> Node:
        return call(_aten.flatten.using_ints, call(_aten.transpose.int, value, -2, -3), -2, -1)

    q, k, v = values["query"], values["key"], values["value"]
    if repeat > 1:
        head_dimension = k.meta["val"].dim() - 3
        k, v = (call(_aten.slice.Tensor, x, head_dimension, 0, 2**63 - 1, repeat) for x in (k, v))
    heads, kv_heads = int(q.meta["val"].shape[-3]), int(k.meta["val"].shape[-3])
    scale = 1.0 / math.sqrt(q.meta["val"].shape[-1]) if values["scale"] is None else values["scale"]
    sides = [side_by_side(x) for x in (q, k, v)]
    result = call(ATTENTION, *sides, heads, kv_heads, float(scale), layer, window)
    rewriter.replace(node, call(_aten.transpose.int, call(_aten.unflatten.int, result, -1, [heads, -1]), -2, -3))
    # torch takes it for a random operator, which stays even where nothing uses it.
    rewriter.graph.erase_node(node)


def _repeats(forms: Forms, node: Node) -> int:
    """How many equal heads stand side by side, in k and in v alike."""
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


def _window(forms: Forms, node: Node, mask: Node | None, is_causal: bool) -> int:
    """The window that the mask stands for, 0 for none. Raises `UnsupportedGraphError` for a mask of another form."""
    if mask is None and is_causal:
        return 0
    if mask is None or is_causal or not forms.is_known(mask):
        raise UnsupportedGraphError(f"{node.name} ({node.target}): only causal attention is supported")
    shown = forms.known(mask)
    visible = shown if shown.dtype == torch.bool else shown == 0
    # An additive mask may hide with a large negative number instead of infinity; anything else would be a bias.
    hidden_fully = shown.dtype == torch.bool or bool((shown[~visible] <= -1e9).all())
    visible = visible.expand(*visible.shape[:-2], forms.tokens, forms.tokens).reshape(-1, forms.tokens, forms.tokens)
    width = int(visible[0, -1].sum())
    expected = torch.ones(forms.tokens, forms.tokens, dtype=torch.bool).tril_().triu_(1 - width)
    if not hidden_fully or not torch.equal(visible, expected.expand_as(visible)):
        raise UnsupportedGraphError(f"{mask.name} ({mask.target}): a mask other than causal, with or without a window")
    return 0 if width == forms.tokens else width
