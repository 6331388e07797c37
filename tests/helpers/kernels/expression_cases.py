"""Expressions and inputs with which `elementwise` is tested on both sides, and its value in float64."""

from collections.abc import Mapping

import numpy as np
import torch

from helpers.kernels.workbench import Array
from picompile_codegen.specs import ElementwiseSpec
from picompile_passes.dialect.expressions import FUNCTIONS, evaluate_expression

# A row of every function's own, over as many values as it takes.
OF_FUNCTIONS = {
    name: f"{name}({', '.join(f'x{number}' for number in range(count))})" for name, (count, _) in FUNCTIONS.items()
}
# Every kind of input in another place, steps that several others read, and numbers of all sizes.
MIXED = {
    "rtvn": "t0 = mul(x0, x1); t1 = add(t0, x2); t2 = div(t1, x3); t3 = tanh(t2); mul(t3, t0)",
    "vr": "t0 = add(x0, 1.0); mul(t0, x1)",
    "nrn": "t0 = sub(x0, x1); where_greater(t0, -0.25, x2, t0)",
    "tr": "t0 = div(x1, 0.0001); t1 = maximum(t0, -2500.0); t2 = minimum(t1, 3e3); sub(t2, x0)",
    "rr": "t0 = mul(x0, 30.0); t1 = tanh(t0); t2 = mul(t1, 1e-3); where_greater(x1, 0.0, t2, 1e30)",
}


def case(spec: ElementwiseSpec, tokens: int) -> tuple[Mapping[str, Array], Array]:
    """Return random inputs for `tokens` rows of `spec`, and its value in float64.

    All are between 0.1 and 3, or as much below zero, but for what the square root takes.
    """
    rng = np.random.default_rng([spec.dim, tokens, len(spec.expression)])
    shapes = {"r": (tokens, spec.dim), "t": (tokens, 1), "v": (spec.dim,), "n": (1,)}
    inputs = {}
    for number, kind in enumerate(spec.inputs):
        sign = 1.0 if "sqrt" in spec.expression else rng.choice([-1.0, 1.0], shapes[kind])
        inputs[f"x{number}"] = (rng.uniform(0.1, 3.0, shapes[kind]) * sign).astype(np.float32)
    wide = [torch.from_numpy(value).double() for value in inputs.values()]
    return inputs, evaluate_expression(spec.expression, wide).numpy()


def assert_each_close(measured: Array, expected: Array) -> None:
    """Every element within a few roundings of float32: of itself, or of 1 where it is smaller."""
    assert measured.shape == expected.shape
    assert np.isfinite(measured).all(), "something that must not be read was read, or nothing was written"
    error = np.abs(measured - expected) / np.maximum(np.abs(expected), 1.0)
    assert error.max() <= 2e-6
