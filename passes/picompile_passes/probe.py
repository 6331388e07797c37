"""Telling which activation function a piece of a graph computes: by its values.

Models write the same function in many ways (GELU's tanh form alone has four in common use). A piecewise function breaks
at the constants of its expression, or where they lead, so the probe runs on a grid that is dense everywhere and holds
every constant and its neighbours; two different functions of the dialect differ there by far more than rounding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from picompile_passes.dialect.activations import ACTIVATIONS, parse_activation

# The order decides only between functions that are the same; approximations of GELU differ by 5e-4, rounding by 1e-6.
_TOLERANCE = 1e-5
_GRID = torch.linspace(-12.0, 12.0, 24_001)


def recognize_activation(function: Callable[[Tensor], Tensor], constants: Sequence[float]) -> str | None:
    """The text of the activation that `function` (elementwise, float32) computes; None where the dialect has none such.

    `constants` are the numbers that occur in its expression: each may be the threshold of a `fatrelu`.
    """
    grid = _grid(constants)
    values = function(grid)
    if values.dtype != grid.dtype:
        return None
    for text in (*ACTIVATIONS, *(f"fatrelu({constant!r})" for constant in sorted(set(constants)))):
        if torch.allclose(parse_activation(text).function(grid), values, rtol=_TOLERANCE, atol=_TOLERANCE):
            return text
    return None


def _grid(constants: Sequence[float]) -> Tensor:
    exact = torch.tensor([0.0, *constants], dtype=torch.float32)
    below, above = (torch.nextafter(exact, torch.full_like(exact, side)) for side in (-torch.inf, torch.inf))
    return torch.cat([_GRID, exact, below, above])
