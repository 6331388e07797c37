"""Additions, row selection and embeddings on a GPU, which are exact, and division by a root mean square."""

from itertools import product

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import assert_close, packed, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel
from picompile_codegen.specs import AddSpec, DivideByRmsSpec, EmbeddingSpec, JoinColumnsSpec, TakeLastSpec

CHUNK = 5
FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# Part of a block, one that is no multiple of four, and several blocks with a rest.
DIMS = (96, 99, 700)
# Columns of parts: whole vectors, and none of them.
JOINED = ((64, 64, 20), (5, 64, 33), (7,))
ROWS = [(1, 1), (CHUNK, CHUNK), (CHUNK, 3)]
# Of an embedding: groups with and without a rest, one that is no multiple of four, and more than a block.
EMBEDDED = ((96, 1), (100, CHUNK), (99, CHUNK), (2100, 1))


def embedding(format_name: str, dim: int, rows: int) -> CudaKernel:
    return cuda.write_kernel(EmbeddingSpec(format=format_name, vocab=50, dim=dim, rows=rows, offset=2))


def divide_by_rms(dim: int, rows: int) -> CudaKernel:
    return cuda.write_kernel(DivideByRmsSpec(dim=dim, rows=rows, neurons=300, eps=1e-5, bias=rows > 1))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    built = [cuda.write_kernel(AddSpec(dim=dim, rows=rows)) for dim in DIMS for rows in (1, CHUNK)]
    built += [divide_by_rms(dim, rows) for dim in DIMS for rows in (1, CHUNK)]
    built += [cuda.write_kernel(TakeLastSpec(dim=dim, rows=CHUNK)) for dim in DIMS]
    built += [cuda.write_kernel(JoinColumnsSpec(widths, CHUNK)) for widths in JOINED]
    built += [embedding(format_name, *size) for format_name, size in product(FORMATS, EMBEDDED)]
    return CudaWorkbench(tmp_path_factory.mktemp("elementwise") / "device.so", built)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_add(workbench: CudaWorkbench, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    a, b = uniform(rng, tokens, dim), uniform(rng, tokens, dim)
    result = workbench.run(cuda.write_kernel(AddSpec(dim=dim, rows=rows)), {"a": a, "b": b}, tokens=tokens)
    assert np.array_equal(result["y"][:tokens], a + b)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_divide_by_rms(workbench: CudaWorkbench, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    x, bias = uniform(rng, tokens, dim + 1), uniform(rng, dim)
    x[:, dim] = np.abs(x[:, dim]) * 1000
    result = workbench.run(divide_by_rms(dim, rows), {"x": x, "bias": bias}, tokens=tokens)
    wide = x.astype(np.float64)
    expected = wide[:, :dim] / np.sqrt(wide[:, dim:] / 300 + 1e-5) + (bias if rows > 1 else 0)
    assert_close(result["y"][:tokens], expected, 1e-6)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("widths", JOINED, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, CHUNK])
def test_join_columns(workbench: CudaWorkbench, widths: tuple[int, ...], tokens: int) -> None:
    rng = np.random.default_rng([*widths, tokens])
    parts = {f"x{number}": uniform(rng, tokens, width) for number, width in enumerate(widths)}
    result = workbench.run(cuda.write_kernel(JoinColumnsSpec(widths, CHUNK)), parts, tokens=tokens)
    assert np.array_equal(result["y"][:tokens], np.concatenate(list(parts.values()), axis=1))
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("tokens", [1, 3, CHUNK])
def test_take_last(workbench: CudaWorkbench, dim: int, tokens: int) -> None:
    x = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    result = workbench.run(cuda.write_kernel(TakeLastSpec(dim=dim, rows=CHUNK)), {"x": x}, tokens=tokens)
    assert np.array_equal(result["y"][0], x[-1])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("dim", "rows"), EMBEDDED)
@pytest.mark.parametrize("missing", [0, 2])
def test_embedding(workbench: CudaWorkbench, format_name: str, dim: int, rows: int, missing: int) -> None:
    rng = np.random.default_rng([dim, missing])
    tokens = max(rows - missing, 1)
    data, weights = packed(rng, format_name, 50, dim)
    ids = rng.integers(0, 48, tokens).astype(np.int32)
    result = workbench.run(embedding(format_name, dim, rows), {"ids": ids, "w": data}, tokens=tokens)
    assert np.array_equal(result["y"][:tokens], weights[ids + 2].astype(np.float32))
    assert np.isnan(result["y"][tokens:]).all()
