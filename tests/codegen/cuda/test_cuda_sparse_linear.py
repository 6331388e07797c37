"""Projections that leave out small inputs on a GPU, against products of the inputs that are left, in float64."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from test_kernels_sparse_linear import FORMATS, Example

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import in_halves, weights_in_halves
from helpers.kernels.workbench import Array, Inputs, assert_close
from picompile_codegen import cuda
from picompile_codegen.specs import SparseLinearSpec

# (n, k): rows of several tiles and inputs of several slices; the last slice has few.
SIZES = ((70, 45), (1100, 301))
CHUNK = 67
SEQUENCES = 3

# format, size, rows, rowwise
CASES = [
    *((form, size, 1, False) for form, size in product(FORMATS, SIZES)),
    *((form, SIZES[1], SEQUENCES, True) for form in ("f16", "q4")),
    *((form, SIZES[0], CHUNK, False) for form in FORMATS),
    ("q8", (40, 600), CHUNK, False),
]
Case = tuple[str, tuple[int, int], int, bool]


def _kernel(format_name: str, size: tuple[int, int], rows: int, rowwise: bool) -> cuda.CudaKernel:
    n, k = size
    # Half of the sizes with a bias.
    bias = n == 70
    return cuda.write_kernel(SparseLinearSpec(format=format_name, n=n, k=k, rows=rows, bias=bias, rowwise=rowwise))


class Workbenches:
    """A workbench for each kernel, made when it is first asked for: most cases are slow tests."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, dict[str, CudaWorkbench]()

    def run(self, kernel: cuda.CudaKernel, inputs: Inputs, tokens: int) -> dict[str, Array]:
        if kernel.name not in self._made:
            self._made[kernel.name] = CudaWorkbench(self._folder / f"{kernel.name}.so", [kernel])
        return self._made[kernel.name].run(kernel, inputs, tokens=tokens)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbenches:
    return Workbenches(tmp_path_factory.mktemp("cuda-sparse-linear"))


@pytest.mark.slow(
    "compiles a kernel per case; one way through each is fast", but=("0.4-q4-1100x301-each3", "0.4-f16-70x45-r67")
)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]}-{case[1][0]}x{case[1][1]}-{'each' if case[3] else 'r'}{case[2]}"
)
@pytest.mark.parametrize("limit", [0.4, 0.0, 1e9])
def test_products_are_those_of_float64(workbench: Workbenches, case: Case, limit: float) -> None:
    format_name, size, rows, rowwise = case
    # In a chunk the last tile of tokens is begun, and rows past the tokens hold what must not be read.
    tokens = max(1, rows - 1 if rowwise else rows - 2)
    example, kernel = Example(format_name, size, tokens, limit), _kernel(*case)
    example.inputs["x"][0, 3] = 0.0
    found = workbench.run(kernel, example.inputs, tokens=tokens)
    if limit > 1:
        assert (found["y"][:tokens] == (example.inputs["bias"] if "bias" in kernel.params else 0)).all()
    else:
        expected = example.expected(kernel)
        if rows == CHUNK:
            expected += in_halves(example.kept) @ weights_in_halves(example.weights) - example.kept @ example.weights
        assert_close(found["y"][:tokens], expected, 1e-5)
    assert np.isnan(found["y"][tokens:]).all()
    reads_some = rows == 1 or rowwise
    read = int((np.abs(example.inputs["x"]) > example.inputs["limits"]).sum()) if reads_some else 0
    assert found["stats"].tolist() == [1000 + read, 2000 + read]


@pytest.mark.slow("compiles a kernel per case; one way through each is fast")
@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=["one", "chunk"])
def test_what_is_no_number_shows_in_its_own_row(workbench: Workbenches, case: Case) -> None:
    tokens = max(1, case[2] - 2)
    example = Example(*case[:2], tokens)
    example.inputs["x"][0, 17] = np.nan
    example.inputs["limits"][17] = np.inf
    y = workbench.run(_kernel(*case), example.inputs, tokens=tokens)["y"][:tokens]
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1:]).all()
