"""The operators, each with its equation, shapes, fake implementation and eager reference.

Symbols: T tokens, D hidden size, F neurons of a feed-forward block, V vocabulary. All floats are float32. Matrices have
one row for each output (`linear`) or for each neuron (`ffn`: gate, up *and* down, which is the transpose of a
checkpoint's down projection), because a row is what is stored, moved and skipped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.activations import parse_activation
from picompile_passes.dialect.formats import dequantize_rows, quantize_rows
from picompile_passes.predictors import predictor_kind
from picompile_passes.weight_formats import FORMATS


@torch.library.custom_op("picompile::embedding", mutates_args=())
def embedding(ids: Tensor, weight: Tensor, offset: int) -> Tensor:
    """Row lookup: y[t] = weight[ids[t] + offset]. ids int64 [T], weight [V, D] → [T, D].

    `offset` is for OPT, whose position table starts two rows late.
    """
    return F.embedding(ids + offset, weight)


@embedding.register_fake
def _(ids: Tensor, weight: Tensor, offset: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@torch.library.custom_op("picompile::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x · weightᵀ + bias. x [T, K], weight [N, K], bias [N] → [T, N]."""
    return F.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("picompile::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467).

    x [T, D], weight [D] → [T, D].
    """
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("picompile::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias (arXiv 1607.06450).

    x [T, D], weight and bias [D] → [T, D].
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[T, heads · d] → [T, heads, d]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


@torch.library.custom_op("picompile::rotary", mutates_args=())
def rotary(x: Tensor, positions: Tensor, inverse_frequency: Tensor, heads: int, scaling: float) -> Tensor:
    """Rotary position embedding in the half-split form of GPT-NeoX and Llama (arXiv 2104.09864).

    With angle[t, i] = positions[t] · inverse_frequency[i], each head's (x[i], x[i + d/2]) turns by the angle and is
    multiplied by `scaling` (1 except for YaRN). x [T, heads · d], positions int64 [T], inverse_frequency [d/2] → like
    x.
    """
    angle = positions.to(torch.float32).unsqueeze(-1) * inverse_frequency.to(torch.float32)
    cos, sin = (angle.cos() * scaling).unsqueeze(-2), (angle.sin() * scaling).unsqueeze(-2)
    first, second = _split_heads(x, heads).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


@rotary.register_fake
def _(x: Tensor, positions: Tensor, inverse_frequency: Tensor, heads: int, scaling: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("picompile::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, scale: float, layer: int, window: int
) -> Tensor:
    """Causal attention: softmax(q · kᵀ · scale) · v; heads / kv_heads query heads share a key head.

    Token t sees tokens max(0, t − window + 1) … t, or all up to t when `window` is 0. q [T, heads · d],
    k [T, kv_heads · d], v [T, kv_heads · e] → [T, heads · e]. The compiled form reads and extends the KV cache of
    `layer`.
    """
    tokens = q.shape[-2]
    queries = _split_heads(q, heads).transpose(-2, -3)
    keys = _split_heads(k, kv_heads).transpose(-2, -3).repeat_interleave(heads // kv_heads, dim=-3)
    values = _split_heads(v, kv_heads).transpose(-2, -3).repeat_interleave(heads // kv_heads, dim=-3)
    distance = torch.arange(tokens, device=q.device).unsqueeze(-1) - torch.arange(tokens, device=q.device)
    visible = distance >= 0 if window == 0 else (distance >= 0) & (distance < window)
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    mixed: Tensor = scores.softmax(dim=-1) @ values
    return mixed.transpose(-2, -3).flatten(-2)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, scale: float, layer: int, window: int) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1] // kv_heads * heads))


def neuron_outputs(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    up_activation: str,
) -> Tensor:
    """Return the factor of each neuron's down row: [T, F]. Without a gate, `activation` applies to up itself."""
    raised = F.linear(x, up, up_bias)
    act = parse_activation(activation).function
    if gate is None:
        return act(raised)
    return act(F.linear(x, gate, gate_bias)) * parse_activation(up_activation).function(raised)


@torch.library.custom_op("picompile::ffn", mutates_args=())
def ffn(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    up_activation: str,
) -> Tensor:
    """One feed-forward block: y = h · down + down_bias, h = activation(x · gateᵀ) ∘ up_activation(x · upᵀ).

    Without a gate, h = activation(x · upᵀ). `up_activation` is `identity` but for dReLU models (arXiv 2406.05955),
    where it is `relu`. x [T, D]; gate, up, down [F, D]; gate_bias, up_bias [F]; down_bias [D] → [T, D].
    """
    hidden = neuron_outputs(x, gate, up, gate_bias, up_bias, activation, up_activation)
    return F.linear(hidden, down.transpose(0, 1), down_bias)


@ffn.register_fake
def _(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[1]))


@torch.library.custom_op("picompile::predict", mutates_args=())
def predict(x: Tensor, weights: list[Tensor], kind: str, threshold: float) -> Tensor:
    """Return a mask of the neurons predicted to fire: bool [T, F]. x [T, D].

    `kind` is one of `picompile_passes.predictors`; it defines what the weights are, and what the threshold is compared
    with. The mask becomes kernel arguments in picompile_codegen's `lowering/ffn.py`.
    """
    return predictor_kind(kind).evaluate(x, weights, threshold)


@predict.register_fake
def _(x: Tensor, weights: list[Tensor], kind: str, threshold: float) -> Tensor:
    return x.new_empty((*x.shape[:-1], predictor_kind(kind).neurons(weights)), dtype=torch.bool)


@torch.library.custom_op("picompile::sparse_ffn", mutates_args=())
def sparse_ffn(
    x: Tensor,
    mask: Tensor,
    neurons: Tensor | None,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    up_activation: str,
) -> Tensor:
    """`ffn` over the neurons of `mask` only: a neuron that the mask leaves out contributes nothing.

    mask bool [T, F of the mask]. The rows may be a part of the block: then row r is neuron `neurons[r]` of the mask
    (int64 [F]); without a table row r is neuron r. Otherwise as `ffn`.
    """
    hidden = neuron_outputs(x, gate, up, gate_bias, up_bias, activation, up_activation)
    rows = mask if neurons is None else mask.index_select(-1, neurons)
    # `where`, not a product: a skipped neuron that overflowed to infinity must not turn into NaN.
    return F.linear(torch.where(rows, hidden, torch.zeros_like(hidden)), down.transpose(0, 1), down_bias)


@sparse_ffn.register_fake
def _(
    x: Tensor, mask: Tensor, neurons: Tensor | None, gate: Tensor | None, up: Tensor, down: Tensor, *_: Any
) -> Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[1]))


@torch.library.custom_op("picompile::quantize", mutates_args=())
def quantize(weight: Tensor, format: str) -> Tensor:
    """A matrix [rows, columns] as bytes: uint8 [rows, row_bytes] in one of `formats.FORMATS`."""
    return quantize_rows(weight, format)


@quantize.register_fake
def _(weight: Tensor, format: str) -> Tensor:
    return weight.new_empty((weight.shape[0], FORMATS[format].row_bytes(int(weight.shape[1]))), dtype=torch.uint8)


@torch.library.custom_op("picompile::dequantize", mutates_args=())
def dequantize(packed: Tensor, format: str, columns: int) -> Tensor:
    """The matrix that bytes stand for: uint8 [rows, row_bytes] → float32 [rows, columns]."""
    return dequantize_rows(packed, format, columns).contiguous()


@dequantize.register_fake
def _(packed: Tensor, format: str, columns: int) -> Tensor:
    return packed.new_empty((packed.shape[0], columns), dtype=torch.float32)
