"""`elementwise` on a GPU: every function and every kind of input, against float64."""

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.expression_cases import MIXED, OF_FUNCTIONS, assert_each_close, case
from picompile_codegen import cuda
from picompile_codegen.specs import ElementwiseSpec
from picompile_passes.dialect.expressions import FUNCTIONS

CHUNK = 5
# Columns, rows, and how many count: no multiple of four, a part of a block, one column, several blocks with a rest.
SIZES = [(99, 1, 1), (99, CHUNK, 3), (96, CHUNK, CHUNK), (1, CHUNK, CHUNK), (700, CHUNK, 3)]


def of_function(name: str) -> ElementwiseSpec:
    return ElementwiseSpec(dim=99, rows=CHUNK, inputs="r" * FUNCTIONS[name][0], expression=OF_FUNCTIONS[name])


def mixed(kinds: str, dim: int, rows: int) -> ElementwiseSpec:
    return ElementwiseSpec(dim=dim, rows=rows, inputs=kinds, expression=MIXED[kinds])


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    specs = [mixed(kinds, dim, rows) for kinds in MIXED for dim, rows, _ in SIZES]
    specs += [of_function(name) for name in FUNCTIONS]
    kernels = [cuda.write_kernel(spec) for spec in specs]
    return CudaWorkbench(tmp_path_factory.mktemp("expressions") / "device.so", kernels)


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize(("dim", "rows", "tokens"), SIZES)
def test_kinds_of_inputs(workbench: CudaWorkbench, kinds: str, dim: int, rows: int, tokens: int) -> None:
    spec = mixed(kinds, dim, rows)
    inputs, expected = case(spec, tokens)
    result = workbench.run(cuda.write_kernel(spec), inputs, tokens=tokens)["y"]
    assert_each_close(result[:tokens], expected)
    assert np.isnan(result[tokens:]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(workbench: CudaWorkbench, name: str) -> None:
    spec = of_function(name)
    inputs, expected = case(spec, CHUNK)
    assert_each_close(workbench.run(cuda.write_kernel(spec), inputs, tokens=CHUNK)["y"], expected)
