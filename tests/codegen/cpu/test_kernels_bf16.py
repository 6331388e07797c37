"""Prompts in bfloat16 against products in float64 of inputs and weights that are rounded to it."""

import numpy as np
import pytest
import test_kernels_ffn as ffn
import test_kernels_linear as linear
import torch
from numpy.typing import NDArray

from helpers.kernels.workbench import Workbench, assert_close, packed, uniform
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.cpu.kernel import Kernel
from picompile_runtime.devices.machine import is_machine, missing_features

ISA = next(isa for isa in ISAS.values() if isa.prompts_in_bf16)
# Neither a multiple of a vector, a group or a block; one column; many slices and blocks.
SHAPES = ((251, 72), (10, 100), (3, 1), (1009, 1100))
# None is a whole tile of tokens, a panel and one token, and several panels.
TOKENS = (1, 7, 8, 9, linear.CHUNK)
BLOCKS = ("reglu", "opt", "normed")


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    if not is_machine(ISA.machine) or missing_features(ISA.features):
        pytest.skip(f"needs a processor with {', '.join(missing_features(ISA.features))}")
    return Workbench(tmp_path_factory.mktemp("bf16") / "host.so", isa=ISA)


def kernel_of(shape: tuple[int, int]) -> Kernel:
    with targeting(ISA):
        return linear.linear("f16", shape, linear.CHUNK)


def rounded(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return values that are rounded to bfloat16, as PyTorch rounds."""
    return torch.from_numpy(np.asarray(values, np.float32)).bfloat16().double().numpy()


@pytest.mark.slow("compiles a kernel per size; one size is fast", but=("(251, 72)",))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(workbench: Workbench, shape: tuple[int, int]) -> None:
    kernel = kernel_of(shape)
    for tokens in TOKENS:
        rng = np.random.default_rng([*shape, tokens])
        data, weights = packed(rng, "f16", *shape)
        x, bias = uniform(rng, tokens, shape[1]), uniform(rng, shape[0])
        inputs = {"x": x, "w": data, "bias": bias}
        results = [workbench.run(kernel, inputs, tokens=tokens, threads=threads)["y"] for threads in (1, 2, 3)]
        expected = rounded(x) @ rounded(weights).T + (bias if "bias" in kernel.params else 0)
        assert_close(results[0][:tokens], expected)
        assert len({result.tobytes() for result in results}) == 1


@pytest.mark.slow("compiles a kernel per case; one product is fast")
def test_a_token_has_the_bits_that_it_has_alone(workbench: Workbench) -> None:
    """Whichever other tokens are in the chunk, and wherever it is cut. What is no finite number shows in its row."""
    kernel, shape, rng = kernel_of(SHAPES[0]), SHAPES[0], np.random.default_rng(5)
    data, _ = packed(rng, "f16", *shape)
    x, others = uniform(rng, linear.CHUNK, shape[1]), {"w": data, "bias": uniform(rng, shape[0])}
    x[[3, 4, 5], 70] = np.nan, np.inf, -np.inf
    together = workbench.run(kernel, {"x": x, **others}, tokens=linear.CHUNK)["y"]
    for i, row in enumerate(x):
        assert workbench.run(kernel, {"x": row[None], **others})["y"][0].tobytes() == together[i].tobytes()
        assert not np.isfinite(together[i]).any() if i in (3, 4, 5) else np.isfinite(together[i]).all()


@pytest.mark.slow("compiles a kernel per case; one product is fast")
@pytest.mark.parametrize("name", BLOCKS)
def test_block(workbench: Workbench, name: str) -> None:
    """Eight bits are left of each number, and the errors of many average out."""
    with targeting(ISA):
        kernel = ffn.kernel_of(name, "dense", "f16", ffn.CHUNK)
    for tokens in (1, ffn.CHUNK):
        example = ffn.Example(ffn.BLOCKS[name], "dense", "f16", tokens, seed=tokens)
        results = [workbench.run(kernel, example.inputs, tokens=tokens, threads=n)["y"][:tokens] for n in (1, 3)]
        dim = example.output().shape[1]
        assert_close(results[0][:, :dim], example.output(), 2**-7)
        assert results[0].tobytes() == results[1].tobytes()
