"""One matrix, rounded for the second moments of its inputs."""

import pytest
import torch
from torch import Tensor

from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile.errors import UnsupportedModelError
from picompile.rounding.compensate import best_grid, inverse_factor, round_neurons, round_rows
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

_ROUNDED = [name for name in ROW_FORMATS if FORMATS[name].scale]
# Odd sizes: less than a group, several blocks of groups, a rest.
_SIZES = [(5, 20, 17), (70, 100, 300), (33, 288, 500)]


def _inputs(tokens: int, inputs: int, seed: int) -> Tensor:
    """Correlated inputs of different sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return mixed / inputs**0.5 * torch.rand(inputs, generator=generator) * 2


def _weights(outputs: int, inputs: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) * 0.05


def _error(rounded: Tensor, weight: Tensor, x: Tensor) -> float:
    """The squared error of the products with x, over that of the products, in float64."""
    exact, off = x.double() @ weight.double().T, x.double() @ (rounded - weight).double().T
    return float(off.square().sum() / exact.square().sum())


@sampled(slow="rounds matrices of every size in every format", form=_ROUNDED, size=_SIZES)
def test_products_are_closer_than_with_the_nearest_weights(form, size):
    outputs, inputs, tokens = size
    weight, x = _weights(outputs, inputs, seed=outputs), _inputs(tokens, inputs, seed=inputs)
    moments = x.T @ x
    nearest = dequantize_rows(quantize_rows(weight, form), form, inputs)
    rounded = dequantize_rows(round_rows(weight, moments.clone(), FORMATS[form]), form, inputs)
    assert _error(rounded, weight, x) < 0.8 * _error(nearest, weight, x)
    neurons = weight.T.contiguous()
    nearest = dequantize_rows(quantize_rows(neurons, form), form, outputs).T
    rounded = dequantize_rows(round_neurons(neurons, moments.clone(), FORMATS[form]), form, outputs).T
    assert _error(rounded, weight, x) < 0.8 * _error(nearest, weight, x)


@pytest.mark.parametrize("form", ["q4", "q4m"])
def test_each_input_is_compensated_as_the_inverse_of_the_moments_says(form):
    """The rule that GPTQ was derived from, in float64, one input at a time, without its factorization."""
    outputs, inputs = 40, 96
    weight, x = _weights(outputs, inputs, seed=1), _inputs(400, inputs, seed=2)
    moments = x.T @ x
    # One output to a neuron and back: groups of outputs need no order of groups.
    packed = round_neurons(weight.T.contiguous(), moments.clone(), FORMATS[form])
    order = moments.diagonal().argsort(descending=True, stable=True)
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(inputs)
    inverse = damped[order][:, order].inverse()
    work, expected = weight.T.double()[order], torch.zeros(inputs, outputs)
    padded = FORMATS[form].padded_columns(outputs)
    for i in range(inputs):
        groups = torch.zeros(padded)
        groups[:outputs] = work[i]
        groups = groups.view(-1, 32)
        expected[i] = best_grid(groups, FORMATS[form]).nearest(groups).view(-1)[:outputs]
        error = (work[i] - expected[i]) / inverse[i, i]
        work -= torch.outer(inverse[:, i], error)
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    actual = dequantize_rows(packed, form, outputs)[order]
    # Where a weight lies between two codes, float32 may choose the other one; all later inputs make up for it.
    assert torch.equal(actual[:4], expected[:4])
    assert _error(actual[order.argsort()].T, weight, x) == pytest.approx(
        _error(expected[order.argsort()].T, weight, x), rel=0.1
    )


@pytest.mark.parametrize("form", _ROUNDED)
def test_inputs_that_are_independent_are_rounded_to_the_nearest(form):
    weight = _weights(24, 64, seed=3)
    moments = torch.diag(torch.rand(64) + 0.1)
    factor = inverse_factor(moments, torch.arange(64))
    sizes = factor.diagonal().reciprocal().square()
    grids = [best_grid(weight[:, i : i + 32].contiguous(), FORMATS[form], sizes[i : i + 32]) for i in (0, 32)]
    expected = torch.cat([grid.nearest(weight[:, i : i + 32]) for grid, i in zip(grids, (0, 32), strict=True)], dim=1)
    assert torch.equal(dequantize_rows(round_rows(weight, moments, FORMATS[form]), form, 64), expected)


@pytest.mark.parametrize("form", ["q4", "q4m", "q6"])
def test_weights_that_the_format_holds_stay_as_they_are(form):
    """Each group uses the whole span of its format, and so its own grid is the first that is tried."""
    codes = torch.linspace(0, FORMATS[form].highest, 16).round().repeat(4)
    zero = 4.0 if form == "q4m" else float(FORMATS[form].zero)
    weight = ((codes - zero) * 0.25).repeat(7, 1)
    x = _inputs(100, 64, seed=5)
    packed = round_rows(weight, x.T @ x, FORMATS[form])
    assert torch.equal(dequantize_rows(packed, form, 64), weight)


def test_an_output_head_is_rounded_in_parts(monkeypatch):
    weight, x = _weights(100, 64, seed=6), _inputs(200, 64, seed=7)
    whole = round_rows(weight, x.T @ x, FORMATS["q4"])
    monkeypatch.setattr("picompile.rounding.compensate._OUTPUTS", 33)
    assert torch.equal(round_rows(weight, x.T @ x, FORMATS["q4"]), whole)


def test_inputs_that_never_come_leave_finite_weights_and_others_must_be_numbers():
    weight = _weights(10, 64, seed=8)
    for moments in (torch.zeros(64, 64), torch.diag(torch.arange(64.0) % 2)):
        assert dequantize_rows(round_rows(weight, moments, FORMATS["q4m"]), "q4m", 64).isfinite().all()
    moments[3, 3] = float("nan")
    with pytest.raises(UnsupportedModelError, match="not finite"):
        round_rows(weight, moments, FORMATS["q4"])
