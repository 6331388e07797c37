"""Norms on a GPU against float64, behind projections and behind sums of what a block makes."""

from collections.abc import Mapping

import numpy as np
import pytest
import test_kernels_by_token as norms
from numpy.typing import NDArray

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import Array, assert_rows, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile_codegen import cuda
from picompile_codegen.cuda.build import compile_cuda, cuda_source, function_resources
from picompile_codegen.specs import LinearAddSpec, LinearSpec, Norm, SumNormSpec

OTHERS = [form for form in ROW_FORMATS if form not in ("f16", "q4")]
FORMATS = ("f16", "q4", *(pytest.param(form, marks=pytest.mark.slow("like q4")) for form in OTHERS))
NORMS = ("none", "rms", "layer", "bare")
# Less than a warp, several warps with and without a rest, and more than a block has threads for.
DIMS = (5, 96, 131, 4228)
# Outputs and columns: less than a block's rows, more and no multiple of four, more columns than a block holds.
SIZES = ((12, 45), (1100, 96), (131, 4133))
# Rows, and how many of them count.
ROWS = ((1, 1), (5, 5), (5, 3))
STEP = 7
SLOW = "compiles a kernel per case"


def norm_of(name: str, dim: int, rows: int = 1) -> Norm | None:
    return None if name == "none" else norms.norm_of(name, dim, rows)


def linear_add(form: str, size: tuple[int, int], norm: str, bias: bool = False) -> LinearAddSpec:
    linear = LinearSpec(format=form, n=size[0], k=size[1], rows=1, bias=bias)
    return LinearAddSpec(linear, norm_of(norm, size[0]))


def inputs_of(form: str, size: tuple[int, int]) -> tuple[dict[str, Array], NDArray[np.float64]]:
    """Return random inputs of a projection, and its weights. What is added is far from zero."""
    n, k = size
    rng = np.random.default_rng([n, k])
    data, weights = packed(rng, form, n, k)
    vectors = {name: uniform(rng, n) for name in ("bias", "norm_weight", "norm_bias")}
    return {"x": uniform(rng, 1, k), "added": uniform(rng, 1, n) + 30, "w": data, **vectors}, weights


def assert_normed(found: Mapping[str, Array], expected: Array, norm: str, inputs: Mapping[str, Array]) -> None:
    """Check the norm of a sum, whose deviations from the mean are about 1, where there is one."""
    if norm != "none":
        wanted = norms.normed(expected, norm, inputs["norm_weight"], inputs["norm_bias"])
        assert_rows(found["normed"], wanted, 2e-5 if "added" in inputs else 2e-6)


@sampled(slow=SLOW, form=FORMATS, size=SIZES, norm=NORMS, bias=(False, True))
def test_linear_add(workbench: CudaWorkbench, form: str, size: tuple[int, int], norm: str, bias: bool) -> None:
    inputs, weights = inputs_of(form, size)
    found = workbench.run(linear_add(form, size, norm, bias), inputs)
    expected = inputs["added"] + inputs["x"].astype(np.float64) @ weights.T + (inputs["bias"] if bias else 0)
    assert_rows(found["y"], expected, 1e-5)
    assert_normed(found, expected, norm, inputs)


def test_nan_stays(workbench: CudaWorkbench) -> None:
    """It stays in its place of the sum, and makes the whole norm NaN."""
    inputs, _ = inputs_of("q4", SIZES[0])
    inputs["added"][0, 3] = np.nan
    found = workbench.run(linear_add("q4", SIZES[0], "rms"), inputs)
    assert np.isnan(found["y"][0, 3]) and np.isfinite(np.delete(found["y"][0], 3)).all()
    assert np.isnan(found["normed"]).all()


# Each pass over 8,192 columns has 8 runs of a thread: sums have a turn for each, and results one for 2 to 8 of them.
@pytest.mark.parametrize(
    ("form", "norm", "turns"),
    [("q4", "rms", 8 + 2), ("q8", "layer", 8 + 8 + 4), ("q8", "bare", 8 + 8 + 1), ("q4", "layer", 8 + 8 + 8)],
)
def test_a_norm_waits_for_memory_once_in_a_turn(form: str, norm: str, turns: int) -> None:
    text = cuda_source([cuda.write_kernel(linear_add(form, (8192, 8192), norm))]).text
    of_last_block = text.rpartition("pi_is_last")[2]
    assert of_last_block.count("pi_loads_first()") == turns


@pytest.mark.slow("compiles for each GPU")
def test_norms_behind_projections_do_not_spill() -> None:
    """Formats and sizes with few registers to spare. tests/cuda_matrix.py compiles many more."""
    cases = [("q4", (5120, 5120), "layer"), ("q4", (8192, 8192), "rms"), ("f16", (8192, 8192), "layer")]
    source = cuda_source([cuda.write_kernel(linear_add(*case)) for case in cases])
    found = function_resources(compile_cuda(source.text, 90)[0])
    assert [each.local_bytes for each in found.values()] == [0] * len(cases)


@sampled(
    slow=SLOW,
    dim=DIMS,
    counts=ROWS,
    terms=(2, 3, 4),
    norm=NORMS,
    received=("here", "received", "counted", "nothing"),
)
def test_sums_and_norms(
    workbench: CudaWorkbench, dim: int, counts: tuple[int, int], terms: int, norm: str, received: str
) -> None:
    """The flag of a host that has nothing to do is not set, and the memory that it shares is NaN."""
    (rows, tokens), rng = counts, np.random.default_rng([dim, terms])
    values = [uniform(rng, tokens, dim) for _ in range(terms)]
    inputs = {"norm_weight": uniform(rng, dim), "norm_bias": uniform(rng, dim)}
    inputs |= {f"x{number}": value for number, value in enumerate(values)}
    inputs["step"] = np.array([tokens, -1, -1, STEP, -1, -1, -1, -1], np.int32)
    if received != "here":
        is_there, last = received != "nothing", inputs.pop(f"x{terms - 1}")
        inputs |= {"flag": np.array([STEP - (not is_there)], np.int32), "abandoned": np.zeros(1, np.int32)}
        inputs |= {"source": last} if is_there else {}
        inputs["count"] = np.array([is_there], np.int32)
        values = values[: terms - 1 + is_there]
    is_counted = received in ("counted", "nothing")
    spec = SumNormSpec(dim, rows, terms, norm_of(norm, dim, rows), received != "here", is_counted)
    found = workbench.run(spec, inputs, tokens=tokens)
    expected = sum(value.astype(np.float64) for value in values)
    assert_rows(found["y"], expected, 1e-6)
    assert_normed(found, expected, norm, inputs)
