"""A synthesized network, made from its first tensor to its last while tokens flow through it.

The residual stream has entries of about 1. The embedding makes most of it, so that different tokens stay different;
attention and FFNs add a fixed share over all layers, which keeps every value far from the limits of f16. Each matrix is
drawn, scaled by what it does to the tokens, written, applied and forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile.synth.attention import attend
from picompile.synth.embedding import embed, finish
from picompile.synth.firing import Neurons, make_neurons
from picompile.synth.projections import write_back
from picompile.synth.rates import share_of_firings
from picompile.synth.recipe import CONSTANT, Recipe
from picompile.synth.tokens import Tokens, calibration_tokens
from picompile_passes.dialect import ops

# Energy that all FFNs add to the stream, as a share of the embedding's, where many neurons fire at a time.
_SHARE = 0.4
_MANY = 32


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


def _layer(recipe: Recipe, layer: int, stream: Tensor, tokens: Tokens) -> tuple[Tensor, LayerFiring]:
    """Makes one layer; returns the stream behind it and how its neurons fired."""
    shape = recipe.shape
    own_norm = "ffn_norm" in shape.family.names
    x = _norm(recipe, layer, "attention_norm", stream, feeds_ffn=not own_norm)
    attended = stream + attend(recipe, layer, x, tokens)
    if own_norm:
        x = _norm(recipe, layer, "ffn_norm", stream if shape.family.parallel else attended, feeds_ffn=True)
    neurons = make_neurons(recipe, layer, x, tokens.calibration)
    energy = _ffn_energy(recipe)
    added = write_back(recipe, recipe.name("down", layer), neurons.values, energy, shape.ffn_bias)
    return attended + added, _measure(recipe, neurons, ~tokens.calibration)


def _measure(recipe: Recipe, neurons: Neurons, checked: Tensor) -> LayerFiring:
    fired, predicted = neurons.fired[checked], neurons.predicted[checked]
    both = float((fired & predicted).sum())
    return LayerFiring(
        rate=float(fired.float().mean()),
        recall=both / max(1.0, float(fired.sum())),
        precision=both / max(1.0, float(predicted.sum())),
        hot_share=share_of_firings(recipe.rates),
    )


def _ffn_energy(recipe: Recipe) -> float:
    """What one FFN adds to the stream: less where few neurons fire, since their sum differs much between tokens."""
    firing = float(recipe.rates.sum())
    return _SHARE / recipe.shape.layers * firing / (firing + _MANY)


def _norm(recipe: Recipe, layer: int, role: str, stream: Tensor, feeds_ffn: bool) -> Tensor:
    """Writes a norm and applies it. Where offsets come from the norm, its bias is the constant direction."""
    shape, name = recipe.shape, recipe.name(role, layer)
    weight = recipe.weights.put(f"{name}.weight", torch.ones(shape.hidden))
    if shape.family.norm == "rms":
        normed: Tensor = ops.rms_norm(stream, weight, shape.eps)
        return normed
    bias = torch.zeros(shape.hidden)
    if feeds_ffn and recipe.offset == "norm":
        bias += CONSTANT * recipe.direction
    return F.layer_norm(stream, (shape.hidden,), weight, recipe.weights.put(f"{name}.bias", bias), shape.eps)
