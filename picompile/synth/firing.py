"""The offset that makes each neuron fire at its rate, and the matrices that decide about firing (rates: `rates.py`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.synth.writer import Recipe
from picompile_passes.dialect.activations import parse_activation

# Pooled samples that make a layer's quantile function; enough for tails of one in 100,000.
_POOL = 1 << 20


def firing_offsets(levels: Tensor, rates: Tensor) -> Tensor:
    """Return the offset t at which each neuron fires at its rate, given that it fires on a token where t > level.

    levels float32 [tokens, neurons], all neurons with one distribution; rates [neurons] → float64 [neurons]. One
    quantile function is read from all levels together: thousands of neurons tell about tails that the tokens of one
    neuron don't reach, and none of them is fitted to the few tokens it has seen. Beyond the pool it is continued as a
    normal distribution.
    """
    pool = levels.flatten()
    ordered = pool[:: max(1, len(pool) // _POOL)].sort().values.to(torch.float64)
    edge = min(4.5, float(torch.special.ndtri(torch.tensor(1 - 4 / len(ordered), dtype=torch.float64))))
    scores = torch.linspace(-edge, edge, 513, dtype=torch.float64)
    position = torch.special.ndtr(scores) * (len(ordered) + 1) - 1
    quantiles = interpolate(position, torch.arange(len(ordered), dtype=torch.float64), ordered)
    wanted = torch.special.ndtri(rates.to(torch.float64).clamp(1e-12, 1 - 1e-12))
    beyond = (wanted - wanted.clamp(-edge, edge)) * ordered.std()
    offsets: Tensor = interpolate(wanted, scores, quantiles) + beyond
    return offsets


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Interpolate linearly between the points (x ascending, y), constant beyond them; return the values at `at`."""
    at = at.clamp(x[0], x[-1])
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    left = right - 1
    weight = (at - x[left]) / (x[right] - x[left]).clamp(min=1e-300)
    return y[left] + weight * (y[right] - y[left])


# A neuron's row of the gating matrix is w = a·P + t·u: P [r, hidden] has few rows, u is the constant direction and t
# the neuron's offset. So the firing of all neurons is a function of the r numbers P·x, and the predictor with fc1 = (P,
# u) and fc2 = (a, t) predicts it exactly, up to the rounding of w. The factors are rounded to the checkpoint's dtype
# before they are multiplied: only the product is rounded once more.


@dataclass(frozen=True)
class Neurons:
    """A layer's neurons on some tokens, all [tokens, ffn].

    `values` is what they send to the down projection, `fired` which of them fired (their value is not zero),
    `predicted` which of them the predictor named.
    """

    values: Tensor
    fired: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class _GatingMatrix:
    """The gating matrix of a layer: `factors` [ffn, r] times `subspace` [r, hidden], plus offsets along `direction`.

    A neuron fires on a token when its offset is above the level [tokens, ffn] that this token sets.
    """

    subspace: Tensor
    factors: Tensor
    direction: Tensor
    levels: Tensor


def make_neurons(recipe: Recipe, layer: int, x: Tensor, calibration: Tensor) -> Neurons:
    """Make and write a layer's gate and up matrices and its predictor.

    x [tokens, hidden] are the FFN's inputs, of which those that `calibration` (bool [tokens]) names are used to set the
    offsets. The firing is computed from the matrices as written.
    """
    gating = _gating_matrix(recipe, layer, x)
    order = torch.randperm(recipe.shape.ffn, generator=recipe.generator(f"{layer}.order"))
    rates, levels = recipe.rates[order], gating.levels[calibration]
    offsets = recipe.predictors.round(firing_offsets(levels, rates).float())
    predicted = _predict(recipe, layer, gating, offsets, x)
    if not recipe.shape.family.gated:
        return _plain(recipe, layer, x, gating, offsets, predicted)
    if not recipe.shape.family.two_sided:
        return _gated(recipe, layer, x, gating, offsets, predicted)
    wide = recipe.predictors.round(firing_offsets(levels, rates.sqrt()).float())
    return _two_sided(recipe, layer, x, gating, narrow=offsets, wide=wide, predicted=predicted)


def _gating_matrix(recipe: Recipe, layer: int, x: Tensor) -> _GatingMatrix:
    """Draw the layer's own basis of the firing subspace, and factors whose rows have length 1."""
    subspace = recipe.orthonormal(f"{layer}.subspace", recipe.subspace)
    factors = torch.randn(recipe.shape.ffn, len(subspace), generator=recipe.generator(f"{layer}.factors"))
    factors /= factors.norm(dim=1, keepdim=True)
    subspace, factors, direction = map(
        recipe.predictors.round, (subspace, factors, recipe.direction / recipe.shape.hidden**0.5)
    )
    threshold = parse_activation(recipe.shape.activation).threshold
    constant = torch.ones(len(x)) if recipe.offset == "bias" else x @ direction
    levels = (threshold - (x @ subspace.T) @ factors.T) / constant.unsqueeze(1)
    return _GatingMatrix(subspace, factors, direction, levels)


def _predict(recipe: Recipe, layer: int, gating: _GatingMatrix, offsets: Tensor, x: Tensor) -> Tensor:
    """Write the predictor and apply it: x [tokens, hidden] → bool [tokens, ffn]."""
    bias = torch.full_like(offsets, -parse_activation(recipe.shape.activation).threshold)
    fc1, fc2 = gating.subspace, gating.factors
    if recipe.offset == "bias":
        bias += offsets
    else:
        fc1, fc2 = torch.cat([fc1, gating.direction.unsqueeze(0)]), torch.cat([fc2, offsets.unsqueeze(1)], dim=1)
    put = recipe.predictors.put
    reduced = x @ put(f"layers.{layer}.fc1", fc1).T
    fired: Tensor = torch.addmm(put(f"layers.{layer}.bias", bias), reduced, put(f"layers.{layer}.fc2", fc2).T) > 0
    return fired


def _rows(recipe: Recipe, gating: _GatingMatrix, offsets: Tensor) -> Tensor:
    """Return the gating matrix [ffn, hidden]; an offset that is a bias is not in it."""
    rows = gating.factors @ gating.subspace
    return rows if recipe.offset == "bias" else rows.addr_(offsets, gating.direction)


def _apply(recipe: Recipe, layer: int, role: str, matrix: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Write a matrix [ffn, hidden] and its bias, if it has one; return its product with x, [tokens, ffn]."""
    name = recipe.name(role, layer)
    product = x @ recipe.weights.put(f"{name}.weight", matrix).T
    return product + recipe.weights.put(f"{name}.bias", bias.clone()) if recipe.shape.ffn_bias else product


def _plain(recipe: Recipe, layer: int, x: Tensor, gating: _GatingMatrix, offsets: Tensor, predicted: Tensor) -> Neurons:
    activation = parse_activation(recipe.shape.activation)
    up = _apply(recipe, layer, role="up", matrix=_rows(recipe, gating, offsets), bias=offsets, x=x)
    return Neurons(activation.function(up), up > activation.threshold, predicted)


def _gated(recipe: Recipe, layer: int, x: Tensor, gating: _GatingMatrix, offsets: Tensor, predicted: Tensor) -> Neurons:
    activation = parse_activation(recipe.shape.activation)
    gate = _apply(recipe, layer, role="gate", matrix=_rows(recipe, gating, offsets), bias=offsets, x=x)
    drawn = recipe.uniform(recipe.name("up", layer), recipe.shape.ffn, recipe.shape.hidden, 1.0)
    up = _apply(recipe, layer, role="up", matrix=recipe.ignore_direction(drawn), bias=torch.zeros_like(offsets), x=x)
    return Neurons(activation.function(gate) * up, gate > activation.threshold, predicted)


def _two_sided(
    recipe: Recipe, layer: int, x: Tensor, gating: _GatingMatrix, narrow: Tensor, wide: Tensor, predicted: Tensor
) -> Neurons:
    """A neuron of dReLU fires when its gate and its up are both positive.

    One side has the offset `narrow`, which decides. The other is the same row with the larger offset `wide`: it is
    positive whenever the first one is, and at the rate sqrt(p) by itself, so that one row of the predictor tells the
    firing. For half of the neurons the gate decides, for the others up.
    """
    activation = parse_activation(recipe.shape.activation)
    gate_decides = torch.rand(len(narrow), generator=recipe.generator(f"{layer}.sides")) < 0.5
    gate_offsets, up_offsets = torch.where(gate_decides, narrow, wide), torch.where(gate_decides, wide, narrow)
    gate = _apply(recipe, layer, role="gate", matrix=_rows(recipe, gating, gate_offsets), bias=gate_offsets, x=x)
    up = _apply(recipe, layer, role="up", matrix=_rows(recipe, gating, up_offsets), bias=up_offsets, x=x)
    fired = (gate > activation.threshold) & (up > activation.threshold)
    return Neurons(activation.function(gate) * activation.function(up), fired, predicted)
