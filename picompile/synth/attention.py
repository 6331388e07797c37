"""The attention of a synthesized layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile.synth.projections import read_stream, write_back
from picompile.synth.recipe import Recipe
from picompile.synth.tokens import Tokens
from picompile_passes.dialect import ops

# Energy that all attentions add to the stream, as a share of the embedding's.
_SHARE = 0.06
# Deviation of the logits. With 3 a head looks at a few tokens wherever it stands, so that what it adds to the stream is
# hardly smaller after a thousand tokens than after ten.
_LOGITS = 3.0


def attend(recipe: Recipe, layer: int, x: Tensor, tokens: Tokens) -> Tensor:
    """Makes the attention of a layer and applies it to its input: x [tokens, hidden] → [tokens, hidden]."""
    shape = recipe.shape
    q, k, v = _queries_keys_values(recipe, layer, x)
    if "positions" not in shape.family.names:
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = shape.rope_theta**-exponents
        q = ops.rotary(q, tokens.positions, frequencies, shape.heads, 1.0)
        k = ops.rotary(k, tokens.positions, frequencies, shape.kv_heads, 1.0)
    q, k, v = (part.view(tokens.sequences, tokens.length, -1, shape.head_dim).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    mixed = mixed.transpose(1, 2).reshape(len(x), -1)
    return write_back(recipe, recipe.name("o", layer), mixed, _energy(recipe, layer), shape.output_bias)


def _energy(recipe: Recipe, layer: int) -> float:
    """What one attention adds to the stream.

    Between an embedding and the same table as a head, likeness is symmetric: where a leads to b, b mostly leads to a.
    Attention is not symmetric. As a large part of the last stream it keeps generation from going in circles.
    """
    shape = recipe.shape
    return 1.0 if shape.tied and layer == shape.layers - 1 else _SHARE / shape.layers


def _queries_keys_values(recipe: Recipe, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads · head_dim], k and v [tokens, kv_heads · head_dim]."""
    shape = recipe.shape

    def read(role: str, heads: int) -> Tensor:
        return read_stream(recipe, recipe.name(role, layer), heads * shape.head_dim, x, _LOGITS**0.5)

    if shape.family.attention == "split":
        return read("q", shape.heads), read("k", shape.kv_heads), read("v", shape.kv_heads)
    # Falcon: for each key head its query heads, the key head and the value head.
    groups = read("qkv", shape.heads + 2 * shape.kv_heads).view(len(x), shape.kv_heads, -1, shape.head_dim)
    return groups[:, :, :-2].flatten(1), groups[:, :, -2].flatten(1), groups[:, :, -1].flatten(1)
