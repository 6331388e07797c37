"""Projections that leave out small inputs, against products of the inputs that are left, in float64."""

import numpy as np
import pytest

from helpers.kernels.workbench import Array, Workbench, assert_close, packed, uniform
from helpers.products import sampled
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.specs import SparseLinearSpec

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# (n, k): whole vectors and groups of inputs; rows of more than eight groups, and no multiple of anything.
SHAPES = ((72, 96), (331, 203))
CHUNK = 13
FEW = ("f16", "q4", *(pytest.param(form, marks=pytest.mark.slow("like q4")) for form in ("q8", "q6", "q4m")))


def sparse_linear(format_name: str, shape: tuple[int, int], rows: int, rowwise: bool = False) -> Kernel:
    # Half of the shapes with a bias.
    bias = shape[0] % 2 == 1
    n, k = shape
    return cpu.write_kernel(SparseLinearSpec(format=format_name, n=n, k=k, rows=rows, bias=bias, rowwise=rowwise))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("sparse_linear") / "host.so")


class Example:
    """Random inputs and weights; limits about `limit` leave out some inputs of every token."""

    def __init__(self, format_name: str, shape: tuple[int, int], tokens: int, limit: float = 0.4) -> None:
        n, k = shape
        rng = np.random.default_rng([n, k, tokens])
        self.format_name = format_name
        data, self.weights = packed(rng, format_name, k, n)
        limits = (limit * rng.uniform(0.5, 1.5, k)).astype(np.float32)
        self.inputs: dict[str, Array] = {"x": uniform(rng, tokens, k), "limits": limits, "w": data}
        self.inputs |= {"bias": uniform(rng, n), "stats": np.array([1000, 2000])}

    @property
    def kept(self) -> Array:
        x = self.inputs["x"]
        return np.where(np.abs(x) <= self.inputs["limits"], np.float32(0), x)

    def expected(self, kernel: Kernel) -> Array:
        return self.kept @ self.weights + (self.inputs["bias"] if "bias" in kernel.params else 0)


def tolerance(format_name: str) -> float:
    # Factors of a few rows are rounded to bytes together.
    return 2e-5 if format_name == "f16" else 0.02


def check(workbench: Workbench, kernel: Kernel, example: Example, tokens: int | None) -> None:
    count, step = (1, -1) if tokens is None else (tokens, tokens)
    results = [workbench.run(kernel, example.inputs, tokens=step, threads=threads) for threads in (1, 2, 3, 5)]
    assert len({result["y"].tobytes() for result in results}) == 1
    result = results[0]
    assert_close(result["y"][:count], example.expected(kernel), tolerance(example.format_name))
    read = int((np.abs(example.inputs["x"]) > example.inputs["limits"]).sum())
    counted = [1000 + read, 2000 + read] if "listed" in kernel.params else [1000, 2000]
    assert result["stats"].tolist() == counted


@sampled(form=FEW, shape=SHAPES, tokens=(None, 1, 2, CHUNK), slow="compiles a kernel per case")
def test_sparse_linear(workbench: Workbench, form: str, shape: tuple[int, int], tokens: int | None) -> None:
    """`tokens` None is the kernel of decode, which has one row and does not look at the step."""
    kernel = sparse_linear(form, shape, rows=1 if tokens is None else CHUNK)
    check(workbench, kernel, Example(form, shape, tokens or 1), tokens)


@pytest.mark.slow("compiles two kernels per case; one is fast", but=("(72, 96)-f16",))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_has_the_bits_that_it_has_alone(workbench: Workbench, form: str, shape: tuple[int, int]) -> None:
    example, one = Example(form, shape, CHUNK), sparse_linear(form, shape, rows=1)
    others = {name: value for name, value in example.inputs.items() if name != "x"}
    alone = [workbench.run(one, {"x": row[None], **others})["y"].tobytes() for row in example.inputs["x"]]
    kernel = sparse_linear(form, shape, CHUNK, rowwise=True)
    for tokens in (1, 2, 7, CHUNK):
        together = workbench.run(kernel, {"x": example.inputs["x"][:tokens], **others}, tokens=tokens)
        assert together["y"][:tokens].tobytes() == b"".join(alone[:tokens])
    check(workbench, kernel, example, CHUNK)


@pytest.mark.slow("compiles a kernel per case; one is fast", but=("f16-1]",))
@pytest.mark.parametrize("rows", [1, CHUNK])
@pytest.mark.parametrize("form", ["f16", "q4"])
def test_limits_that_leave_out_nothing_or_all(workbench: Workbench, form: str, rows: int) -> None:
    kernel = sparse_linear(form, SHAPES[-1], rows)
    for limit in (-1.0, 0.0, np.inf):
        example = Example(form, SHAPES[-1], rows)
        example.inputs["limits"][:] = limit
        example.inputs["x"][:, ::3] = 0.0
        if limit == np.inf:
            example.inputs["x"][:, 5] = np.inf
            result = workbench.run(kernel, example.inputs, tokens=rows)
            assert (result["y"][:rows] == example.inputs["bias"]).all()
            assert result["stats"].tolist() == [1000, 2000]
        else:
            check(workbench, kernel, example, rows)


@pytest.mark.slow("compiles a kernel per case; one is fast", but=("1-f16",))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, CHUNK])
def test_what_is_no_number_shows_in_its_own_row(workbench: Workbench, form: str, rows: int) -> None:
    kernel, example = sparse_linear(form, SHAPES[-1], rows), Example(form, SHAPES[-1], rows)
    example.inputs["x"][0, 101] = np.nan
    example.inputs["limits"][101] = np.inf
    y = workbench.run(kernel, example.inputs, tokens=rows)["y"][:rows]
    # The weights of an input may be zero in some groups, whose sums have no scale then.
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1:]).all()


@pytest.mark.slow("compiles a kernel per case; one way through each is fast")
def test_the_bytes_of_one_input_are_exact_products(workbench: Workbench) -> None:
    """A single input per four rows is rounded to 127 steps of itself: its products are the weights' own."""
    kernel, example = sparse_linear("q4", SHAPES[-1], 1), Example("q4", SHAPES[-1], 1)
    example.inputs["limits"][:] = np.inf
    example.inputs["limits"][7] = 0
    result = workbench.run(kernel, example.inputs)
    assert_close(result["y"], example.expected(kernel), 1e-5)
    assert result["stats"].tolist() == [1001, 2001]
