"""Styles of captured decoders: a `CapturedStyle` has one field for every choice that models make differently.

The first choice of each field is the plainest; failing examples shrink to it. Where one choice makes another
meaningless (a window where the mask is `is_causal`), `consistent` corrects it. `ACTIVATIONS` names the ways
in which models write each activation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from picompile.testing.captured.writer import CaptureWriter

_aten = torch.ops.aten
_mul, _add, _div = _aten.mul.Tensor, _aten.add.Tensor, _aten.div.Tensor


class ActivationStyle(NamedTuple):
    """`write(writer, x, threshold)`; `text` is the dialect's, in which {} stands for the threshold."""

    text: str
    write: Callable[[CaptureWriter, Node, float], Node]


def _maximum(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_aten.maximum.default, x, w.call(_aten.zeros_like.default, x))


def _max(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_aten.max.other, w.call(_aten.zeros_like.default, x), x)


def _where_positive(w: CaptureWriter, x: Node, _: float) -> Node:
    zeros = w.call(_aten.zeros_like.default, x)
    return w.call(_aten.where.self, w.call(_aten.gt.Scalar, x, 0), x, zeros)


def _relu(w: CaptureWriter, x: Node) -> Node:
    return w.call(_aten.relu.default, x)


def _relu_times_itself(w: CaptureWriter, x: Node, _: float) -> Node:
    rectified = _relu(w, x)
    return w.call(_mul, rectified, rectified)


def _minimum_of_six(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_aten.clamp_max.default, _relu(w, x), 6.0)


def _times_sigmoid(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_mul, x, w.call(_aten.sigmoid.default, x))


def _sigmoid_times(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_mul, w.call(_aten.sigmoid.default, x), x)


def _over_exponential(w: CaptureWriter, x: Node, _: float) -> Node:
    exponential = w.call(_aten.exp.default, w.call(_aten.neg.default, x))
    return w.call(_div, x, w.call(_add, exponential, 1.0))


def _gelu_by_erf(w: CaptureWriter, x: Node, _: float) -> Node:
    """transformers' gelu_python."""
    erf = w.call(_aten.erf.default, w.call(_div, x, 2.0**0.5))
    return w.call(_mul, w.call(_mul, x, 0.5), w.call(_add, erf, 1.0))


def _gelu_by_erf_late(w: CaptureWriter, x: Node, _: float) -> Node:
    erf = w.call(_aten.erf.default, w.call(_mul, x, 0.5**0.5))
    return w.call(_div, w.call(_mul, w.call(_add, erf, 1.0), x), 2.0)


def _gelu_tanh(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_aten.gelu.default, x, approximate="tanh")


def _gelu_new(w: CaptureWriter, x: Node, _: float) -> Node:
    """transformers' gelu_new."""
    cubed = w.call(_mul, w.call(_aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
    inner = w.call(_mul, w.call(_add, x, cubed), 0.7978845608028654)
    outer = w.call(_add, w.call(_aten.tanh.default, inner), 1.0)
    return w.call(_mul, w.call(_mul, x, 0.5), outer)


def _gelu_fast(w: CaptureWriter, x: Node, _: float) -> Node:
    """transformers' gelu_fast."""
    factor = w.call(_add, w.call(_mul, w.call(_mul, x, 0.044715), x), 1.0)
    tanh = w.call(_aten.tanh.default, w.call(_mul, w.call(_mul, x, 0.7978845608), factor))
    return w.call(_mul, w.call(_mul, x, 0.5), w.call(_add, tanh, 1.0))


def _quick_gelu(w: CaptureWriter, x: Node, _: float) -> Node:
    return w.call(_mul, x, w.call(_aten.sigmoid.default, w.call(_mul, x, 1.702)))


def _fatrelu_by_where(w: CaptureWriter, x: Node, threshold: float) -> Node:
    zeros = w.call(_aten.zeros_like.default, x)
    return w.call(_aten.where.self, w.call(_aten.gt.Scalar, x, threshold), x, zeros)


def _fatrelu_by_number(w: CaptureWriter, x: Node, threshold: float) -> Node:
    """`torch.where(x > threshold, x, 0.0)`."""
    return w.call(_aten.where.ScalarOther, w.call(_aten.gt.Scalar, x, threshold), x, 0.0)


def _fatrelu_by_float_mask(w: CaptureWriter, x: Node, threshold: float) -> Node:
    mask = w.call(_aten._to_copy.default, w.call(_aten.gt.Scalar, x, threshold), dtype=torch.float32)
    return w.call(_mul, x, mask)


def _fatrelu_by_constant(w: CaptureWriter, x: Node, threshold: float) -> Node:
    zero = w.shared("zero", lambda: w.constant("model.zero", torch.zeros(())))
    return w.call(_aten.where.self, w.call(_aten.gt.Scalar, x, threshold), x, zero)


def _fatrelu_by_full(w: CaptureWriter, x: Node, threshold: float) -> Node:
    zero = w.call(_aten.full.default, [], 0.0)
    return w.call(_aten.where.self, w.call(_aten.le.Scalar, x, threshold), zero, x)


def _fatrelu_by_mask(w: CaptureWriter, x: Node, threshold: float) -> Node:
    return w.call(_mul, x, w.call(_aten.gt.Scalar, x, threshold))


def _fatrelu_by_fill(w: CaptureWriter, x: Node, threshold: float) -> Node:
    return w.call(_aten.masked_fill.Scalar, x, w.call(_aten.le.Scalar, x, threshold), 0.0)


ACTIVATIONS: dict[str, ActivationStyle] = {
    "relu": ActivationStyle("relu", lambda w, x, _: _relu(w, x)),
    "clamp_min": ActivationStyle("relu", lambda w, x, _: w.call(_aten.clamp_min.default, x, 0)),
    "clamp": ActivationStyle("relu", lambda w, x, _: w.call(_aten.clamp.default, x, 0)),
    "maximum": ActivationStyle("relu", _maximum),
    "max": ActivationStyle("relu", _max),
    "where positive": ActivationStyle("relu", _where_positive),
    "relu pow 2": ActivationStyle("relu2", lambda w, x, _: w.call(_aten.pow.Tensor_Scalar, _relu(w, x), 2)),
    "relu square": ActivationStyle("relu2", lambda w, x, _: w.call(_aten.square.default, _relu(w, x))),
    "relu times itself": ActivationStyle("relu2", _relu_times_itself),
    "relu times input": ActivationStyle("relu2", lambda w, x, _: w.call(_mul, x, _relu(w, x))),
    "relu6": ActivationStyle("relu6", lambda w, x, _: w.call(_aten.relu6.default, x)),
    "hardtanh": ActivationStyle("relu6", lambda w, x, _: w.call(_aten.hardtanh.default, x, 0.0, 6.0)),
    "clamp to 6": ActivationStyle("relu6", lambda w, x, _: w.call(_aten.clamp.default, x, 0, 6)),
    "relu clamp_max": ActivationStyle("relu6", _minimum_of_six),
    "silu": ActivationStyle("silu", lambda w, x, _: w.call(_aten.silu.default, x)),
    "times sigmoid": ActivationStyle("silu", _times_sigmoid),
    "sigmoid times": ActivationStyle("silu", _sigmoid_times),
    "over exponential": ActivationStyle("silu", _over_exponential),
    "gelu": ActivationStyle("gelu", lambda w, x, _: w.call(_aten.gelu.default, x)),
    "gelu by erf": ActivationStyle("gelu", _gelu_by_erf),
    "gelu by erf, halved late": ActivationStyle("gelu", _gelu_by_erf_late),
    "gelu tanh": ActivationStyle("gelu_tanh", _gelu_tanh),
    "gelu_new": ActivationStyle("gelu_tanh", _gelu_new),
    "gelu_fast": ActivationStyle("gelu_tanh", _gelu_fast),
    "quick_gelu": ActivationStyle("quick_gelu", _quick_gelu),
    "sigmoid": ActivationStyle("sigmoid", lambda w, x, _: w.call(_aten.sigmoid.default, x)),
    "tanh": ActivationStyle("tanh", lambda w, x, _: w.call(_aten.tanh.default, x)),
    "fatrelu by where": ActivationStyle("fatrelu({})", _fatrelu_by_where),
    "fatrelu by constant": ActivationStyle("fatrelu({})", _fatrelu_by_constant),
    "fatrelu by full": ActivationStyle("fatrelu({})", _fatrelu_by_full),
    "fatrelu by number": ActivationStyle("fatrelu({})", _fatrelu_by_number),
    "fatrelu by float mask": ActivationStyle("fatrelu({})", _fatrelu_by_float_mask),
    "fatrelu by mask": ActivationStyle("fatrelu({})", _fatrelu_by_mask),
    "fatrelu by fill": ActivationStyle("fatrelu({})", _fatrelu_by_fill),
    "threshold": ActivationStyle("fatrelu({})", lambda w, x, t: w.call(_aten.threshold.default, x, t, 0.0)),
    "identity": ActivationStyle("identity", lambda w, x, _: x),
}


# Masks and tables that are buffers have this many rows, and graphs that slice them take no more tokens.
TABLE_ROWS = 64


def one_of(*choices: Any) -> Any:
    """A field of a style: its choices, the first of which is the default."""
    return field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder. `embedding` is the width of the embedding where it differs from `hidden`, else 0."""

    hidden: int = 3
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    value_dim: int = 2
    ffn: int = 1
    vocab: int = 2
    layers: int = 1
    embedding: int = 0


@dataclass(frozen=True)
class NormStyle:
    """The style of normalizations. `writing` and the fields after it apply to those written out.

    `centered` is a layer norm as the root mean square of deviations from the mean, `centered twice` one that computes
    them twice. `one_more` adds 1 to the weight (Gemma).
    """

    kind: str = one_of("rms", "layer", "centered", "centered twice")
    eps: float = one_of(1e-6, 1e-5, 1e-3)
    affine: str = one_of("weight", "none", "weight and bias")
    one_more: bool = one_of(False, True)
    writing: str = one_of("rsqrt", "sqrt", "reciprocal", "one over sqrt", "operator", "operator without eps")
    square: str = one_of("pow", "mul", "square")
    weight_first: bool = one_of(False, True)
    inverse_first: bool = one_of(False, True)


@dataclass(frozen=True)
class LinearStyle:
    """The style of products with a weight. `conv1d` is GPT-2's: the weight has one row for each input."""

    product: str = one_of("linear", "linear plus bias", "matmul", "flattened", "conv1d")
    transposed: str = one_of("permute", "t", "transpose")
    bias_first: bool = one_of(False, True)


@dataclass(frozen=True)
class MaskStyle:
    """The style of causal masks. `window` 0 means no window; with `alternate`, every second layer has none.

    `slopes` is how the mask adds ALiBi: slopes times the positions of keys, or times their distance from the query.
    """

    visible: str = one_of("is_causal", "positions", "arange", "transformers", "tril", "triu", "buffer")
    form: str = one_of("boolean", "where", "masked_fill", "product", "log")
    hidden: float = one_of(-torch.inf, torch.finfo(torch.float32).min)
    dimensions: str = one_of("plain", "heads", "expanded")
    window: int = one_of(0, 1, 3, 5, 40)
    alternate: bool = one_of(False, True)
    slopes: str = one_of("no", "keys", "distances")


@dataclass(frozen=True)
class AttentionStyle:
    """The style of attention, from the projections to their merging.

    `picompile`: with our operator, as capture of transformers' models gives it; that alone may have a soft cap and
    sinks. `products`: as two products and a softmax. `head_norm` is of each head of queries and keys, before or after
    they are turned. `shared_keys`: the part of a key that turns is of all heads, and `cat` puts it beside each one's
    own, or both are filled in.
    """

    operator: str = one_of("sdpa", "picompile", "products")
    head_norm: str = one_of("no", "before", "after")
    linear: LinearStyle = field(default_factory=LinearStyle)
    mask: MaskStyle = field(default_factory=MaskStyle)
    qkv_bias: bool = one_of(False, True)
    output_bias: bool = one_of(False, True)
    fused: str = one_of("no", "slice", "narrow", "split", "chunk", "unbind", "interleaved", "interleaved by index")
    scale: str = one_of("default", "given", "query times", "query divided", "both", "late query times")
    repeat: str = one_of("expand", "repeat", "stack", "repeat_interleave", "index_select", "enable_gqa", "broadcast")
    repeat_early: bool = one_of(False, True)
    permute: bool = one_of(False, True)
    softcap: float = one_of(0.0, 2.0)
    sinks: bool = one_of(False, True)
    shared_keys: str = one_of("no", "cat", "filled")


@dataclass(frozen=True)
class PositionStyle:
    """The style of positions. `turning` is the part of a head that a rotary embedding turns.

    `slice` and `sliced sinusoid` are the first rows of a table, of a parameter or a buffer.
    """

    learned: str = one_of("no", "positions", "arange", "cumsum", "sinusoid", "slice", "sliced sinusoid")
    offset: int = one_of(0, 2)
    rotary: str = one_of("no", "halves", "explicit halves", "neighbours", "repeated neighbours")
    turning: str = one_of("all", "first", "last")
    tables: str = one_of("computed", "index", "index_select", "slice", "gather")
    angles: str = one_of("mul", "matmul", "outer", "einsum")
    frequencies: str = one_of("buffer", "inside")
    from_arange: bool = one_of(False, True)
    cast: bool = one_of(False, True)
    base: float = one_of(10_000.0, 10.0, 1_000_000.0)
    factor: float = one_of(1.0, 1.25)
    before_transpose: bool = one_of(False, True)
    table_first: bool = one_of(False, True)


@dataclass(frozen=True)
class FfnStyle:
    """The style of feed-forward blocks. `up_activation`, `fused` and `up_first` apply to gated ones."""

    linear: LinearStyle = field(default_factory=LinearStyle)
    gated: bool = one_of(False, True)
    activation: str = one_of(*ACTIVATIONS)
    up_activation: str = one_of("identity", "relu", "clamp_min")
    threshold: float = one_of(0.01, 0.05, 0.3)
    fused: str = one_of("no", "slice", "chunk", "split", "interleaved", "strided")
    bias: bool = one_of(False, True)
    down_bias: bool = one_of(False, True)
    up_first: bool = one_of(False, True)
    flat: bool = one_of(False, True)


@dataclass(frozen=True)
class CapturedStyle:
    """The style of a decoder. `copies` is the seed of the copies inserted into it, 0 for none.

    `embedding_factor` and `residual_factor` are what the embedding, and what is added to the residual stream, is
    multiplied by; `logits` is what becomes of the head's result.
    """

    sizes: Sizes = Sizes()
    norm: NormStyle = NormStyle()
    attention: AttentionStyle = AttentionStyle()
    positions: PositionStyle = PositionStyle()
    ffn: FfnStyle = FfnStyle()
    head: LinearStyle = LinearStyle()
    batch: str = one_of("unsqueeze", "none", "view")
    unbatch: str = one_of("squeeze", "select", "view")
    views: str = one_of("view", "reshape", "flatten")
    count: str = one_of("size", "minus one")
    block: str = one_of("pre", "post", "sandwich", "parallel", "parallel with two norms")
    residual_first: bool = one_of(True, False)
    embedding_factor: float = one_of(1.0, 9.5)
    residual_factor: float = one_of(1.0, 0.25)
    logits: str = one_of("plain", "scaled", "capped")
    embedding_norm: bool = one_of(False, True)
    final_norm: bool = one_of(True, False)
    tied: str = one_of("no", "one node", "two nodes")
    head_bias: bool = one_of(False, True)
    head_slice: bool = one_of(False, True)
    max_tokens: int | None = one_of(48, 300, None)
    copies: int = 0


def consistent(style: CapturedStyle) -> CapturedStyle:
    """Return `style` with sizes that its way of splitting allows, and without choices that mean nothing in it."""
    return replace(
        style,
        sizes=_sizes(style),
        attention=_attention(style),
        positions=_positions(style.positions),
        ffn=_ffn(style.ffn),
        max_tokens=TABLE_ROWS if _slices_tables(style) else _max_tokens(style),
        copies=0 if _centers_heads(style) else style.copies,
    )


def _sizes(style: CapturedStyle) -> Sizes:
    sizes, fused = style.sizes, style.attention.fused
    if fused in ("chunk", "unbind", "interleaved", "interleaved by index"):
        sizes = replace(sizes, value_dim=sizes.head_dim)
    return replace(sizes, kv_heads=sizes.heads) if fused in ("chunk", "unbind") else sizes


def _attention(style: CapturedStyle) -> AttentionStyle:
    attention, mask = style.attention, style.attention.mask
    if mask.visible == "is_causal" and attention.operator == "products":
        mask = replace(mask, visible="positions")
    if mask.visible == "is_causal" and attention.operator == "sdpa":
        mask = replace(mask, window=0, slopes="no")
    if mask.visible == "triu":
        mask = replace(mask, form="boolean")
    if mask.form == "product":
        # Infinity times 0 is no number.
        mask = replace(mask, hidden=torch.finfo(torch.float32).min)
    repeats = "expand" if attention.repeat == "broadcast" and _sizes(style).kv_heads > 1 else attention.repeat
    if attention.operator == "products" and repeats == "enable_gqa":
        repeats = "expand"
    if attention.operator != "picompile":
        attention = replace(attention, softcap=0.0, sinks=False)
    # A norm's weights have the order of the elements, which pairs of neighbours would change.
    in_order = style.positions.rotary in ("halves", "explicit halves") and style.positions.turning == "all"
    norm = "before" if attention.head_norm == "after" and not in_order else attention.head_norm
    # A norm undoes what the query was multiplied by before.
    scale = "given" if norm != "no" and attention.scale in ("query times", "query divided") else attention.scale
    if attention.shared_keys != "no":
        if style.positions.rotary == "no" or style.positions.turning == "all":
            attention = replace(attention, shared_keys="no")
        else:
            norm = "no"
            attention = replace(attention, fused="no", repeat_early=False)
    return replace(attention, mask=mask, repeat=repeats, head_norm=norm, scale=scale)


def _positions(positions: PositionStyle) -> PositionStyle:
    if positions.learned in ("slice", "sliced sinusoid"):
        positions = replace(positions, offset=0)
    # The factor of `rotary` is for whole heads.
    return positions if positions.turning == "all" else replace(positions, factor=1.0)


def _ffn(ffn: FfnStyle) -> FfnStyle:
    if ffn.gated:
        return ffn
    # Without any activation there is no block but two linears.
    activation = "relu" if ffn.activation == "identity" else ffn.activation
    return replace(ffn, activation=activation, up_activation="identity", fused="no", up_first=False)


def _max_tokens(style: CapturedStyle) -> int | None:
    """Squares for each head, of as many tokens as a mask without a bound is evaluated for, would take seconds."""
    squares = style.attention.operator != "picompile" and style.attention.mask.slopes != "no"
    return 300 if squares and style.max_tokens is None else style.max_tokens


def _centers_heads(style: CapturedStyle) -> bool:
    """Return whether means of heads are written out: copies of them lay out memory anew, which are no mere copies."""
    return style.attention.head_norm != "no" and style.norm.kind.startswith("centered")


def _slices_tables(style: CapturedStyle) -> bool:
    sliced_mask = style.attention.operator != "picompile" and style.attention.mask.visible == "buffer"
    sliced_rows = style.positions.learned in ("slice", "sliced sinusoid")
    return sliced_mask or sliced_rows or (style.positions.rotary != "no" and style.positions.tables == "slice")
