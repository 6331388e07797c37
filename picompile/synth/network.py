"""The layers of a synthesized network: attention, embedding, norms and head, and the stream through them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile.synth.firing import Neurons, make_neurons
from picompile.synth.rates import share_of_firings
from picompile.synth.tokens import Tokens, calibration_tokens
from picompile.synth.writer import CONSTANT, Recipe
from picompile_passes.dialect.rms_norm import rms_norm
from picompile_passes.dialect.rotary import rotary

# Energy that all attentions add to the stream, as a share of the embedding's.
_ATTENTION_SHARE = 0.06
# Deviation of the logits. With 3 a head looks at a few tokens wherever it stands, so that what it adds to the stream is
# hardly smaller after a thousand tokens than after ten.
_LOGITS = 3.0


def attend(recipe: Recipe, layer: int, x: Tensor, tokens: Tokens) -> Tensor:
    """Make the attention of a layer and applies it to its input: x [tokens, hidden] → [tokens, hidden]."""
    shape = recipe.shape
    q, k, v = _queries_keys_values(recipe, layer, x)
    if "positions" not in shape.family.names:
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = shape.rope_theta**-exponents
        q = rotary(q, tokens.positions, inverse_frequency=frequencies, heads=shape.heads, scaling=1.0)
        k = rotary(k, tokens.positions, inverse_frequency=frequencies, heads=shape.kv_heads, scaling=1.0)
    q, k, v = (part.view(tokens.sequences, tokens.length, -1, shape.head_dim).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    mixed = mixed.transpose(1, 2).reshape(len(x), -1)
    return write_back(
        recipe, name=recipe.name("o", layer), values=mixed, energy=_energy(recipe, layer), bias=shape.output_bias
    )


def _energy(recipe: Recipe, layer: int) -> float:
    """Return one attention's contribution to the stream.

    Between an embedding and the same table as a head, likeness is symmetric: where a leads to b, b mostly leads to a.
    Attention is not symmetric. As a large part of the last stream it keeps generation from going in circles.
    """
    shape = recipe.shape
    return 1.0 if shape.tied and layer == shape.layers - 1 else _ATTENTION_SHARE / shape.layers


def _queries_keys_values(recipe: Recipe, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads · head_dim], k and v [tokens, kv_heads · head_dim]."""
    shape = recipe.shape

    def read(role: str, heads: int) -> Tensor:
        return read_stream(recipe, name=recipe.name(role, layer), rows=heads * shape.head_dim, x=x, scale=_LOGITS**0.5)

    if shape.family.attention == "split":
        return read("q", shape.heads), read("k", shape.kv_heads), read("v", shape.kv_heads)
    # Falcon: for each key head its query heads, the key head and the value head.
    groups = read("qkv", shape.heads + 2 * shape.kv_heads).view(len(x), shape.kv_heads, -1, shape.head_dim)
    return groups[:, :, :-2].flatten(1), groups[:, :, -2].flatten(1), groups[:, :, -1].flatten(1)


# Both ends of a synthesized network: the embedding, and the final norm and head.


# Mean square root of a position's row; a token's is 1.
_POSITIONS = 0.3
# Special tokens of a tied head, beside the length of 1 of all others.
_SPECIALS = 0.2
# Deviation of the model's logits.
_EMBEDDING_LOGITS = 3.0
# Rows of a table that are made at a time.
_ROWS = 4096


def embed(recipe: Recipe, tokens: Tokens) -> Tensor:
    """Write the embedding (and OPT's position table); returns the stream [tokens, hidden]."""
    shape, name = recipe.shape, f"{recipe.shape.family.names['embedding']}.weight"
    numbers = recipe.generator(name)
    stream = torch.empty(len(tokens.ids), shape.hidden)
    for first in range(0, shape.vocab, _ROWS):
        rows = torch.empty(min(_ROWS, shape.vocab - first), shape.hidden).uniform_(-1, 1, generator=numbers)
        recipe.ignore_direction(rows)
        if shape.tied:
            # The head is this table too, behind the final signs: it shall not see the constant direction either.
            constant = recipe.direction * recipe.signs
            rows.addr_(rows @ constant, constant, alpha=-1 / shape.hidden)
        _even_out(recipe, rows)
        if shape.tied and shape.family.norm == "layer":
            # A layer norm undoes the scale on the way in; on the way out no special token will win.
            rows[[token - first for token in shape.specials if 0 <= token - first < len(rows)]] *= _SPECIALS
        if recipe.offset == "stream":
            rows += CONSTANT * recipe.direction
        rows = recipe.weights.put(name, rows)
        here = (tokens.ids >= first) & (tokens.ids < first + len(rows))
        stream[here] = rows[tokens.ids[here] - first]
    return stream + _position_rows(recipe, tokens) if "positions" in shape.family.names else stream


def _position_rows(recipe: Recipe, tokens: Tokens) -> Tensor:
    name = f"{recipe.shape.family.names['positions']}.weight"
    table = torch.randn(recipe.shape.positions + 2, recipe.shape.hidden, generator=recipe.generator(name))
    return recipe.weights.put(name, _even_out(recipe, table).mul_(_POSITIONS))[2 + tokens.positions]


def _even_out(recipe: Recipe, rows: Tensor) -> Tensor:
    """Scale rows [any, hidden] in place: entries of mean square 1, in the firing subspace as well as outside of it."""
    inside = rows @ recipe.subspace.T
    rows -= inside @ recipe.subspace
    inside *= (len(recipe.subspace) ** 0.5 / inside.norm(dim=1)).unsqueeze(1)
    rows *= ((recipe.shape.hidden - len(recipe.subspace)) ** 0.5 / rows.norm(dim=1)).unsqueeze(1)
    return rows.addmm_(inside, recipe.subspace)


def finish(recipe: Recipe) -> None:
    """Write the final norm and the head.

    A tied head would find the token that was read in the stream and say it again. Signs in the final norm keep it from
    seeing itself: what comes next is as random as with a head of its own.
    """
    shape, name = recipe.shape, recipe.shape.family.names["final_norm"]
    weight = recipe.signs * (_EMBEDDING_LOGITS / shape.hidden**0.5) if shape.tied else torch.ones(shape.hidden)
    recipe.weights.put(f"{name}.weight", weight)
    if shape.family.norm == "layer":
        recipe.weights.put(f"{name}.bias", torch.zeros(shape.hidden))
    if not shape.tied:
        _head(recipe, f"{shape.family.names['head']}.weight")


def _head(recipe: Recipe, name: str) -> None:
    numbers, bound = recipe.generator(name), _EMBEDDING_LOGITS * (3 / recipe.shape.hidden) ** 0.5
    for first in range(0, recipe.shape.vocab, _ROWS):
        count = min(_ROWS, recipe.shape.vocab - first)
        rows = torch.empty(count, recipe.shape.hidden).uniform_(-bound, bound, generator=numbers)
        # Logits of 0 never win: generation doesn't end by chance.
        rows[[token - first for token in recipe.shape.specials if 0 <= token - first < count]] = 0
        recipe.weights.put(name, recipe.ignore_direction(rows))


# Matrices that read the residual stream and matrices that write to it, made while tokens go through them.


_BIAS = 0.05
_LEAST = 1e-3


def read_stream(recipe: Recipe, name: str, rows: int, x: Tensor, scale: float) -> Tensor:
    """Make a projection of the attention's input and applies it: x [tokens, hidden] → [tokens, rows]."""
    weight = recipe.ignore_direction(recipe.uniform(f"{name}.weight", rows, recipe.shape.hidden, scale))
    product = x @ recipe.weights.put(f"{name}.weight", weight).T
    return product + small_bias(recipe, name, rows) if recipe.shape.query_bias else product


def write_back(recipe: Recipe, name: str, values: Tensor, energy: float, bias: bool) -> Tensor:
    """Make a projection into the stream and applies it: values [tokens, columns] → [tokens, hidden].

    What all tokens have in common is projected away, since it would add up over the layers, and the rest is scaled to a
    mean square of `energy`.
    """
    weight = recipe.uniform(f"{name}.weight", recipe.shape.hidden, values.shape[1], 1.0)
    recipe.leave_direction(weight)
    mean = values.mean(0)
    if (length := float(mean @ mean)) > 0:
        weight.addr_(weight @ mean, mean, alpha=-1 / length)
    product = values @ weight.T
    scale = energy**0.5 / max(float(product.square().mean().sqrt()), _LEAST)
    recipe.weights.put(f"{name}.weight", weight.mul_(scale))
    product *= scale
    return product + small_bias(recipe, name, recipe.shape.hidden) if bias else product


def small_bias(recipe: Recipe, name: str, count: int) -> Tensor:
    """Make and write a bias [count]."""
    drawn = torch.randn(count, generator=recipe.generator(f"{name}.bias"))
    return recipe.weights.put(f"{name}.bias", drawn.mul_(_BIAS))


# A synthesized network, made from its first tensor to its last while tokens flow through it.
#
# The residual stream has entries of about 1. The embedding makes most of it, so that different tokens stay different;
# attention and FFNs add a fixed share over all layers, which keeps every value far from the limits of f16. Each
# matrix is drawn, scaled by what it does to the tokens, written, applied and forgotten.


# Energy that all FFNs add to the stream, as a share of the embedding's, where many neurons fire at a time.
_FFN_SHARE = 0.4
_MANY = 32


@dataclass(frozen=True)
class SynthesizedFiring:
    """Measurements of one layer, on tokens that were not used to set its offsets.

    `rate` is the share of neurons that fired, `recall` and `precision` the predictor's. `hot_share` is the share of the
    neurons that makes 80 % of the firings, by the rates they were made for.
    """

    rate: float
    recall: float
    precision: float
    hot_share: float


def make_network(recipe: Recipe, advance: Callable[[int], None]) -> list[SynthesizedFiring]:
    """Make and write every tensor. `advance` counts layers, and embedding and head as one each."""
    tokens = calibration_tokens(recipe.shape, recipe.generator("tokens"))
    stream = embed(recipe, tokens)
    advance(1)
    measured = []
    for layer in range(recipe.shape.layers):
        stream, firing = _layer(recipe, layer, stream, tokens)
        measured.append(firing)
        advance(1)
    finish(recipe)
    advance(1)
    return measured


def _layer(recipe: Recipe, layer: int, stream: Tensor, tokens: Tokens) -> tuple[Tensor, SynthesizedFiring]:
    """Make one layer; returns the stream behind it and how its neurons fired."""
    shape = recipe.shape
    own_norm = "ffn_norm" in shape.family.names
    x = _norm(recipe, layer, "attention_norm", stream, feeds_ffn=not own_norm)
    attended = stream + attend(recipe, layer, x, tokens)
    if own_norm:
        x = _norm(recipe, layer, "ffn_norm", stream if shape.family.parallel else attended, feeds_ffn=True)
    neurons = make_neurons(recipe, layer, x, tokens.calibration)
    energy = _ffn_energy(recipe)
    added = write_back(
        recipe, name=recipe.name("down", layer), values=neurons.values, energy=energy, bias=shape.ffn_bias
    )
    return attended + added, _measure(recipe, neurons, ~tokens.calibration)


def _measure(recipe: Recipe, neurons: Neurons, checked: Tensor) -> SynthesizedFiring:
    fired, predicted = neurons.fired[checked], neurons.predicted[checked]
    both = float((fired & predicted).sum())
    return SynthesizedFiring(
        rate=float(fired.float().mean()),
        recall=both / max(1.0, float(fired.sum())),
        precision=both / max(1.0, float(predicted.sum())),
        hot_share=share_of_firings(recipe.rates.numpy()),
    )


def _ffn_energy(recipe: Recipe) -> float:
    """Return one FFN's contribution to the stream: less if few neurons fire, since their sum then varies much."""
    firing = float(recipe.rates.sum())
    return _FFN_SHARE / recipe.shape.layers * firing / (firing + _MANY)


def _norm(recipe: Recipe, layer: int, role: str, stream: Tensor, feeds_ffn: bool) -> Tensor:
    """Write a norm and applies it. Where offsets come from the norm, its bias is the constant direction."""
    shape, name = recipe.shape, recipe.name(role, layer)
    weight = recipe.weights.put(f"{name}.weight", torch.ones(shape.hidden))
    if shape.family.norm == "rms":
        normed: Tensor = rms_norm(stream, weight, shape.eps)
        return normed
    bias = torch.zeros(shape.hidden)
    if feeds_ffn and recipe.offset == "norm":
        bias += CONSTANT * recipe.direction
    return F.layer_norm(stream, (shape.hidden,), weight, recipe.weights.put(f"{name}.bias", bias), shape.eps)
