"""Linear layers on a GPU against float64: one token and chunks, sizes that are no multiple of anything."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import in_halves, weights_in_halves
from helpers.kernels.workbench import assert_close, packed, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import mma
from picompile_codegen.specs import LinearSpec

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# The last has more columns than shared memory takes at a time.
SIZES = ((70, 45), (33, 96), (5, 4133))
CHUNK = 67


def _kernel(format_name: str, size: tuple[int, int], rows: int, bias: bool) -> cuda.CudaKernel:
    return cuda.write_kernel(LinearSpec(format=format_name, n=size[0], k=size[1], rows=rows, bias=bias))


CASES = [
    *((form, size, 1, size[0] == 33) for form, size in product(FORMATS, SIZES)),
    *((form, SIZES[0], CHUNK, form == "q8") for form in FORMATS),
]


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    return CudaWorkbench(tmp_path_factory.mktemp("linear") / "device.so")


@pytest.mark.slow(
    "compiles a kernel per case; f16, q4 and one size of the others are fast",
    but=("f16-70x45-", "f16-5x4133-", "q4-33x96-", "q4-70x45-r67", "q8-33x96-", "q6-33x96-", "q4m-33x96-"),
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1][0]}x{case[1][1]}-r{case[2]}")
def test_products_are_those_of_float64(workbench: CudaWorkbench, case: tuple[str, tuple[int, int], int, bool]) -> None:
    format_name, (n, k), rows, has_bias = case
    rng = np.random.default_rng(n + k + rows)
    data, weights = packed(rng, format_name, n, k)
    # In a chunk the last tile of tokens is begun, and rows past the tokens hold what must not be read.
    tokens = max(1, rows - 2)
    x, bias = uniform(rng, tokens, k), uniform(rng, n)
    inputs = {"x": x, "w": data} | ({"bias": bias} if has_bias else {})
    found = workbench.run(_kernel(*case), inputs, tokens=tokens)["y"]
    expected = x.astype(np.float64) @ weights.T if rows == 1 else in_halves(x) @ weights_in_halves(weights).T
    expected += bias if has_bias else 0
    # Sums of up to 4133 products in float32.
    assert_close(found[:tokens], expected, 1e-5)
    assert np.isnan(found[tokens:]).all()


def test_a_chunk_of_few_tokens_writes_no_others(workbench: CudaWorkbench) -> None:
    """The second tile of tokens has none: its blocks end at once."""
    case = ("f16", SIZES[0], CHUNK, False)
    rng = np.random.default_rng(3)
    data, weights = packed(rng, "f16", *SIZES[0])
    x = uniform(rng, 3, SIZES[0][1])
    found = workbench.run(_kernel(*case), {"x": x, "w": data}, tokens=3)["y"]
    assert_close(found[:3], in_halves(x) @ weights_in_halves(weights).T, 1e-5)
    assert np.isnan(found[3:]).all()


@pytest.mark.parametrize("sm", [75, 80])
@pytest.mark.parametrize("format_name", FORMATS)
def test_large_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, format_name: str, sm: int) -> None:
    """Several tiles of tokens and of rows, the last of both begun; activations of any size."""
    monkeypatch.setattr(mma, "_ENOUGH_BLOCKS", 1)
    n, k, tokens, rng = 150, 100, 131, np.random.default_rng(5)
    kernel = _kernel(format_name, (n, k), tokens + 2, True)
    data, weights = packed(rng, format_name, n, k)
    x, bias = uniform(rng, tokens, k) * np.exp2(rng.uniform(-120, 120, (tokens, 1))).astype(np.float32), uniform(rng, n)
    x[7] = 0
    workbench = CudaWorkbench(tmp_path / "device.so", [kernel], sm)
    found = workbench.run(kernel, {"x": x, "w": data, "bias": bias}, tokens=tokens)["y"]
    # Rows are compared one by one: their sizes are far apart.
    for row, token in zip(found, in_halves(x), strict=False):
        assert_close(row, weights_in_halves(weights) @ token + bias, 1e-5)
    assert np.isnan(found[tokens:]).all()


def test_what_is_not_finite_shows_in_its_own_row(workbench: CudaWorkbench) -> None:
    rng, (n, k) = np.random.default_rng(6), SIZES[0]
    data, weights = packed(rng, "q4", n, k)
    x = uniform(rng, 3, k)
    x[0, 3], x[1, 4] = np.nan, np.inf
    found = workbench.run(_kernel("q4", SIZES[0], CHUNK, False), {"x": x, "w": data}, tokens=3)["y"]
    assert np.isnan(found[0]).all()
    assert not np.isfinite(found[1]).any()
    assert_close(found[2:3], in_halves(x[2:]) @ weights_in_halves(weights).T, 1e-5)
