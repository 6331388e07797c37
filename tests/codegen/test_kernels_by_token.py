"""Kernels for each token by itself, on the CPU and in the emulation of a GPU, against float64."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.kernels.caches import in_q4, in_q8, spread
from helpers.kernels.cuda_workbench import EITHER, CudaWorkbench
from helpers.kernels.workbench import Array, Workbench, assert_rows, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile_codegen import cuda
from picompile_codegen.cpu import vector
from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.cpu.tensor import bind, when
from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.specs import (
    MOST_TOP_LOGITS,
    AddSpec,
    CacheWriteSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    JoinColumnsSpec,
    LayerNormSpec,
    Mode,
    Norm,
    RmsNormSpec,
    RotarySpec,
    TakeLastSpec,
    TopLogitsSpec,
)
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.activations import ACTIVATIONS
from picompile_passes.dialect.expressions import FUNCTIONS, evaluate_expression

# Part of a vector, whole ones, a rest behind them, no multiple of four, and several blocks of a GPU with a rest.
DIMS = (5, 96, 100, 99, 700)
# Rows, and how many of them count.
ROWS = ((1, 1), (5, 5), (5, 3))
EPS = 1e-5
# Columns and groups: also more columns than a block has threads for; heads of whole vectors, of some and a rest, of
# less than one, of a single column, of half a warp, of no multiple of four, and of several warps.
GROUPED = (
    *((dim, 1) for dim in (5, 96, 100, 131, 4228)),
    *((96, 6), (100, 5), (15, 3), (7, 7), (99, 3), (392, 2)),
)
# Columns of parts: whole vectors, and none of them.
JOINED = ((64, 64, 20), (5, 64, 33), (7,))
# Columns and rows: groups with and without a rest, one that is no multiple of four, and more than a block.
EMBEDDED = ((96, 1), (100, 5), (99, 5), (330, 5), (2100, 1))
HEADS, CONTEXT = 5, 50
# How rows are told where they belong; rows, and how many of them count.
MODES: tuple[tuple[Mode, int, int], ...] = (
    *(("one", 1, 1), ("chunk", 7, 7), ("chunk", 7, 4)),
    *(("sequences", 3, 3), ("sequences", 3, 2)),
)
SLOW = "compiles a kernel per case"


def norm_of(name: str, dim: int, rows: int, groups: int = 1) -> Norm:
    if name == "rms":
        return RmsNormSpec(dim, rows, EPS, groups=groups)
    return LayerNormSpec(dim, rows, EPS, weight=name != "bare", bias=name == "layer", groups=groups)


def normed(y: NDArray[np.float64], norm: str, weight: Array, bias: Array, groups: int = 1) -> NDArray[np.float64]:
    grouped = y.reshape(len(y), groups, -1)
    centered = grouped if norm == "rms" else grouped - grouped.mean(-1, keepdims=True)
    found = (centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPS)).reshape(y.shape)
    return (found if norm == "bare" else found * weight) + (bias if norm == "layer" else 0)


# Single columns are all 0 behind a norm of layers, and their error relative to that is no number.
@sampled(
    slow=SLOW,
    fixtures=EITHER,
    norm=("weighted", "rms", "layer", "bare"),
    size=GROUPED,
    counts=ROWS,
    when=lambda norm, size, **_: norm == "rms" or size[0] != size[1],
    fast={"size": ((5, 1), (100, 1), (4228, 1), (100, 5), (7, 7), (392, 2))},
)
def test_norms(either: Workbench, norm: str, size: tuple[int, int], counts: tuple[int, int]) -> None:
    (dim, groups), (rows, tokens) = size, counts
    rng = np.random.default_rng([dim, tokens])
    # Far from zero: a variance as mean of squares less square of mean would be wrong in the third digit.
    x, weight, bias = uniform(rng, tokens, dim) + 30 * (norm != "rms"), uniform(rng, dim), uniform(rng, dim)
    inputs = {"x": x, "weight": weight, "bias": bias}
    found = either.same(norm_of(norm, dim, rows, groups), inputs, tokens=tokens)
    expected = normed(x.astype(np.float64), norm, weight, bias, groups)
    # A few roundings of float32, 6e-8 each. A mean is rounded to 2e-6, and deviations from it are about 1.
    assert_rows(found["y"], expected, 1e-6 if norm == "rms" else 1e-5)


@sampled(slow=SLOW, fixtures=EITHER, dim=DIMS, counts=ROWS, biased=(False, True), fast={"dim": (5, 99, 700)})
def test_sums_quotients_and_the_last_row(either: Workbench, dim: int, counts: tuple[int, int], biased: bool) -> None:
    rows, tokens = counts
    rng = np.random.default_rng([dim, tokens])
    a, b = uniform(rng, tokens, dim), uniform(rng, tokens, dim)
    assert_rows(either.same(AddSpec(dim, rows), {"a": a, "b": b}, tokens=tokens)["y"], a + b)
    assert_rows(either.same(TakeLastSpec(dim=dim, rows=rows), {"x": a}, tokens=tokens)["y"], a[-1:])
    squares, bias = 1000 * np.abs(uniform(rng, tokens, 1)), uniform(rng, dim)
    # A token whose neurons are all silent.
    squares[0] = 0
    spec = DivideByRmsSpec(dim=dim, rows=rows, neurons=300, eps=EPS, bias=biased)
    found = either.same(spec, {"x": np.concatenate([a, squares], axis=1), "bias": bias}, tokens=tokens)
    expected = a / np.sqrt(squares.astype(np.float64) / 300 + EPS) + (bias if biased else 0)
    assert_rows(found["y"], expected, 1e-6)


@sampled(slow=SLOW, fixtures=EITHER, widths=JOINED, tokens=(1, 3, 5))
def test_join_columns(either: Workbench, widths: tuple[int, ...], tokens: int) -> None:
    rng = np.random.default_rng([*widths, tokens])
    parts = {f"x{number}": uniform(rng, tokens, width) for number, width in enumerate(widths)}
    found = either.same(JoinColumnsSpec(widths, 5), parts, tokens=tokens)
    assert_rows(found["y"], np.concatenate(list(parts.values()), axis=1))


@sampled(slow=SLOW, fixtures=EITHER, form=ROW_FORMATS, size=EMBEDDED, missing=(0, 2))
def test_embedding(either: Workbench, form: str, size: tuple[int, int], missing: int) -> None:
    (dim, rows), rng = size, np.random.default_rng([*size, missing])
    tokens = max(rows - missing, 1)
    data, weights = packed(rng, form, 50, dim)
    ids = rng.integers(0, 48, tokens).astype(np.int32)
    spec = EmbeddingSpec(format=form, vocab=50, dim=dim, rows=rows, offset=2)
    found = either.same(spec, {"ids": ids, "w": data}, tokens=tokens)
    assert_rows(found["y"], weights[ids + 2].astype(np.float32))


# ---- expressions ----


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
# One row of these numbers, which are where functions end, jump or leave the range of float32.
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, 6.0, 88.0, -87.0, 95.0, 300.0, 1e-30, 1e30, -1e30)


def check_expression(bench: Workbench, spec: ElementwiseSpec, tokens: int) -> None:
    """Every element is within a few roundings of float32: of itself, or of 1 where it is smaller.

    Inputs are between 0.1 and 3, or as much below zero, but for what the square root takes.
    """
    rng = np.random.default_rng([spec.dim, tokens, len(spec.expression)])
    shapes = {"r": (tokens, spec.dim), "t": (tokens, 1), "v": (spec.dim,), "n": (1,)}
    inputs = {}
    for number, kind in enumerate(spec.inputs):
        sign = 1.0 if "sqrt" in spec.expression else rng.choice([-1.0, 1.0], shapes[kind])
        inputs[f"x{number}"] = (rng.uniform(0.1, 3.0, shapes[kind]) * sign).astype(np.float32)
    wide = [torch.from_numpy(value).double() for value in inputs.values()]
    expected = evaluate_expression(spec.expression, wide).numpy()
    found = bench.same(spec, inputs, tokens=tokens)["y"]
    assert np.isnan(found[tokens:]).all()
    assert (np.abs(found[:tokens] - expected) <= 2e-6 * np.maximum(np.abs(expected), 1.0)).all()


@sampled(slow=SLOW, fixtures=EITHER, kinds=MIXED, dim=(1, *DIMS), counts=ROWS)
def test_expressions(either: Workbench, kinds: str, dim: int, counts: tuple[int, int]) -> None:
    """Every kind of input."""
    check_expression(either, ElementwiseSpec(dim, counts[0], kinds, MIXED[kinds]), counts[1])


def test_functions_of_expressions(either: Workbench) -> None:
    """The largest number may stand for an infinite one: the exponential ends there."""
    specs = {
        name: ElementwiseSpec(len(EDGES), 5, "r" * count, OF_FUNCTIONS[name]) for name, (count, _) in FUNCTIONS.items()
    }
    either.compile([either.written(spec) for spec in specs.values()])
    for name, spec in specs.items():
        check_expression(either, spec, 5)
        if FUNCTIONS[name][0] == 1:
            x = np.array([EDGES], np.float32)
            x = np.abs(x) if name == "sqrt" else x
            measured = either.run(spec, {"x0": x})["y"][:1]
            expected = evaluate_expression(spec.expression, [torch.from_numpy(x).double()]).numpy()
            finite = np.abs(expected) <= np.finfo(np.float32).max
            assert (measured[~finite] >= 3.4e38).all(), name
            wanted = expected[finite]
            assert (np.abs(measured[finite] - wanted) <= 1e-6 * np.maximum(np.abs(wanted), 1.0)).all(), name


def activation_kernel(bench: Workbench, names: list[str], points: int) -> Kernel:
    """A row for each activation."""
    if not isinstance(bench, CudaWorkbench):
        function = KernelFunction("activations", "every activation")
        with function:
            x, y = function.floats("x", 1, points), function.floats("y", len(names), points)
            for row, name in enumerate(names):
                vector.blocks(
                    points,
                    lambda c, _, row=row, name=name: vector.store(
                        y, row, c, value=vector.activate(name, vector.load(x, 0, c))
                    ),
                )
        return function.kernel()
    on_gpu = CudaFunction("activations")
    with on_gpu:
        given, y = on_gpu.floats("x", 1, points), on_gpu.floats("y", len(names), points)
        with on_gpu.launch(grid=1, block=1024) as place, when(place.thread < points):
            for row, name in enumerate(names):
                y[row, place.thread] = bind(cuda.memory.activate(name, given[0, place.thread]))
    return on_gpu.kernel()


def test_activations(either: Workbench) -> None:
    """To 1e-6 of the function's own value, or of 1e-6 where it is smaller; large arguments included."""
    rng, names = np.random.default_rng(0), [*ACTIVATIONS, "fatrelu(0.5)"]
    x = np.concatenate([rng.uniform(-8, 8, 512), rng.uniform(-200, 200, 256), rng.normal(0, 1e-3, 256)])
    x[:9] = 0.0, -0.0, 0.5, 6.0, 1e30, -1e30, -1e4, 1e4, 1e-8
    x = x.astype(np.float32)
    for name, row in zip(names, either.run(activation_kernel(either, names, len(x)), {"x": x[None]})["y"], strict=True):
        expected = parse_activation(name).function(torch.from_numpy(x).double()).numpy()
        with np.errstate(over="ignore"):
            in_float32 = expected.astype(np.float32)
        infinite = np.isinf(in_float32)
        assert np.array_equal(row[infinite], in_float32[infinite]), name
        error = np.abs(row - expected)[~infinite] / np.maximum(np.abs(expected), 1.0)[~infinite]
        assert error.max() < 1e-6, name


# ---- the highest logits ----


def logits_of(kind: str, rows: int, vocab: int) -> Array:
    """float32 [rows, vocab], other ones in each row."""
    rng = np.random.default_rng([len(kind), rows, vocab])
    values = rng.normal(0, 4, (rows, vocab)).astype(np.float32)
    if kind == "ties":
        return np.round(values / 2) * np.float32(2)
    if kind == "equal":
        return np.full((rows, vocab), -1.5, np.float32)
    if kind in ("rising", "falling"):
        values.sort(axis=1)
        return values if kind == "rising" else np.ascontiguousarray(values[:, ::-1])
    if kind == "zeros":
        # Both zeros are equal, and so small a number is not.
        return rng.choice(np.array([0.0, -0.0, -1e-45], np.float32), (rows, vocab))
    if kind == "infinite":
        return np.where(rng.random((rows, vocab)) < 0.4, np.copysign(np.float32(np.inf), values), values)
    if kind == "ruled out":
        values[:, np.arange(vocab) % 97 != 1] = -np.inf
    if kind == "nan":
        values[rng.random((rows, vocab)) < 3 / vocab] = np.nan
        values[:, vocab // 2] = np.array(0xFFC00001, np.uint32).view(np.float32)  # one with a sign
    return values


KINDS = ("normal", "ties", "equal", "rising", "falling", "zeros", "infinite", "ruled out", "nan")


# Fewer logits than are wanted, as many, one more, and many: for a GPU part of a run, one run and a key more, runs that
# are no power of two, a slice and a token more, many slices, and more than a block merges at once.
@sampled(
    slow="sorts large vocabularies in several orders of threads; small ones are fast",
    fixtures=EITHER,
    kind=KINDS,
    vocab=(
        1,
        37,
        64,
        65,
        300,
        2049,
        *(pytest.param(size, marks=pytest.mark.slow("is large")) for size in (50257, 70001)),
    ),
    counts=((1, 1), (3, 3), (3, 2), (3, 1)),
    when=lambda kind, vocab, counts, **_: vocab < 5000 or (counts == (1, 1) and kind in ("normal", "ties", "nan")),
)
def test_highest_logits(either: Workbench, kind: str, vocab: int, counts: tuple[int, int]) -> None:
    """They have the bits of the logits: a NaN before all, then by score, then by id."""
    rows, tokens = counts
    logits = logits_of(kind, tokens, vocab)
    found = either.same(TopLogitsSpec(vocab=vocab, rows=rows), {"logits": logits}, tokens=tokens)
    is_nan = np.isnan(logits)
    falling = -np.where(is_nan, np.float32(0), logits)
    ids = np.stack([np.lexsort((row, ~nan)) for row, nan in zip(falling, is_nan, strict=True)])[:, :MOST_TOP_LOGITS]
    assert_rows(found["ids"], ids)
    assert_rows(found["scores"].view(np.uint32), np.take_along_axis(logits, ids, axis=1).view(np.uint32))


# ---- positions ----


def places(mode: Mode, tokens: int) -> tuple[list[int], list[int], dict[str, Array]]:
    """Positions and slots of rows, and what says so to a kernel."""
    if mode == "sequences":
        positions, slots = [41, 5, 30][:tokens], [2, 3, 0][:tokens]
        return positions, slots, {"positions": np.int32(positions), "slots": np.int32(slots)}
    return list(range(30, 30 + tokens)), [2] * tokens, {}


@sampled(slow=SLOW, fixtures=EITHER, head_dim=(20, 32, 64), mode=MODES)
def test_rotary(either: Workbench, head_dim: int, mode: tuple[Mode, int, int]) -> None:
    name, rows, tokens = mode
    rng = np.random.default_rng([head_dim, tokens])
    x, angle = uniform(rng, tokens, HEADS * head_dim), rng.uniform(0, 7, (CONTEXT, head_dim // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    positions, _, where = places(name, tokens)
    spec = RotarySpec(heads=HEADS, head_dim=head_dim, rows=rows, context=CONTEXT, mode=name)
    found = either.same(spec, {"x": x, "cos": cos, "sin": sin, **where}, tokens=tokens, position=30)
    first, second = np.split(x.reshape(tokens, HEADS, head_dim).astype(np.float64), 2, axis=-1)
    c, s = (np.float64(table[positions][:, None]) for table in (cos, sin))
    expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    # Two products and a sum, each rounded to 6e-8.
    assert_rows(found["y"], expected.reshape(tokens, -1), 1e-6)


def check_cache_write(
    bench: Workbench, kv_dtype: str, mode: tuple[Mode, int, int], sequences: int, heads: Array
) -> None:
    """Write `heads` [tokens, heads, d]: as numpy rounds them, or as weights are packed. Nothing else is touched."""
    (name, rows, tokens), head_dim = mode, heads.shape[-1]
    positions, slots, where = places(name, tokens)
    slots, slot = (slots, 2) if sequences > 1 else ([0] * tokens, -1)
    spec = CacheWriteSpec(
        kv_heads=HEADS, head_dim=head_dim, context=CONTEXT, rows=rows, kv_dtype=kv_dtype, mode=name, sequences=sequences
    )
    inputs = {"x": heads.reshape(tokens, -1), **where}
    found = bench.same(spec, inputs, tokens=tokens, position=30, slot=slot)
    in_bytes = {"q8": in_q8, "q4": in_q4}
    expected = in_bytes[kv_dtype](heads)[:2] if kv_dtype in in_bytes else (heads.astype(kv_dtype),)
    for argument, values in zip(("cache", "cache_scales"), expected, strict=False):
        cache = found[argument]
        # In q4 sums of 32 numbers in another order: a few are nearer to another code.
        assert np.mean(cache[slots, :, positions] != values) <= 0.01 * (kv_dtype == "q4")
        left = cache.view(np.uint8).reshape(*cache.shape[:3], -1)
        left[slots, :, positions] = 255
        assert (left == 255).all()


@sampled(
    slow=SLOW,
    fixtures=EITHER,
    kv_dtype=("float16", "float32", "q8", "q4"),
    mode=MODES,
    sequences=(1, 4),
    when=lambda either, kv_dtype, **_: kv_dtype != "q4" or either == "cpu",
)
def test_cache_write(either: Workbench, kv_dtype: str, mode: tuple[Mode, int, int], sequences: int) -> None:
    """A single sequence asks for no slot."""
    heads = uniform(np.random.default_rng(mode[2]), mode[2], HEADS, 96 if kv_dtype == "q4" else 72)
    check_cache_write(either, kv_dtype, mode, sequences, heads)


def test_q8_of_numbers_of_all_sizes(either: Workbench) -> None:
    """From scales that are 0 in float16 to scales that it cannot hold."""
    for head_dim, size in product((72, 20, 64), (0.0, 1e-12, 1e-8, 1e-6, 1e-4, 3e-3, 1.0, 300.0, 5e5, 3e7)):
        heads = (size * uniform(np.random.default_rng(head_dim), 1, HEADS, head_dim)).astype(np.float32)
        check_cache_write(either, "q8", ("one", 1, 1), 4, heads)


def test_q4_errors_are_within_their_bound(tmp_path: Path) -> None:
    """Each number is off by 1/16 of the largest of its 32 at most, or by 1/8 at the end of the grid that is nearer."""
    workbench = Workbench(tmp_path / "host.so")
    rng, spec = np.random.default_rng(0), CacheWriteSpec(3, 96, "q4", rows=1, context=CONTEXT, mode="one", sequences=4)
    for size in (0.0, 1e-6, 1e-3, 1.0, 300.0, 5e4):
        x = (size * uniform(rng, 1, 3 * 96)).reshape(1, -1)
        result = workbench.run(spec, {"x": x}, position=7, slot=1)
        data, scales = result["cache"][1, :, 7].reshape(3, 3, 16), result["cache_scales"][1, :, 7].astype(np.float64)
        codes = np.concatenate([data & 15, data >> 4], axis=-1).astype(np.float64) - 8
        heads = spread(x).reshape(3, 3, 32)
        largest = np.abs(heads).max(axis=-1, keepdims=True)
        error = np.abs(codes * scales[..., None] - heads)
        assert (error <= largest / 8 * (1 + 2**-9) + 1e-6).all()
        assert np.mean(error > largest / 16 * (1 + 2**-9) + 1e-6) < 0.1
