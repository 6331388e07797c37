"""A synthesized network, made from its first tensor to its last while tokens flow through it.

The residual stream has entries of about 1. The embedding makes most of it, so that different tokens stay different;
attention and FFNs add a fixed share over all layers, which keeps every value far from the limits of f16. Each matrix is
drawn, scaled by what it does to the tokens, written, applied and forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from picompile_passes.dialect import ops
from torch import Tensor

from picompile.synth.firing import make_neurons
from picompile.synth.rates import share_of_firings
from picompile.synth.recipe import Recipe
from picompile.synth.tokens import calibration_ids

# Energy that all attentions and all FFNs add to the stream, as shares of the embedding's.
_ATTENTION_SHARE, _FFN_SHARE = 0.1, 0.4
_FEW = 32
# The constant direction's entries in the stream. More of it makes offsets small; less leaves room for everything else.
_CONSTANT = 0.5
# Deviation of the attention's logits, so that each head looks at few tokens wherever it stands, and of the model's.
_ATTENTION_LOGITS, _LOGITS = 2.0, 3.0
_POSITIONS = 0.3
_BIAS = 0.05
_ROWS = 4096
_SMALL_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Tokens:
    """The tokens that flow through the network while it is made: `sequences` of `length`, flattened to [tokens].

    `calibration` bool [tokens] names those that offsets are set by; the others check them.
    """

    ids: Tensor
    sequences: int
    length: int
    calibration: Tensor


@dataclass(frozen=True)
class LayerFiring:
    """What was measured in one layer, on tokens that its offsets were not set by.

    `rate` is the share of neurons that fired, `recall` and `precision` the predictor's. `hot_share` is the share of the
    neurons that makes 80 % of the firings, by the rates they were made for.
    """

    rate: float
    recall: float
    precision: float
    hot_share: float


def make_network(recipe: Recipe, advance: Callable[[int], None]) -> list[LayerFiring]:
    """Makes and writes every tensor. `advance` counts layers, and embedding and head as one each."""
    tokens = _tokens(recipe)
    stream = _embed(recipe, tokens)
    advance(1)
    measured = []
    for layer in range(recipe.shape.layers):
        stream, firing = _layer(recipe, layer, stream, tokens)
        measured.append(firing)
        advance(1)
    _finish(recipe)
    advance(1)
    return measured


def _tokens(recipe: Recipe) -> Tokens:
    shape = recipe.shape
    parameters = shape.layers * shape.hidden * (shape.ffn * 3 + shape.hidden * 4)
    sequences, length = 6 if parameters > _SMALL_PARAMETERS else 24, min(128, shape.positions)
    ids = calibration_ids(shape, sequences, length, recipe.generator("tokens")).flatten()
    return Tokens(ids, sequences, length, torch.arange(len(ids)) < sequences // 3 * 2 * length)


def _embed(recipe: Recipe, tokens: Tokens) -> Tensor:
    """Writes the embedding (and OPT's position table); returns the stream [tokens, hidden]."""
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
            rows[[token - first for token in shape.specials if 0 <= token - first < len(rows)]] *= 0.2
        if recipe.offset == "stream":
            rows += _CONSTANT * recipe.direction
        rows = recipe.weights.put(name, rows)
        here = (tokens.ids >= first) & (tokens.ids < first + len(rows))
        stream[here] = rows[tokens.ids[here] - first]
    return stream + _positions(recipe, tokens) if "positions" in shape.family.names else stream


def _positions(recipe: Recipe, tokens: Tokens) -> Tensor:
    name = f"{recipe.shape.family.names['positions']}.weight"
    table = torch.randn(recipe.shape.positions + 2, recipe.shape.hidden, generator=recipe.generator(name))
    return recipe.weights.put(name, _even_out(recipe, table).mul_(_POSITIONS))[2 + torch.arange(len(tokens.ids)) % tokens.length]


def _even_out(recipe: Recipe, rows: Tensor) -> Tensor:
    """Scales rows [any, hidden] in place: entries of mean square 1, in the firing subspace as well as outside of it."""
    inside = rows @ recipe.subspace.T
    rows -= inside @ recipe.subspace
    inside *= (len(recipe.subspace) ** 0.5 / inside.norm(dim=1)).unsqueeze(1)
    rows *= ((recipe.shape.hidden - len(recipe.subspace)) ** 0.5 / rows.norm(dim=1)).unsqueeze(1)
    return rows.addmm_(inside, recipe.subspace)


def _layer(recipe: Recipe, layer: int, stream: Tensor, tokens: Tokens) -> tuple[Tensor, LayerFiring]:
    """Makes one layer; returns the stream behind it and how its neurons fired."""
    parallel, own_norm = recipe.shape.family.parallel, "ffn_norm" in recipe.shape.family.names
    x = _norm(recipe, layer, "attention_norm", stream, feeds_ffn=not own_norm)
    added = _attention(recipe, layer, x, tokens)
    before_ffn = stream if parallel else stream + added
    if own_norm:
        x = _norm(recipe, layer, "ffn_norm", before_ffn, feeds_ffn=True)
    neurons = make_neurons(recipe, layer, x, tokens.calibration)
    stream = stream + added + _write_back(recipe, layer, "down", neurons.values, _ffn_share(recipe))
    fired, predicted = neurons.fired[~tokens.calibration], neurons.predicted[~tokens.calibration]
    both = float((fired & predicted).sum())
    return stream, LayerFiring(
        rate=float(fired.float().mean()),
        recall=both / max(1.0, float(fired.sum())),
        precision=both / max(1.0, float(predicted.sum())),
        hot_share=share_of_firings(recipe.rates),
    )


def _ffn_share(recipe: Recipe) -> float:
    """Where few neurons fire at a time their sum differs much from token to token; then they may add less."""
    firing = float(recipe.rates.sum())
    return _FFN_SHARE * firing / (firing + _FEW)


def _norm(recipe: Recipe, layer: int, role: str, stream: Tensor, feeds_ffn: bool) -> Tensor:
    """Writes a norm and applies it. Where offsets come from the norm, its bias is the constant direction."""
    shape, name = recipe.shape, recipe.name(role, layer)
    weight = recipe.weights.put(f"{name}.weight", torch.ones(shape.hidden))
    if shape.family.norm == "rms":
        return ops.rms_norm(stream, weight, shape.eps)
    bias = torch.zeros(shape.hidden)
    if feeds_ffn and recipe.offset == "norm":
        bias += _CONSTANT * recipe.direction
    return F.layer_norm(stream, (shape.hidden,), weight, recipe.weights.put(f"{name}.bias", bias), shape.eps)


def _attention(recipe: Recipe, layer: int, x: Tensor, tokens: Tokens) -> Tensor:
    """Makes the attention of a layer and applies it to x [tokens, hidden]."""
    shape = recipe.shape
    q, k, v = _queries_keys_values(recipe, layer, x)
    if "positions" not in shape.family.names:
        positions = torch.arange(len(x)) % tokens.length
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = 1 / shape.rope_theta**exponents
        q = ops.rotary(q, positions, frequencies, shape.heads, 1.0)
        k = ops.rotary(k, positions, frequencies, shape.kv_heads, 1.0)
    batched = [
        part.view(tokens.sequences, tokens.length, -1, shape.head_dim).transpose(1, 2) for part in (q, k, v)
    ]
    mixed = F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    return _write_back(recipe, layer, "o", mixed.transpose(1, 2).reshape(len(x), -1), _ATTENTION_SHARE)


def _queries_keys_values(recipe: Recipe, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads · head_dim], k and v [tokens, kv_heads · head_dim]."""
    shape = recipe.shape
    if shape.family.attention == "split":
        rows = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        q, k, v = (_read_stream(recipe, layer, role, rows[role] * shape.head_dim, x) for role in "qkv")
        return q, k, v
    # Falcon: for each key head its query heads, the key head and the value head.
    fused = _read_stream(recipe, layer, "qkv", (shape.heads + 2 * shape.kv_heads) * shape.head_dim, x)
    groups = fused.view(len(x), shape.kv_heads, -1, shape.head_dim)
    return groups[:, :, :-2].flatten(1), groups[:, :, -2].flatten(1), groups[:, :, -1].flatten(1)


def _read_stream(recipe: Recipe, layer: int, role: str, rows: int, x: Tensor) -> Tensor:
    """Makes a projection of the attention's input and applies it: x [tokens, hidden] → [tokens, rows]."""
    name = recipe.name(role, layer)
    weight = recipe.uniform(f"{name}.weight", rows, recipe.shape.hidden, _ATTENTION_LOGITS**0.5)
    product = x @ recipe.weights.put(f"{name}.weight", recipe.ignore_direction(weight)).T
    return product + _small_bias(recipe, name, rows) if recipe.shape.query_bias else product


def _write_back(recipe: Recipe, layer: int, role: str, values: Tensor, share: float) -> Tensor:
    """Makes a projection into the stream and applies it: values [tokens, columns] → [tokens, hidden].

    What all tokens have in common is projected away, since it would add up over the layers, and the rest is scaled to
    this layer's part of `share`.
    """
    shape, name = recipe.shape, recipe.name(role, layer)
    weight = recipe.leave_direction(recipe.uniform(f"{name}.weight", shape.hidden, values.shape[1], 1.0))
    mean = values.mean(0)
    if (length := float(mean @ mean)) > 0:
        weight.addr_(weight @ mean, mean, alpha=-1 / length)
    wanted = (share / shape.layers) ** 0.5
    product = values @ weight.T
    scale = wanted / max(float(product.square().mean().sqrt()), 1e-3)
    recipe.weights.put(f"{name}.weight", weight.mul_(scale))
    has_bias = shape.output_bias if role == "o" else shape.ffn_bias
    return product.mul_(scale) + (_small_bias(recipe, name, shape.hidden) if has_bias else 0)


def _small_bias(recipe: Recipe, name: str, count: int) -> Tensor:
    drawn = torch.randn(count, generator=recipe.generator(f"{name}.bias"))
    return recipe.weights.put(f"{name}.bias", drawn.mul_(_BIAS))


def _finish(recipe: Recipe) -> None:
    """Writes the final norm and the head.

    A tied head would find the token that was read in the stream and say it again. Signs in the final norm keep it from
    seeing itself: what comes next is as random as with a head of its own.
    """
    shape, name = recipe.shape, recipe.shape.family.names["final_norm"]
    weight = recipe.signs * (_LOGITS / shape.hidden**0.5) if shape.tied else torch.ones(shape.hidden)
    recipe.weights.put(f"{name}.weight", weight)
    if shape.family.norm == "layer":
        recipe.weights.put(f"{name}.bias", torch.zeros(shape.hidden))
    if not shape.tied:
        _head(recipe, f"{shape.family.names['head']}.weight")


def _head(recipe: Recipe, name: str) -> None:
    numbers, bound = recipe.generator(name), _LOGITS * (3 / recipe.shape.hidden) ** 0.5
    for first in range(0, recipe.shape.vocab, _ROWS):
        count = min(_ROWS, recipe.shape.vocab - first)
        rows = torch.empty(count, recipe.shape.hidden).uniform_(-bound, bound, generator=numbers)
        # Logits of 0 never win: generation doesn't end by chance.
        rows[[token - first for token in recipe.shape.specials if 0 <= token - first < count]] = 0
        recipe.weights.put(name, recipe.ignore_direction(rows))
