"""Norms, additions, selections of rows and of logits, activations and expressions, against float64."""

import numpy as np
import pytest
import torch

from helpers.kernels.expression_cases import MIXED, OF_FUNCTIONS, assert_each_close, case
from helpers.kernels.top_logits_cases import KINDS, check, logits_of
from helpers.kernels.workbench import Array, Workbench, assert_close, uniform
from picompile_codegen.cpu import Kernel, write_kernel
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.vector import activate, blocks, load, store
from picompile_codegen.specs import (
    AddSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    JoinColumnsSpec,
    LayerNormSpec,
    RmsNormSpec,
    TakeLastSpec,
    TopLogitsSpec,
)
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.activations import ACTIVATIONS
from picompile_passes.dialect.expressions import FUNCTIONS, evaluate_expression

CHUNK = 13
DIMS = (96, 100, 5)
ROWS = [(1, 1), (CHUNK, CHUNK), (CHUNK, 3)]
# Columns of parts: whole vectors, and none of them.
JOINED = ((64, 64, 20), (5, 64, 33), (7,))
# Columns and groups: heads of whole vectors, of some and a rest, of less than one, and of a single column.
GROUPED = ((96, 6), (100, 5), (15, 3), (7, 7))
NORMED = [
    *((dim, 1, rows, tokens) for dim in DIMS for rows, tokens in ROWS),
    *((dim, groups, CHUNK, tokens) for dim, groups in GROUPED for tokens in (CHUNK, 3)),
]
AFFINE = ((True, True), (True, False), (False, False))
NAMES = (*ACTIVATIONS, "fatrelu(0.5)")
POINTS = 4096
# Columns, rows, and how many of the rows count, of expressions.
SIZES = [(99, 1, 1), (99, CHUNK, CHUNK), (96, CHUNK, 3), (5, CHUNK, 3), (1, CHUNK, CHUNK)]
# Fewer logits than are wanted, as many, one more, and many.
VOCABS = (1, 37, 64, 65, 300, 50257)
# One row of these numbers, which are where functions end, jump or leave the range of float32.
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, 6.0, 88.0, -87.0, 95.0, 300.0, 1e-30, 1e30, -1e30)


def activation_kernel(text: str) -> Kernel:
    function = KernelFunction("activation", text)
    with function:
        x, y = function.floats("x", 1, POINTS), function.floats("y", 1, POINTS)
        blocks(POINTS, lambda c, _: store(y, 0, c, value=activate(text, load(x, 0, c))))
    return function.kernel()


def rms_norm(dim: int, rows: int, groups: int = 1) -> Kernel:
    return write_kernel(RmsNormSpec(dim=dim, rows=rows, eps=1e-5, groups=groups))


def layer_norm(dim: int, rows: int, affine: tuple[bool, bool], groups: int = 1) -> Kernel:
    spec = LayerNormSpec(dim=dim, rows=rows, eps=1e-5, weight=affine[0], bias=affine[1], groups=groups)
    return write_kernel(spec)


def divide_by_rms(dim: int, rows: int, bias: bool) -> Kernel:
    return write_kernel(DivideByRmsSpec(dim=dim, rows=rows, neurons=300, eps=1e-5, bias=bias))


def of_function(name: str) -> Kernel:
    count = FUNCTIONS[name][0]
    return write_kernel(ElementwiseSpec(len(EDGES), CHUNK, inputs="r" * count, expression=OF_FUNCTIONS[name]))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    built = [*(activation_kernel(text) for text in NAMES), *(of_function(name) for name in FUNCTIONS)]
    for dim in DIMS:
        for rows in (1, CHUNK):
            built += [rms_norm(dim, rows), *(layer_norm(dim, rows, affine) for affine in AFFINE)]
            built += [write_kernel(AddSpec(dim, rows)), *(divide_by_rms(dim, rows, bias) for bias in (False, True))]
        built.append(write_kernel(TakeLastSpec(dim=dim, rows=CHUNK)))
    built += [write_kernel(JoinColumnsSpec(widths, CHUNK)) for widths in JOINED]
    for dim, groups in GROUPED:
        built += [rms_norm(dim, CHUNK, groups), *(layer_norm(dim, CHUNK, affine, groups) for affine in AFFINE)]
    built += [write_kernel(TopLogitsSpec(vocab, rows)) for vocab in VOCABS for rows in (1, 3)]
    built += [write_kernel(ElementwiseSpec(*size[:2], *each)) for each in MIXED.items() for size in SIZES]
    return Workbench(tmp_path_factory.mktemp("elementwise") / "host.so", built)


def run_rows(workbench: Workbench, kernel: Kernel, inputs: dict[str, Array], tokens: int) -> Array:
    """The rows of y that count; the others must be as they were, and threads must change no bit."""
    y = workbench.run(kernel, inputs, tokens=tokens)["y"]
    assert np.isnan(y[tokens:]).all()
    assert np.array_equal(workbench.run(kernel, inputs, tokens=tokens, threads=3)["y"], y, equal_nan=True)
    return y[:tokens]


@pytest.mark.parametrize(("dim", "groups", "rows", "tokens"), NORMED)
def test_rms_norm(workbench: Workbench, dim: int, groups: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    x, weight = uniform(rng, tokens, dim), uniform(rng, dim)
    measured = run_rows(workbench, rms_norm(dim, rows, groups), {"x": x, "weight": weight}, tokens)
    wide = x.astype(np.float64).reshape(tokens, groups, -1)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    assert_close(measured, normed.reshape(tokens, dim) * weight, 1e-6)


# Single columns are all 0, and their error relative to that is no number.
@pytest.mark.parametrize(("dim", "groups", "rows", "tokens"), [each for each in NORMED if each[0] != each[1]])
@pytest.mark.parametrize("affine", AFFINE)
def test_layer_norm(
    workbench: Workbench, dim: int, groups: int, rows: int, tokens: int, affine: tuple[bool, bool]
) -> None:
    rng = np.random.default_rng(dim)
    # Far from zero: a variance as mean of squares less square of mean would be wrong in the third digit.
    x, weight, bias = uniform(rng, tokens, dim) + 30, uniform(rng, dim), uniform(rng, dim)
    inputs = {"x": x, "weight": weight, "bias": bias}
    measured = run_rows(workbench, layer_norm(dim, rows, affine, groups), inputs, tokens)
    parts = torch.from_numpy(x).double().reshape(tokens, groups, -1)
    expected = torch.nn.functional.layer_norm(parts, parts.shape[-1:], None, None, 1e-5).reshape(tokens, dim).numpy()
    expected = expected * weight if affine[0] else expected
    assert_close(measured, expected + bias if affine[1] else expected, 1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_divide_by_rms(workbench: Workbench, dim: int, rows: int, tokens: int, biased: bool) -> None:
    rng = np.random.default_rng(dim)
    x, bias = uniform(rng, tokens, dim + 1), uniform(rng, dim)
    # The squares of a token whose neurons are all silent, and those of others.
    x[:, dim] = np.abs(x[:, dim]) * 1000
    x[0, dim] = 0
    measured = run_rows(workbench, divide_by_rms(dim, rows, biased), {"x": x, "bias": bias}, tokens)
    wide = x.astype(np.float64)
    assert_close(measured, wide[:, :dim] / np.sqrt(wide[:, dim:] / 300 + 1e-5) + (bias if biased else 0), 1e-6)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_add_and_take_last(workbench: Workbench, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(dim)
    a, b = uniform(rng, tokens, dim), uniform(rng, tokens, dim)
    assert np.array_equal(run_rows(workbench, write_kernel(AddSpec(dim, rows)), {"a": a, "b": b}, tokens), a + b)
    last = workbench.run(write_kernel(TakeLastSpec(dim=dim, rows=CHUNK)), {"x": a}, tokens=tokens)
    assert np.array_equal(last["y"][0], a[-1])


@pytest.mark.parametrize("widths", JOINED, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, CHUNK])
def test_join_columns(workbench: Workbench, widths: tuple[int, ...], tokens: int) -> None:
    rng = np.random.default_rng([*widths, tokens])
    parts = {f"x{number}": uniform(rng, tokens, width) for number, width in enumerate(widths)}
    measured = run_rows(workbench, write_kernel(JoinColumnsSpec(widths, CHUNK)), parts, tokens)
    assert np.array_equal(measured, np.concatenate(list(parts.values()), axis=1))


@pytest.mark.parametrize("text", NAMES)
def test_activation(workbench: Workbench, text: str) -> None:
    """To 1e-6 of the function's own value, or of 1e-6 where it is smaller; large arguments included."""
    rng = np.random.default_rng(0)
    near, far = rng.uniform(-8, 8, POINTS // 2), rng.uniform(-200, 200, POINTS // 4)
    x = np.concatenate([near, far, rng.normal(0, 1e-3, POINTS // 4)]).astype(np.float32)
    x[:6] = 0.0, -0.0, 0.5, 6.0, 1e30, -1e30
    measured = workbench.run(activation_kernel(text), {"x": x[None]})["y"][0]
    expected = parse_activation(text).function(torch.from_numpy(x).double()).numpy()
    with np.errstate(over="ignore"):
        in_float32 = expected.astype(np.float32)
    infinite = np.isinf(in_float32)
    assert np.array_equal(measured[infinite], in_float32[infinite])
    error = np.abs(measured - expected)[~infinite] / np.maximum(np.abs(expected), 1.0)[~infinite]
    assert error.max() < 1e-6


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize(("dim", "rows", "tokens"), SIZES)
def test_kinds_of_inputs(workbench: Workbench, kinds: str, dim: int, rows: int, tokens: int) -> None:
    spec = ElementwiseSpec(dim, rows, kinds, MIXED[kinds])
    inputs, expected = case(spec, tokens)
    assert_each_close(run_rows(workbench, write_kernel(spec), inputs, tokens), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(workbench: Workbench, name: str) -> None:
    """The largest number may stand for an infinite one: the exponential ends there."""
    kernel = of_function(name)
    spec = ElementwiseSpec(len(EDGES), CHUNK, "r" * FUNCTIONS[name][0], OF_FUNCTIONS[name])
    inputs, expected = case(spec, CHUNK)
    assert_each_close(run_rows(workbench, kernel, inputs, CHUNK), expected)
    if FUNCTIONS[name][0] == 1:
        x = np.array([EDGES], np.float32)
        x = np.abs(x) if name == "sqrt" else x
        measured = workbench.run(kernel, {"x0": x})["y"][:1]
        expected = evaluate_expression(spec.expression, [torch.from_numpy(x).double()]).numpy()
        finite = np.abs(expected) <= np.finfo(np.float32).max
        assert (measured[~finite] >= 3.4e38).all()
        assert (np.abs(measured - expected)[finite] <= 1e-6 * np.maximum(np.abs(expected), 1.0)[finite]).all()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("kind", "tokens"), [*((kind, 1) for kind in KINDS), ("normal", 3), ("nan", 2)])
def test_highest_logits_come_first(workbench: Workbench, kind: str, tokens: int, vocab: int) -> None:
    logits = logits_of(kind, tokens, vocab)
    for rows in (1, 3) if tokens == 1 else (3,):
        for threads in (1, 2, 3):
            kernel = write_kernel(TopLogitsSpec(vocab, rows))
            check(workbench.run(kernel, {"logits": logits}, tokens=tokens, threads=threads), logits)
