"""Feed-forward blocks on a GPU that leave out neurons below limits of their own, against the same block in float64."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from test_kernels_ffn import CHUNK, Block, spec_of
from test_kernels_ffn_limits import BLOCKS as CPU_BLOCKS
from test_kernels_ffn_limits import NAMES
from test_kernels_ffn_limits import Example as CpuExample

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import BlockInHalves
from helpers.kernels.workbench import assert_close
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel

BLOCKS = {
    **CPU_BLOCKS,
    # Enough neurons for chunks to be cut into slices of them.
    "sliced": Block(300, 72, gated=True, activation="silu", up_activation="relu", biases="d"),
}
# Every way through the kernels, every kind of limits, and every format.
CASES = [
    ("odd", "exact", "go", "f16", 1),
    ("swiglu", "exact", "g", "q4", 1),
    ("swiglu", "exact", "go", "q8", 1),
    ("fatrelu", "exact", "go", "f16", 1),
    ("fatrelu", "exact", "o", "q8", 1),
    ("gelu", "dense", "o", "f16", 1),
    ("gelu", "masked", "o", "q4", 1),
    ("odd", "dense", "o", "q8", 1),
    ("odd", "dense", "g", "f16", 1),
    ("odd", "masked", "go", "f16", 1),
    ("odd", "part", "go", "q8", 1),
    ("fatrelu", "masked", "g", "q4", 1),
    ("swiglu", "masked", "o", "f16", 1),
    ("odd", "exact", "go", "f16", CHUNK),
    ("sliced", "exact", "g", "q4", CHUNK),
    ("sliced", "dense", "go", "f16", CHUNK),
    ("fatrelu", "exact", "o", "q8", CHUNK),
    ("gelu", "dense", "o", "q4", CHUNK),
]
Case = tuple[str, str, str, str, int]


def kernel_of(name: str, kind: str, limits: str, format_name: str, rows: int) -> CudaKernel:
    spec = spec_of(BLOCKS[name], kind, format_name, rows)
    return cuda.write_kernel(replace(spec, gate_limits="g" in limits, output_limits="o" in limits))


class Example(BlockInHalves, CpuExample):
    """As on the CPU, but that activations are not rounded, or on tensor cores to halves."""

    def hidden(self) -> NDArray[np.float64]:
        return CpuExample.hidden(self)

    def assert_output(self, measured: NDArray[np.float32]) -> None:
        assert_close(measured[:, : self.block.dim], self.output(), self.tolerance)
        assert np.allclose(measured[:, self.block.dim :], self.squares(), rtol=1e-5, atol=0)


def example_of(case: Case, tokens: int, seed: int) -> Example:
    name, kind, limits, form, rows = case
    example = Example(BLOCKS[name], kind, limits, form, tokens, seed)
    example.on_tensor_cores = rows > 1 and kind in ("exact", "dense")
    return example


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    return CudaWorkbench(tmp_path_factory.mktemp("limits") / "device.so")


@pytest.mark.slow(
    "compiles a kernel per case; both lists and a chunk are fast",
    but=("('odd', 'exact', 'go', 'f16', ", "('odd', 'masked', 'go', 'f16', 1)"),
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_limits(workbench: CudaWorkbench, case: Case) -> None:
    kernel, rows = kernel_of(*case), case[4]
    for tokens in (1,) if rows == 1 else (2, CHUNK):
        example = example_of(case, tokens, seed=rows + tokens)
        assert 0.05 < example.above().mean() < 0.95
        result = workbench.run(kernel, example.inputs, tokens=tokens if rows > 1 else -1)
        example.assert_output(result["y"][:tokens])
        assert np.isnan(result["y"][tokens:]).all()
        assert result["stats"].tolist() == (example.counts() if rows == 1 else [1000, 2000])


@pytest.mark.slow("compiles a kernel per case; both lists and two kinds of rows are fast")
@pytest.mark.parametrize("case", [("odd", "masked", "go", "f16", CHUNK), ("gelu", "masked", "o", "q8", CHUNK)], ids=str)
def test_several_sequences(workbench: CudaWorkbench, case: Case) -> None:
    """A mask for each token."""
    kernel = kernel_of(*case)
    for tokens in (1, 4):
        example = example_of(case, tokens, seed=tokens)
        example.kept = np.random.default_rng(tokens).random((tokens, BLOCKS[case[0]].neurons)) < 0.6
        example.inputs["mask"] = example.kept.astype(np.uint8)
        result = workbench.run(kernel, example.inputs, tokens=tokens)
        example.assert_output(result["y"][:tokens])
        assert result["stats"].tolist() == example.counts()


OF_EDGES = [("odd", "exact", "go", "f16", 1), ("odd", "masked", "go", "f16", 1), ("odd", "exact", "go", "f16", CHUNK)]


@pytest.mark.parametrize("case", OF_EDGES, ids=str)
def test_limits_of_zero_and_infinite_ones(workbench: CudaWorkbench, case: Case) -> None:
    (name, _, limits, _, rows), kernel = case, kernel_of(*case)
    example = example_of(case, rows, seed=3)
    given = [NAMES[letter] for letter in limits]
    example.inputs |= {limit: np.zeros(BLOCKS[name].neurons, np.float32) for limit in given}
    example.assert_output(workbench.run(kernel, example.inputs, tokens=rows)["y"])
    for limit in given:
        infinite = np.full(BLOCKS[name].neurons, np.inf, np.float32)
        result = workbench.run(kernel, example.inputs | {limit: infinite}, tokens=rows)
        assert np.array_equal(result["y"], np.zeros_like(result["y"]) + example.biases["down_bias"])
        assert result["stats"][1] == 2000


@pytest.mark.parametrize("case", OF_EDGES, ids=str)
def test_only_a_neuron_above_the_limit_of_its_gate_may_overflow(workbench: CudaWorkbench, case: Case) -> None:
    """Below it a product with up that is infinite or not a number does not count; above it, it shows."""
    kernel, rows = kernel_of(*case), case[4]
    example = example_of(case, rows, seed=4)
    example.kept[5] = True
    if case[1] == "masked":
        example.inputs["mask"] = example.kept[None].astype(np.uint8)
    example.inputs["gate_limits"][5] = 1e9
    expected = workbench.run(kernel, example.inputs, tokens=rows)["y"]
    for value in (np.inf, np.nan):
        example.inputs["up_bias"][5] = value
        assert np.array_equal(workbench.run(kernel, example.inputs, tokens=rows)["y"], expected)
    example.inputs["gate_limits"][5] = 0
    assert np.isnan(workbench.run(kernel, example.inputs, tokens=rows)["y"]).all()
