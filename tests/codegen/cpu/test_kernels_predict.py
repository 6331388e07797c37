"""Predictors' masks against the same decision in float64, and the signs packed ahead of time."""

from itertools import product

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Array, Workbench, packed, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.signs import pack_signs, sign_row_bytes
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec
from picompile_passes.dialect import dequantize_rows, quantize_rows

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# (neurons, rank, dim): one of everything; odd sizes; a rank wider than a group; sizes that are worth several threads.
SHAPES = ((1, 1, 1), (77, 5, 72), (200, 40, 100), (1100, 96, 1100))
# What ReLU changes is the same in every format and shape.
CASES = [
    (*case, relu) for case in product(FORMATS, SHAPES) for relu in ((False, True) if case[1][0] == 77 else (False,))
]
BATCH = 7
# Less than a vector of bits, just one, one column more, and several blocks with a part of one.
SIGN_SHAPES = ((1, 1), (7, 13), (50, 256), (51, 257), (1500, 1100))


def second_format(format_name: str) -> str:
    """fc2 is stored in another format than fc1 where that is q8."""
    return "q4" if format_name == "q8" else format_name


def low_rank(format_name: str, shape: tuple[int, int, int], relu: bool, rows: int = 1) -> Kernel:
    neurons, rank, dim = shape
    return cpu.write_kernel(
        PredictLowRankSpec(
            formats=(format_name, second_format(format_name)), neurons=neurons, rank=rank, dim=dim, relu=relu, rows=rows
        )
    )


def signs(shape: tuple[int, int], rows: int = 1) -> Kernel:
    return cpu.write_kernel(
        PredictSignsSpec(neurons=shape[0], dim=shape[1], row_bytes=sign_row_bytes(shape[1]), rows=rows)
    )


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("predict") / "host.so")


class Learned:
    """A random predictor: what the kernel is given, and its logits without the bias in float64."""

    def __init__(self, format_name: str, shape: tuple[int, int, int], relu: bool) -> None:
        neurons, rank, dim = shape
        rng = np.random.default_rng([*shape, relu])
        fc1, first = packed(rng, format_name, rank, dim)
        fc2, second = packed(rng, second_format(format_name), neurons, rank)
        x = uniform(rng, 1, dim)
        hidden = x.astype(np.float64) @ first.T
        self.logits = ((np.maximum(hidden, 0) if relu else hidden) @ second.T)[0]
        self.inputs: dict[str, Array] = {"x": x, "fc1": fc1, "fc2": fc2}

    def with_bias(self, bias: Array, threshold: float) -> dict[str, Array]:
        return {**self.inputs, "bias": bias.astype(np.float32), "threshold": np.array([threshold], np.float32)}


def clear_threshold(logits: Array) -> float:
    """A threshold with logits on both sides, where there are several, that none of them is next to."""
    ordered = np.sort(logits)
    if len(ordered) == 1:
        return float(ordered[0]) - 1
    middle = slice(len(ordered) // 4, max(len(ordered) * 3 // 4, 1))
    place = int(np.argmax(np.diff(ordered)[middle])) + len(ordered) // 4
    return float(ordered[place : place + 2].mean())


@pytest.mark.slow(
    "compiles a kernel per case; f16, q4 and one size of the others are fast",
    but=("f16", "q4-", "q8-(77, 5, 72)-False", "q6-(77, 5, 72)-False", "q4m-(77, 5, 72)-False"),
)
@pytest.mark.parametrize(("format_name", "shape", "relu"), CASES, ids=str)
def test_low_rank(workbench: Workbench, format_name: str, shape: tuple[int, int, int], relu: bool) -> None:
    example = Learned(format_name, shape, relu)
    bias = uniform(np.random.default_rng(shape[0]), shape[0]) * np.abs(example.logits).max()
    logits = example.logits + bias
    threshold = clear_threshold(logits)
    result = workbench.run(low_rank(format_name, shape, relu), example.with_bias(bias, threshold))
    assert result["mask"].tolist() == [(logits > threshold).astype(int).tolist()]
    assert shape[0] == 1 or 0 < result["mask"].sum() < shape[0]


@pytest.mark.slow("compiles a kernel per format; f16 and q4 are fast", but=("f16", "q4]"))
@pytest.mark.parametrize("format_name", FORMATS)
def test_low_rank_for_several_tokens(workbench: Workbench, format_name: str) -> None:
    """As for each of them alone."""
    example, rng = Learned(format_name, SHAPES[2], False), np.random.default_rng(1)
    bias = uniform(rng, SHAPES[2][0]) * np.abs(example.logits).max()
    inputs = example.with_bias(bias, 0.1)
    x = uniform(rng, 5, SHAPES[2][2])
    kernel = low_rank(format_name, SHAPES[2], False, BATCH)
    alone = low_rank(format_name, SHAPES[2], False)
    masks = workbench.run(kernel, inputs | {"x": x}, tokens=5)["mask"]
    expected = [workbench.run(alone, inputs | {"x": row[None]})["mask"][0] for row in x]
    assert (masks[5:] == 255).all()
    assert np.array_equal(masks[:5], np.stack(expected))
    assert 0 < masks[:5].mean() < 1


def test_signs_for_several_tokens(workbench: Workbench) -> None:
    shape, rng = SIGN_SHAPES[3], np.random.default_rng(2)
    stored = quantize_rows(torch.from_numpy(uniform(rng, *shape)), "f16")
    x = uniform(rng, 5, shape[1])
    inputs = {"signs": pack_signs(stored, "f16", shape[1]).numpy().view(np.int32), "most": np.array([128], np.float32)}
    masks = workbench.run(signs(shape, BATCH), inputs | {"x": x}, tokens=5)["mask"]
    expected = [workbench.run(signs(shape), inputs | {"x": row[None]})["mask"][0] for row in x]
    assert np.array_equal(masks[:5], np.stack(expected))
    assert (masks[5:] == 255).all()


@pytest.mark.parametrize("value", [-1000.0, 1000.0])
def test_low_rank_names_none_and_all(workbench: Workbench, value: float) -> None:
    example = Learned("q4", SHAPES[2], relu=False)
    inputs = example.with_bias(np.full(SHAPES[2][0], value), 0.5)
    mask = workbench.run(low_rank("q4", SHAPES[2], False), inputs)["mask"]
    assert mask.tolist() == [[int(value > 0)] * SHAPES[2][0]]


def test_a_logit_at_the_threshold_is_not_above_it(workbench: Workbench) -> None:
    example = Learned("f16", SHAPES[1], relu=False)
    example.inputs["x"][:] = 0
    bias = np.where(np.arange(77) % 2, 0.25, 0.25 + 2**-20)
    mask = workbench.run(low_rank("f16", SHAPES[1], False), example.with_bias(bias, 0.25))["mask"]
    assert mask.tolist() == [[1 - i % 2 for i in range(77)]]


@pytest.mark.parametrize("shape", SIGN_SHAPES, ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_signs(workbench: Workbench, format_name: str, shape: tuple[int, int]) -> None:
    """Zeros count as positive, minus zero too."""
    rng = np.random.default_rng(shape)
    x, w = uniform(rng, 1, shape[1]), uniform(rng, *shape)
    for values in (x, w):
        values[rng.random(values.shape) < 0.1] = 0.0
        values[rng.random(values.shape) < 0.1] = -0.0
    stored = quantize_rows(torch.from_numpy(w), format_name)
    differing = ((x < 0) != (dequantize_rows(stored, format_name, shape[1]).numpy() < 0)).sum(axis=1)
    bits = pack_signs(stored, format_name, shape[1]).numpy()
    assert bits.shape == (shape[0], sign_row_bytes(shape[1]))
    # The matrix is given as it is stored; the kernel sees words.
    inputs = {"x": x, "signs": bits.view(np.int32)}
    for most in (-1.0, 0.0, float(np.median(differing)), float(shape[1] - 1), float(shape[1])):
        result = workbench.run(signs(shape), inputs | {"most": np.array([most], np.float32)})
        assert result["mask"].tolist() == [(differing <= most).astype(int).tolist()]


@pytest.mark.parametrize("columns", [1, 255, 256, 300, 4096])
def test_rows_of_signs_are_aligned(columns: int) -> None:
    assert sign_row_bytes(columns) % 64 == 0
    assert columns <= sign_row_bytes(columns) * 8 < columns + 512


def test_signs_are_packed_a_block_of_rows_at_a_time() -> None:
    """Matrices larger than a block give what their rows give one by one."""
    matrix = quantize_rows(torch.randn(1100, 2100), "q8")
    whole, chosen = pack_signs(matrix, "q8", 2100), [0, 997, 998, 999, 1099]
    assert torch.equal(whole[chosen], torch.cat([pack_signs(matrix[i : i + 1], "q8", 2100) for i in chosen]))


def test_same_bits_for_any_number_of_threads(workbench: Workbench) -> None:
    learned = Learned("q8", SHAPES[-1], relu=False)
    inputs = learned.with_bias(np.zeros(SHAPES[-1][0]), 0.0)
    kernel = low_rank("q8", SHAPES[-1], False)
    assert len({workbench.run(kernel, inputs, threads=threads)["mask"].tobytes() for threads in (1, 2, 3, 5)}) == 1
