"""Norms, additions, row selection, and activation functions over the whole range of float32."""

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Workbench, assert_close, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.vector import activate, blocks, load, store
from picompile_codegen.specs import AddSpec, DivideByRmsSpec, JoinColumnsSpec, LayerNormSpec, RmsNormSpec, TakeLastSpec
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.activations import ACTIVATIONS

CHUNK = 13
DIMS = (96, 100, 5)
# Columns of parts: whole vectors, and none of them.
JOINED = ((64, 64, 20), (5, 64, 33), (7,))
# Columns and groups: heads of whole vectors, of some and a rest, of less than one, and of a single column.
GROUPED = ((96, 6), (100, 5), (15, 3), (7, 7))
AFFINE = ((True, True), (True, False), (False, False))
NAMES = (*ACTIVATIONS, "fatrelu(0.5)")
POINTS = 4096


def activation_kernel(text: str) -> Kernel:
    function = KernelFunction("activation", text)
    with function:
        x, y = function.floats("x", 1, POINTS), function.floats("y", 1, POINTS)
        blocks(POINTS, lambda c, _: store(y, 0, c, value=activate(text, load(x, 0, c))))
    return function.kernel()


def rms_norm(dim: int, rows: int, groups: int = 1) -> Kernel:
    return cpu.write_kernel(RmsNormSpec(dim=dim, rows=rows, eps=1e-5, groups=groups))


def layer_norm(dim: int, rows: int, affine: tuple[bool, bool], groups: int = 1) -> Kernel:
    spec = LayerNormSpec(dim=dim, rows=rows, eps=1e-5, weight=affine[0], bias=affine[1], groups=groups)
    return cpu.write_kernel(spec)


def add(dim: int, rows: int) -> Kernel:
    return cpu.write_kernel(AddSpec(dim=dim, rows=rows))


def divide_by_rms(dim: int, rows: int, bias: bool) -> Kernel:
    return cpu.write_kernel(DivideByRmsSpec(dim=dim, rows=rows, neurons=300, eps=1e-5, bias=bias))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    built = [activation_kernel(text) for text in NAMES]
    for dim in DIMS:
        for rows in (1, CHUNK):
            built += [rms_norm(dim, rows), add(dim, rows), *(layer_norm(dim, rows, affine) for affine in AFFINE)]
            built += [divide_by_rms(dim, rows, bias) for bias in (False, True)]
        built.append(cpu.write_kernel(TakeLastSpec(dim=dim, rows=CHUNK)))
    built += [cpu.write_kernel(JoinColumnsSpec(widths, CHUNK)) for widths in JOINED]
    for dim, groups in GROUPED:
        built += [rms_norm(dim, CHUNK, groups), *(layer_norm(dim, CHUNK, affine, groups) for affine in AFFINE)]
    return Workbench(tmp_path_factory.mktemp("elementwise") / "host.so", built)


ROWS = [(1, 1), (CHUNK, CHUNK), (CHUNK, 3)]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_rms_norm(workbench: Workbench, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(dim)
    x, weight = uniform(rng, tokens, dim), uniform(rng, dim)
    result = workbench.run(rms_norm(dim, rows), {"x": x, "weight": weight}, tokens=tokens)
    wide = x.astype(np.float64)
    assert_close(result["y"][:tokens], wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight, 1e-6)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("affine", AFFINE)
def test_layer_norm(workbench: Workbench, dim: int, rows: int, tokens: int, affine: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(dim)
    # Far from zero: a variance as mean of squares less square of mean would be wrong in the third digit.
    x, weight, bias = uniform(rng, tokens, dim) + 30, uniform(rng, dim), uniform(rng, dim)
    inputs = {"x": x, "weight": weight, "bias": bias}
    result = workbench.run(layer_norm(dim, rows, affine), inputs, tokens=tokens)
    expected = torch.nn.functional.layer_norm(
        torch.from_numpy(x).double(),
        (dim,),
        torch.from_numpy(weight).double() if affine[0] else None,
        torch.from_numpy(bias).double() if affine[1] else None,
        1e-5,
    )
    assert_close(result["y"][:tokens], expected.numpy(), 1e-5)


@pytest.mark.parametrize(("dim", "groups"), GROUPED)
@pytest.mark.parametrize("tokens", [CHUNK, 3])
def test_rms_norm_of_groups(workbench: Workbench, dim: int, groups: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    x, weight = uniform(rng, tokens, dim), uniform(rng, dim)
    result = workbench.run(rms_norm(dim, CHUNK, groups), {"x": x, "weight": weight}, tokens=tokens)
    wide = x.astype(np.float64).reshape(tokens, groups, -1)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    assert_close(result["y"][:tokens], normed.reshape(tokens, dim) * weight, 1e-6)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize(("dim", "groups"), GROUPED[:-1])
@pytest.mark.parametrize("affine", AFFINE)
def test_layer_norm_of_groups(workbench: Workbench, dim: int, groups: int, affine: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(dim)
    x, weight, bias = uniform(rng, 3, dim) + 30, uniform(rng, dim), uniform(rng, dim)
    inputs = {"x": x, "weight": weight, "bias": bias}
    result = workbench.run(layer_norm(dim, CHUNK, affine, groups), inputs, tokens=3)
    parts = torch.from_numpy(x).double().reshape(3, groups, -1)
    expected = torch.nn.functional.layer_norm(parts, parts.shape[-1:], None, None, 1e-5).reshape(3, dim).numpy()
    expected = expected * weight if affine[0] else expected
    assert_close(result["y"][:3], expected + bias if affine[1] else expected, 1e-5)
    assert np.isnan(result["y"][3:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_divide_by_rms(workbench: Workbench, dim: int, rows: int, tokens: int, biased: bool) -> None:
    rng = np.random.default_rng(dim)
    x, bias = uniform(rng, tokens, dim + 1), uniform(rng, dim)
    # The squares of a token whose neurons are all silent, and those of others.
    x[:, dim] = np.abs(x[:, dim]) * 1000
    x[0, dim] = 0
    result = workbench.run(divide_by_rms(dim, rows, biased), {"x": x, "bias": bias}, tokens=tokens)
    wide = x.astype(np.float64)
    expected = wide[:, :dim] / np.sqrt(wide[:, dim:] / 300 + 1e-5) + (bias if biased else 0)
    assert_close(result["y"][:tokens], expected, 1e-6)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_add(workbench: Workbench, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(dim)
    a, b = uniform(rng, tokens, dim), uniform(rng, tokens, dim)
    result = workbench.run(add(dim, rows), {"a": a, "b": b}, tokens=tokens)
    assert np.array_equal(result["y"][:tokens], a + b)


@pytest.mark.parametrize("widths", JOINED, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, CHUNK])
def test_join_columns(workbench: Workbench, widths: tuple[int, ...], tokens: int) -> None:
    rng = np.random.default_rng([*widths, tokens])
    parts = {f"x{number}": uniform(rng, tokens, width) for number, width in enumerate(widths)}
    result = workbench.run(cpu.write_kernel(JoinColumnsSpec(widths, CHUNK)), parts, tokens=tokens)
    assert np.array_equal(result["y"][:tokens], np.concatenate(list(parts.values()), axis=1))
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("tokens", [1, 4, CHUNK])
def test_take_last(workbench: Workbench, dim: int, tokens: int) -> None:
    x = uniform(np.random.default_rng(dim), tokens, dim)
    result = workbench.run(cpu.write_kernel(TakeLastSpec(dim=dim, rows=CHUNK)), {"x": x}, tokens=tokens)
    assert np.array_equal(result["y"][0], x[-1])


@pytest.mark.parametrize("text", NAMES)
def test_activation(workbench: Workbench, text: str) -> None:
    """To 1e-6 of the function's own value, or of 1e-6 where it is smaller; large arguments included."""
    rng = np.random.default_rng(0)
    near, far, tiny = (
        rng.uniform(-8, 8, POINTS // 2),
        rng.uniform(-200, 200, POINTS // 4),
        rng.normal(0, 1e-3, POINTS // 4),
    )
    x = np.concatenate([near, far, tiny]).astype(np.float32)
    x[:6] = 0.0, -0.0, 0.5, 6.0, 1e30, -1e30
    measured = workbench.run(activation_kernel(text), {"x": x[None]})["y"][0]
    expected = parse_activation(text).function(torch.from_numpy(x).double()).numpy()
    with np.errstate(over="ignore"):
        in_float32 = expected.astype(np.float32)
    infinite = np.isinf(in_float32)
    assert np.array_equal(measured[infinite], in_float32[infinite])
    error = np.abs(measured - expected)[~infinite] / np.maximum(np.abs(expected), 1.0)[~infinite]
    assert error.max() < 1e-6
