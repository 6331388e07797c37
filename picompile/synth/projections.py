"""Matrices that read the residual stream and matrices that write to it, made while tokens go through them."""

import torch
from torch import Tensor

from picompile.synth.recipe import Recipe

_BIAS = 0.05
_LEAST = 1e-3


def read_stream(recipe: Recipe, name: str, rows: int, x: Tensor, scale: float) -> Tensor:
    """Makes a projection of the attention's input and applies it: x [tokens, hidden] → [tokens, rows]."""
    weight = recipe.ignore_direction(recipe.uniform(f"{name}.weight", rows, recipe.shape.hidden, scale))
    product = x @ recipe.weights.put(f"{name}.weight", weight).T
    return product + small_bias(recipe, name, rows) if recipe.shape.query_bias else product


def write_back(recipe: Recipe, name: str, values: Tensor, energy: float, bias: bool) -> Tensor:
    """Makes a projection into the stream and applies it: values [tokens, columns] → [tokens, hidden].

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
    """Makes and writes a bias [count]."""
    drawn = torch.randn(count, generator=recipe.generator(f"{name}.bias"))
    return recipe.weights.put(f"{name}.bias", drawn.mul_(_BIAS))
