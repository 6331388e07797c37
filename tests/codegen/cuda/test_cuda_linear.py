"""Linear layers on a GPU against float64: one token and chunks, odd sizes."""

from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import in_halves, weights_in_halves
from helpers.kernels.workbench import Array, assert_close, assert_rows, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile_codegen import cuda
from picompile_codegen.cuda import mma
from picompile_codegen.specs import LinearSpec

CHUNK = 67
SLOW = "compiles a kernel per case"
# Large tiles read each format at once, and predictors row by row, in fast tests.
OTHERS = [form for form in ROW_FORMATS if form not in ("f16", "q4")]
FEW = ("f16", "q4", *(pytest.param(form, marks=pytest.mark.slow("like q4")) for form in OTHERS))
SMALL = (70, 45)
Size = tuple[int, int]


def product_in_halves(x: Array, weights: Array) -> Array:
    return in_halves(x) @ weights_in_halves(weights).T


# The last size has more columns than shared memory takes at a time.
@sampled(
    slow=SLOW,
    form=FEW,
    size=(SMALL, (33, 96), (5, 4133)),
    rows=(1, CHUNK),
    bias=(False, True),
    when=lambda form, size, rows, bias: rows == 1 or size[1] < 4000,
)
def test_products_are_those_of_float64(workbench: CudaWorkbench, form: str, size: Size, rows: int, bias: bool) -> None:
    (n, k), rng = size, np.random.default_rng([*size, rows])
    data, weights = packed(rng, form, n, k)
    added = uniform(rng, n)
    kernel = cuda.write_kernel(LinearSpec(format=form, n=n, k=k, rows=rows, bias=bias))
    # In a chunk a tile of tokens is begun, or none of the last one counts. Rows past the tokens must not be read.
    for tokens in (1,) if rows == 1 else (rows - 2, 3):
        x = uniform(rng, tokens, k)
        found = workbench.run(kernel, {"x": x, "w": data, "bias": added}, tokens=tokens)["y"]
        expected = x.astype(np.float64) @ weights.T if rows == 1 else product_in_halves(x, weights)
        # Sums of up to 4133 products in float32.
        assert_rows(found, expected + (added if bias else 0), 1e-5)


@pytest.mark.slow(SLOW, but=("80-q4]",))
@pytest.mark.parametrize("form", ROW_FORMATS)
@pytest.mark.parametrize("sm", [75, 80])
def test_large_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, sm: int) -> None:
    """Several tiles of tokens and of rows, the last of both begun; activations of any size."""
    monkeypatch.setattr(mma, "_ENOUGH_BLOCKS", 1)
    n, k, tokens, rng = 150, 68, 131, np.random.default_rng(5)
    data, weights = packed(rng, form, n, k)
    x, bias = uniform(rng, tokens, k) * np.exp2(rng.uniform(-120, 120, (tokens, 1))).astype(np.float32), uniform(rng, n)
    x[7] = 0
    spec = LinearSpec(format=form, n=n, k=k, rows=tokens + 2, bias=True)
    found = CudaWorkbench(tmp_path, sm).run(spec, {"x": x, "w": data, "bias": bias}, tokens=tokens)["y"]
    # Rows are compared one by one: their sizes are far apart.
    for row, expected in zip(found, product_in_halves(x, weights) + bias, strict=False):
        assert_close(row, expected, 1e-5)
    assert np.isnan(found[tokens:]).all()


def test_what_is_not_finite_shows_in_its_own_row(workbench: CudaWorkbench) -> None:
    rng, (n, k) = np.random.default_rng(6), SMALL
    data, weights = packed(rng, "q4", n, k)
    x = uniform(rng, 3, k)
    x[0, 3], x[1, 4] = np.nan, np.inf
    spec = LinearSpec(format="q4", n=n, k=k, rows=CHUNK, bias=False)
    found = workbench.run(spec, {"x": x, "w": data}, tokens=3)["y"]
    assert np.isnan(found[0]).all()
    assert not np.isfinite(found[1]).any()
    assert_rows(found[2:], product_in_halves(x[2:], weights), 1e-5)
