"""Kernels that do the work of several: projections with additions and norms, and sums of what a block makes."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import Array, Inputs, assert_close, packed, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda.build import compile_cuda, function_resources
from picompile_codegen.specs import LayerNormSpec, LinearAddSpec, LinearSpec, Norm, RmsNormSpec, SumNormSpec

EPS = 1e-5
FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# Outputs and columns: less than a block's rows, more and no multiple of four, more columns than a block holds.
SIZES = ((12, 45), (1100, 96), (131, 4133))
NORMS = ("none", "rms", "layer", "bare")
# Less than a warp, several warps with and without a rest, and more than a block has threads for.
DIMS = (5, 96, 131, 4228)
CHUNK, STEP = 5, 7
ROWS = [(1, 1), (CHUNK, CHUNK), (CHUNK, 3)]
RECEIVED = ("here", "received", "counted", "nothing")


def norm_of(name: str, dim: int, rows: int) -> Norm | None:
    if name in ("none", "rms"):
        return RmsNormSpec(dim, rows, EPS) if name == "rms" else None
    return LayerNormSpec(dim, rows, EPS, weight=name == "layer", bias=name == "layer")


def linear_add(form: str, size: tuple[int, int], bias: bool, norm: str) -> cuda.CudaKernel:
    linear = LinearSpec(format=form, n=size[0], k=size[1], rows=1, bias=bias)
    return cuda.write_kernel(LinearAddSpec(linear, norm_of(norm, size[0], 1)))


def sum_norm(dim: int, rows: int, terms: int, received: str, norm: str) -> cuda.CudaKernel:
    is_received, is_counted = received != "here", received in ("counted", "nothing")
    return cuda.write_kernel(SumNormSpec(dim, rows, terms, norm_of(norm, dim, rows), is_received, is_counted))


def normed(y: NDArray[np.float64], norm: str, inputs: Inputs) -> NDArray[np.float64]:
    centered = y if norm == "rms" else y - y.mean(-1, keepdims=True)
    found = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPS)
    found = found if norm == "bare" else found * inputs["norm_weight"]
    return found + inputs["norm_bias"] if norm == "layer" else found


def vectors(rng: np.random.Generator, dim: int) -> dict[str, Array]:
    return {"norm_weight": uniform(rng, dim), "norm_bias": uniform(rng, dim)}


LINEARS = [(form, SIZES[1], form == "q8", "rms") for form in FORMATS]
LINEARS += [("q4", size, size is SIZES[2], norm) for size, norm in product(SIZES, NORMS)]


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    kernels = {kernel.name: kernel for kernel in (linear_add(*case) for case in LINEARS)}
    sums = (sum_norm(dim, rows, 3, received, "rms") for dim, rows, received in product(DIMS, (1, CHUNK), RECEIVED))
    kernels |= {kernel.name: kernel for kernel in sums}
    return CudaWorkbench(tmp_path_factory.mktemp("fused") / "device.so", kernels.values())


@pytest.mark.parametrize("case", LINEARS, ids=lambda case: f"{case[0]}-{case[1][0]}x{case[1][1]}-{case[3]}")
def test_linear_add(workbench: CudaWorkbench, case: tuple[str, tuple[int, int], bool, str]) -> None:
    form, (n, k), bias, norm = case
    rng = np.random.default_rng([n, k])
    data, weights = packed(rng, form, n, k)
    # Far from zero: a variance as mean of squares less square of mean would be wrong in the third digit.
    inputs = {"x": uniform(rng, 1, k), "added": uniform(rng, 1, n) + 30, "bias": uniform(rng, n), **vectors(rng, n)}
    found = workbench.run(linear_add(*case), {**inputs, "w": data})
    expected = inputs["added"] + inputs["x"].astype(np.float64) @ weights.T + (inputs["bias"] if bias else 0)
    assert_close(found["y"], expected, 1e-5)
    if norm != "none":
        # The mean is rounded to 2e-6, and deviations from it are about 1.
        assert_close(found["normed"], normed(expected, norm, inputs), 2e-5)


def norm_of_last_block(form: str, size: tuple[int, int], norm: str) -> str:
    """The CUDA source of what the last block of a projection does."""
    return cuda.cuda_source([linear_add(form, size, False, norm)]).text.rpartition("pi_is_last")[2]


# Each pass over 8,192 columns has 8 runs of a thread: sums have a turn for each, and results one for 2 to 8 of them.
@pytest.mark.parametrize(
    ("form", "norm", "turns"),
    [("q4", "rms", 8 + 2), ("q8", "layer", 8 + 8 + 4), ("q8", "bare", 8 + 8 + 1), ("q4", "layer", 8 + 8 + 8)],
)
def test_a_norm_waits_for_memory_once_in_a_turn(form: str, norm: str, turns: int) -> None:
    assert norm_of_last_block(form, (8192, 8192), norm).count("pi_loads_first()") == turns


def test_norms_behind_projections_do_not_spill() -> None:
    """Formats and sizes with few registers to spare. tests/cuda_matrix.py compiles many more."""
    cases = [("q4", (5120, 5120), "layer"), ("q4", (8192, 8192), "rms"), ("f16", (8192, 8192), "layer")]
    source = cuda.cuda_source([linear_add(form, size, False, norm) for form, size, norm in cases])
    found = function_resources(compile_cuda(source.text, 90)[0])
    assert len(found) == len(cases)
    assert [each.local_bytes for each in found.values()] == [0] * len(cases)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("received", RECEIVED)
def test_sum_norm(workbench: CudaWorkbench, dim: int, rows: int, tokens: int, received: str) -> None:
    """The flag of a host that has nothing to do is not set, and the memory that it shares is NaN."""
    rng = np.random.default_rng([dim, tokens])
    terms = [uniform(rng, tokens, dim) for _ in range(3)]
    inputs = {f"x{number}": term for number, term in enumerate(terms)} | vectors(rng, dim)
    if received != "here":
        del inputs["x2"]
        is_there = received != "nothing"
        inputs |= {"flag": np.array([STEP - (not is_there)], np.int32), "abandoned": np.zeros(1, np.int32)}
        inputs |= {"source": terms[2]} if is_there else {}
        inputs["count"] = np.array([is_there], np.int32)
        terms = terms[: 2 + is_there]
    step = np.array([tokens, -1, -1, STEP, -1, -1, -1, -1], np.int32)
    found = workbench.run(sum_norm(dim, rows, 3, received, "rms"), {**inputs, "step": step}, tokens=tokens)
    expected = sum(term.astype(np.float64) for term in terms)
    assert_close(found["y"][:tokens], expected, 1e-6)
    assert_close(found["normed"][:tokens], normed(expected, "rms", inputs), 2e-6)
    assert np.isnan(found["y"][tokens:]).all() and np.isnan(found["normed"][tokens:]).all()


@pytest.mark.parametrize("terms", [2, 4])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("received", ["here", "received"])
def test_terms_and_norms(workbench: CudaWorkbench, terms: int, norm: str, received: str) -> None:
    dim, rng = 96, np.random.default_rng(terms)
    values = [uniform(rng, CHUNK, dim) for _ in range(terms)]
    inputs = {f"x{number}": value for number, value in enumerate(values)} | vectors(rng, dim)
    if received != "here":
        inputs |= {"source": inputs.pop(f"x{terms - 1}"), "abandoned": np.zeros(1, np.int32)}
        inputs["flag"] = np.array([STEP], np.int32)
    step = np.array([CHUNK, -1, -1, STEP, -1, -1, -1, -1], np.int32)
    found = workbench.run(sum_norm(dim, CHUNK, terms, received, norm), {**inputs, "step": step})
    expected = sum(value.astype(np.float64) for value in values)
    assert_close(found["y"], expected, 1e-6)
    if norm != "none":
        assert_close(found["normed"], normed(expected, norm, inputs), 2e-6)


def test_infinity_and_nan_stay(workbench: CudaWorkbench) -> None:
    """NaN stays in its place of the sum, and makes the whole norm NaN."""
    case = ("q4", SIZES[1], False, "rms")
    rng = np.random.default_rng(1)
    data, _ = packed(rng, "q4", *SIZES[1])
    inputs = {"x": uniform(rng, 1, SIZES[1][1]), "added": uniform(rng, 1, SIZES[1][0]), **vectors(rng, SIZES[1][0])}
    inputs["added"][0, 3] = np.nan
    found = workbench.run(linear_add(*case), {**inputs, "w": data})
    assert np.isnan(found["y"][0, 3]) and np.isfinite(np.delete(found["y"][0], 3)).all()
    assert np.isnan(found["normed"]).all()
