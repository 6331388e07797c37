"""Kernels for each token by itself on a GPU: sums, rows of embeddings, expressions, rotations, rows of the cache."""

import numpy as np
import pytest
import torch

from helpers.kernels.caches import in_q8
from helpers.kernels.cuda_workbench import CudaWorkbench, assert_rows
from helpers.kernels.expression_cases import MIXED, OF_FUNCTIONS, assert_each_close, case
from helpers.kernels.workbench import Array, packed, uniform
from helpers.products import sampled
from picompile_codegen import cuda
from picompile_codegen.cpu.tensor import bind, when
from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.cuda.memory import activate
from picompile_codegen.specs import (
    AddSpec,
    CacheWriteSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    JoinColumnsSpec,
    Mode,
    RotarySpec,
    TakeLastSpec,
)
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.activations import ACTIVATIONS
from picompile_passes.dialect.expressions import FUNCTIONS

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# Part of a block, one that is no multiple of four, and several blocks with a rest.
DIMS = (96, 99, 700)
# Rows, and how many of them count.
ROWS = ((1, 1), (5, 5), (5, 3))
# Columns of parts: whole vectors, and none of them.
JOINED = ((64, 64, 20), (5, 64, 33), (7,))
# Columns and rows: groups with and without a rest, one that is no multiple of four, and more than a block.
EMBEDDED = ((96, 1), (100, 5), (99, 5), (2100, 1))
HEADS, CONTEXT = 5, 50
# How rows are told where they belong; rows, and how many of them count.
MODES: tuple[tuple[Mode, int, int], ...] = (
    *(("one", 1, 1), ("chunk", 7, 7), ("chunk", 7, 4)),
    *(("sequences", 3, 3), ("sequences", 3, 2)),
)
SLOW = "compiles a kernel per case"


@sampled(slow=SLOW, dim=DIMS, counts=ROWS)
def test_sums_quotients_and_the_last_row(workbench: CudaWorkbench, dim: int, counts: tuple[int, int]) -> None:
    rows, tokens = counts
    rng = np.random.default_rng([dim, tokens])
    a, b = uniform(rng, tokens, dim), uniform(rng, tokens, dim)
    found = workbench.run(AddSpec(dim=dim, rows=rows), {"a": a, "b": b}, tokens=tokens)
    assert_rows(found["y"], a + b)
    found = workbench.run(TakeLastSpec(dim=dim, rows=rows), {"x": a}, tokens=tokens)
    assert_rows(found["y"], a[-1:])
    squares, bias = 1000 * np.abs(uniform(rng, tokens, 1)), uniform(rng, dim)
    spec = DivideByRmsSpec(dim=dim, rows=rows, neurons=300, eps=1e-5, bias=rows > 1)
    found = workbench.run(spec, {"x": np.concatenate([a, squares], axis=1), "bias": bias}, tokens=tokens)
    expected = a / np.sqrt(squares.astype(np.float64) / 300 + 1e-5) + (bias if rows > 1 else 0)
    assert_rows(found["y"], expected, 1e-6)


@sampled(slow=SLOW, widths=JOINED, tokens=(1, 3, 5))
def test_join_columns(workbench: CudaWorkbench, widths: tuple[int, ...], tokens: int) -> None:
    rng = np.random.default_rng([*widths, tokens])
    parts = {f"x{number}": uniform(rng, tokens, width) for number, width in enumerate(widths)}
    found = workbench.run(JoinColumnsSpec(widths, 5), parts, tokens=tokens)
    assert_rows(found["y"], np.concatenate(list(parts.values()), axis=1))


@sampled(slow=SLOW, form=FORMATS, size=EMBEDDED, missing=(0, 2))
def test_embedding(workbench: CudaWorkbench, form: str, size: tuple[int, int], missing: int) -> None:
    (dim, rows), rng = size, np.random.default_rng([*size, missing])
    tokens = max(rows - missing, 1)
    data, weights = packed(rng, form, 50, dim)
    ids = rng.integers(0, 48, tokens).astype(np.int32)
    spec = EmbeddingSpec(format=form, vocab=50, dim=dim, rows=rows, offset=2)
    found = workbench.run(spec, {"ids": ids, "w": data}, tokens=tokens)
    assert_rows(found["y"], weights[ids + 2].astype(np.float32))


@sampled(slow=SLOW, kinds=MIXED, dim=(1, *DIMS), counts=ROWS)
def test_expressions(workbench: CudaWorkbench, kinds: str, dim: int, counts: tuple[int, int]) -> None:
    """Every kind of input, against float64."""
    rows, tokens = counts
    spec = ElementwiseSpec(dim=dim, rows=rows, inputs=kinds, expression=MIXED[kinds])
    inputs, expected = case(spec, tokens)
    found = workbench.run(spec, inputs, tokens=tokens)["y"]
    assert_each_close(found[:tokens], expected)
    assert np.isnan(found[tokens:]).all()


def test_functions_of_expressions(workbench: CudaWorkbench) -> None:
    specs = [
        ElementwiseSpec(dim=99, rows=5, inputs="r" * count, expression=OF_FUNCTIONS[name])
        for name, (count, _) in FUNCTIONS.items()
    ]
    workbench.compile(cuda.write_kernel(spec) for spec in specs)
    for spec in specs:
        inputs, expected = case(spec, 5)
        assert_each_close(workbench.run(spec, inputs, tokens=5)["y"], expected)


def test_activations(workbench: CudaWorkbench) -> None:
    """Also of numbers whose exponential is infinite, of zero, and of a threshold itself."""
    names = [*ACTIVATIONS, "fatrelu(0.25)"]
    x = np.concatenate([np.linspace(-12, 12, 97), [-1e4, -100, -0.25, -1e-8, 0, 1e-8, 0.25, 100, 1e4]])
    x = x.astype(np.float32)
    function = CudaFunction("activations")
    with function:
        given, y = function.floats("x", len(x)), function.floats("y", len(names), len(x))
        with function.launch(grid=1, block=128) as place, when(place.thread < len(x)):
            for i, name in enumerate(names):
                y[i, place.thread] = bind(activate(name, given[place.thread]))
    found = workbench.run(function.cuda_kernel(), {"x": x})["y"]
    for name, row in zip(names, found, strict=True):
        expected = parse_activation(name).function(torch.from_numpy(x).double()).numpy()
        # A few roundings of float32; gelu takes a difference from 1, which is rounded to 6e-8, times x.
        assert np.allclose(row, expected, rtol=1e-6, atol=1e-6), name


def places(mode: Mode, tokens: int) -> tuple[list[int], list[int], dict[str, Array]]:
    """Positions and slots of rows, and what says so to a kernel."""
    if mode == "sequences":
        positions, slots = [41, 5, 30][:tokens], [2, 3, 0][:tokens]
        return positions, slots, {"positions": np.int32(positions), "slots": np.int32(slots)}
    return list(range(30, 30 + tokens)), [2] * tokens, {}


@sampled(slow=SLOW, head_dim=(20, 64), mode=MODES)
def test_rotary(workbench: CudaWorkbench, head_dim: int, mode: tuple[Mode, int, int]) -> None:
    name, rows, tokens = mode
    rng = np.random.default_rng([head_dim, tokens])
    x, angle = uniform(rng, tokens, HEADS * head_dim), rng.uniform(0, 7, (CONTEXT, head_dim // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    positions, _, where = places(name, tokens)
    spec = RotarySpec(heads=HEADS, head_dim=head_dim, rows=rows, context=CONTEXT, mode=name)
    found = workbench.run(spec, {"x": x, "cos": cos, "sin": sin, **where}, tokens=tokens, position=30)
    first, second = np.split(x.reshape(tokens, HEADS, head_dim).astype(np.float64), 2, axis=-1)
    c, s = (np.float64(table[positions][:, None]) for table in (cos, sin))
    expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    # Two products and a sum, each rounded to 6e-8.
    assert_rows(found["y"], expected.reshape(tokens, -1), 1e-6)


def check_cache_write(
    workbench: CudaWorkbench, kv_dtype: str, mode: tuple[Mode, int, int], sequences: int, heads: Array
) -> None:
    """Write `heads` [tokens, heads, d]: as numpy rounds them, or as weights are packed. Nothing else is touched."""
    (name, rows, tokens), head_dim = mode, heads.shape[-1]
    positions, slots, where = places(name, tokens)
    slots, slot = (slots, 2) if sequences > 1 else ([0] * tokens, -1)
    spec = CacheWriteSpec(
        kv_heads=HEADS, head_dim=head_dim, context=CONTEXT, rows=rows, kv_dtype=kv_dtype, mode=name, sequences=sequences
    )
    inputs = {"x": heads.reshape(tokens, -1), **where}
    found = workbench.run(spec, inputs, tokens=tokens, position=30, slot=slot)
    expected = [heads.astype(kv_dtype)] if kv_dtype != "q8" else in_q8(heads)[:2]
    for argument, values in zip(("cache", "cache_scales"), expected, strict=False):
        cache = found[argument]
        assert np.array_equal(cache[slots, :, positions], values)
        left = cache.view(np.uint8).reshape(*cache.shape[:3], -1)
        left[slots, :, positions] = 255
        assert (left == 255).all()


@sampled(slow=SLOW, kv_dtype=("float16", "float32", "q8"), mode=MODES, sequences=(1, 4))
def test_cache_write(workbench: CudaWorkbench, kv_dtype: str, mode: tuple[Mode, int, int], sequences: int) -> None:
    """A single sequence asks for no slot."""
    heads = uniform(np.random.default_rng(mode[2]), mode[2], HEADS, 72)
    check_cache_write(workbench, kv_dtype, mode, sequences, heads)


@pytest.mark.parametrize("head_dim", [72, 20, 64])
def test_q8_of_numbers_of_all_sizes(workbench: CudaWorkbench, head_dim: int) -> None:
    """The bytes equal the CPU's, from scales that are 0 in float16 to scales that it cannot hold."""
    for size in (0.0, 1e-12, 1e-8, 1e-6, 1e-4, 3e-3, 1.0, 300.0, 5e5, 3e7):
        heads = (size * uniform(np.random.default_rng(head_dim), 1, HEADS, head_dim)).astype(np.float32)
        check_cache_write(workbench, "q8", ("one", 1, 1), 4, heads)
