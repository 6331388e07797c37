"""`elementwise`: every function, every kind of input, and the ends of float32, against float64."""

import numpy as np
import pytest
import torch

from helpers.kernels.expression_cases import MIXED, OF_FUNCTIONS, assert_each_close, case
from helpers.kernels.workbench import Workbench
from picompile_codegen import cpu
from picompile_codegen.specs import ElementwiseSpec
from picompile_passes.dialect.expressions import FUNCTIONS, evaluate_expression

CHUNK = 5
# Columns, rows, and how many of the rows count.
SIZES = [(99, 1, 1), (99, CHUNK, CHUNK), (96, CHUNK, 3), (5, CHUNK, 3), (1, CHUNK, CHUNK)]
# One row of these numbers, which are where functions end, jump or leave the range of float32.
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, 6.0, 88.0, -87.0, 95.0, 300.0, 1e-30, 1e30, -1e30)
ONE_INPUT = [name for name, (count, _) in FUNCTIONS.items() if count == 1]


def of_function(name: str) -> ElementwiseSpec:
    return ElementwiseSpec(dim=len(EDGES), rows=CHUNK, inputs="r" * FUNCTIONS[name][0], expression=OF_FUNCTIONS[name])


def mixed(kinds: str, dim: int, rows: int) -> ElementwiseSpec:
    return ElementwiseSpec(dim=dim, rows=rows, inputs=kinds, expression=MIXED[kinds])


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    specs = [mixed(kinds, dim, rows) for kinds in MIXED for dim, rows, _ in SIZES]
    specs += [of_function(name) for name in FUNCTIONS]
    return Workbench(tmp_path_factory.mktemp("expressions") / "host.so", [cpu.write_kernel(spec) for spec in specs])


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize(("dim", "rows", "tokens"), SIZES)
def test_kinds_of_inputs(workbench: Workbench, kinds: str, dim: int, rows: int, tokens: int) -> None:
    spec = mixed(kinds, dim, rows)
    inputs, expected = case(spec, tokens)
    result = workbench.run(cpu.write_kernel(spec), inputs, tokens=tokens)["y"]
    assert_each_close(result[:tokens], expected)
    assert np.isnan(result[tokens:]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(workbench: Workbench, name: str) -> None:
    spec = of_function(name)
    inputs, expected = case(spec, CHUNK)
    assert_each_close(workbench.run(cpu.write_kernel(spec), inputs, tokens=CHUNK)["y"], expected)


@pytest.mark.parametrize("name", ONE_INPUT)
def test_ends_of_float32(workbench: Workbench, name: str) -> None:
    """The largest number may stand for an infinite one: the exponential ends there."""
    x = np.array([EDGES], np.float32)
    x = np.abs(x) if name == "sqrt" else x
    spec = of_function(name)
    measured = workbench.run(cpu.write_kernel(spec), {"x0": x})["y"][:1]
    expected = evaluate_expression(spec.expression, [torch.from_numpy(x).double()]).numpy()
    finite = np.abs(expected) <= np.finfo(np.float32).max
    assert (measured[~finite] >= 3.4e38).all()
    assert (np.abs(measured - expected)[finite] <= 1e-6 * np.maximum(np.abs(expected), 1.0)[finite]).all()


@pytest.mark.parametrize("kinds", MIXED)
def test_threads_change_no_bit(workbench: Workbench, kinds: str) -> None:
    spec = mixed(kinds, 99, CHUNK)
    inputs, _ = case(spec, CHUNK)
    one, three = (
        workbench.run(cpu.write_kernel(spec), inputs, tokens=CHUNK, threads=threads)["y"] for threads in (1, 3)
    )
    assert np.array_equal(one, three)
