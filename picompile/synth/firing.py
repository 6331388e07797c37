"""The matrices that decide which neurons fire, and the predictor that knows.

A neuron's deciding row is w = a·P + t·u: P [r, hidden] has few rows, u is the constant direction and t the neuron's offset.
So the firing of all neurons is a function of the r numbers P·x, and the predictor with fc1 = (P, u) and fc2 = (a, t) tells
it exactly, up to the rounding of w. The factors are rounded to the checkpoint's dtype before they are multiplied: only the
product is rounded once more.
"""

from dataclasses import dataclass

import torch
from picompile_passes.dialect.activations import parse_activation
from torch import Tensor

from picompile.synth.rates import firing_offsets
from picompile.synth.recipe import Recipe


@dataclass(frozen=True)
class Predictor:
    """Neuron j fires where (fc2 · fc1 · x + bias)[j] > 0. fc1 [rank, hidden], fc2 [ffn, rank], bias [ffn]."""

    fc1: Tensor
    fc2: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → bool [tokens, ffn]."""
        return torch.addmm(self.bias, x @ self.fc1.T, self.fc2.T) > 0


@dataclass(frozen=True)
class Neurons:
    """A layer's neurons on the calibration tokens, all [tokens, ffn].

    `values` is what they send to the down projection, `fired` which of them fired (their value is not zero), `predicted`
    which of them the predictor named.
    """

    values: Tensor
    fired: Tensor
    predicted: Tensor


def make_neurons(recipe: Recipe, layer: int, x: Tensor, calibration: Tensor) -> Neurons:
    """Makes and writes a layer's gate and up matrices and its predictor.

    x [tokens, hidden] are the FFN's inputs, of which those that `calibration` (bool [tokens]) names are used to set the
    offsets. The firing is computed from the matrices as written.
    """
    subspace, factors = _factors(recipe, layer)
    direction = recipe.predictors.round(recipe.direction / recipe.shape.hidden**0.5)
    threshold = parse_activation(recipe.shape.activation).threshold
    constant = torch.ones(len(x)) if recipe.offset == "bias" else x @ direction
    levels = ((threshold - (x @ subspace.T) @ factors.T) / constant.unsqueeze(1))[calibration]
    order = torch.randperm(recipe.shape.ffn, generator=recipe.generator(f"{layer}.order"))
    rates = recipe.rates[order]
    offsets = recipe.predictors.round(firing_offsets(levels, rates).float())
    predictor = _write_predictor(recipe, layer, subspace, factors, direction, offsets, threshold)
    deciding = _deciding_matrix(recipe, subspace, factors, direction, offsets)
    if not recipe.shape.family.gated:
        return _plain(recipe, layer, x, deciding, offsets, predictor)
    if not recipe.shape.family.two_sided:
        return _gated(recipe, layer, x, deciding, offsets, predictor)
    wide_offsets = recipe.predictors.round(firing_offsets(levels, rates.sqrt()).float())
    wide = _deciding_matrix(recipe, subspace, factors, direction, wide_offsets)
    return _two_sided(recipe, layer, x, (deciding, offsets), (wide, wide_offsets), predictor)


def _factors(recipe: Recipe, layer: int) -> tuple[Tensor, Tensor]:
    """P [r, hidden], the layer's own basis of the subspace, and a [ffn, r] with rows of length 1."""
    subspace = recipe.orthonormal(f"{layer}.subspace", recipe.subspace)
    factors = torch.randn(recipe.shape.ffn, len(subspace), generator=recipe.generator(f"{layer}.factors"))
    factors /= factors.norm(dim=1, keepdim=True)
    return recipe.predictors.round(subspace), recipe.predictors.round(factors)


def _deciding_matrix(recipe: Recipe, subspace: Tensor, factors: Tensor, direction: Tensor, offsets: Tensor) -> Tensor:
    matrix = factors @ subspace
    return matrix if recipe.offset == "bias" else matrix.addr_(offsets, direction)


def _write_predictor(
    recipe: Recipe, layer: int, subspace: Tensor, factors: Tensor, direction: Tensor, offsets: Tensor, threshold: float
) -> Predictor:
    bias = torch.full((recipe.shape.ffn,), -threshold)
    if recipe.offset == "bias":
        bias += offsets
    else:
        subspace = torch.cat([subspace, direction.unsqueeze(0)])
        factors = torch.cat([factors, offsets.unsqueeze(1)], dim=1)
    put = recipe.predictors.put
    return Predictor(
        put(f"layers.{layer}.fc1", subspace), put(f"layers.{layer}.fc2", factors), put(f"layers.{layer}.bias", bias)
    )


def _matrix(recipe: Recipe, layer: int, role: str, matrix: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Writes a matrix [ffn, hidden] and its bias, if it has one; returns its product with x, [tokens, ffn]."""
    name = recipe.name(role, layer)
    product = x @ recipe.weights.put(f"{name}.weight", matrix).T
    return product + recipe.weights.put(f"{name}.bias", bias) if recipe.shape.ffn_bias else product


def _plain(recipe: Recipe, layer: int, x: Tensor, deciding: Tensor, offsets: Tensor, predictor: Predictor) -> Neurons:
    activation = parse_activation(recipe.shape.activation)
    up = _matrix(recipe, layer, "up", deciding, offsets, x)
    return Neurons(activation.function(up), up > activation.threshold, predictor(x))


def _gated(recipe: Recipe, layer: int, x: Tensor, deciding: Tensor, offsets: Tensor, predictor: Predictor) -> Neurons:
    activation = parse_activation(recipe.shape.activation)
    gate = _matrix(recipe, layer, "gate", deciding, offsets, x)
    drawn = recipe.uniform(recipe.name("up", layer), recipe.shape.ffn, recipe.shape.hidden, 1.0)
    up = _matrix(recipe, layer, "up", recipe.ignore_direction(drawn), torch.zeros_like(offsets), x)
    return Neurons(activation.function(gate) * up, gate > activation.threshold, predictor(x))


def _two_sided(
    recipe: Recipe,
    layer: int,
    x: Tensor,
    narrow: tuple[Tensor, Tensor],
    wide: tuple[Tensor, Tensor],
    predictor: Predictor,
) -> Neurons:
    """A neuron of dReLU fires when its gate and its up are both positive.

    One side is the deciding row. The other is the same row with a larger offset, so that it is positive whenever the
    deciding one is, and at the rate sqrt(p) by itself: a single row of the predictor then tells the firing. For half of
    the neurons the gate decides, for the others up.
    """
    activation = parse_activation(recipe.shape.activation)
    swapped = torch.rand(recipe.shape.ffn, generator=recipe.generator(f"{layer}.sides")) < 0.5
    for first, second in zip(narrow, wide, strict=True):
        first[swapped], second[swapped] = second[swapped], first[swapped]
    gate = _matrix(recipe, layer, "gate", *narrow, x)
    up = _matrix(recipe, layer, "up", *wide, x)
    fired = (gate > activation.threshold) & (up > activation.threshold)
    return Neurons(activation.function(gate) * activation.function(up), fired, predictor(x))
