"""Predictors' masks on a GPU against the same decision in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_kernels_predict import Learned, clear_threshold, second_format

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import packed, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel, dot
from picompile_codegen.signs import pack_signs, sign_row_bytes
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec
from picompile_passes.dialect import dequantize_rows, quantize_rows

# (format, (neurons, rank, dim), relu): one of everything; odd sizes; ranks that a few lanes read at once, and a whole
# warp in turns; rows longer than a block of threads.
CASES = [
    ("f16", (1, 1, 1), False),
    ("q8", (77, 5, 72), True),
    ("f16", (200, 40, 100), False),
    ("f16", (70, 300, 1100), False),
    ("q4", (300, 96, 4200), False),
    ("q4m", (200, 40, 100), False),
    ("q6", (70, 300, 1100), True),
]
BATCH = 7
# Less than a word of bits, one column more than a block of them, and more words than a warp reads at once.
SIGN_SHAPES = ((7, 13), (51, 257), (150, 4400))


def low_rank(format_name: str, shape: tuple[int, int, int], relu: bool, rows: int = 1) -> CudaKernel:
    neurons, rank, dim = shape
    formats = (format_name, second_format(format_name))
    return cuda.write_kernel(
        PredictLowRankSpec(formats=formats, neurons=neurons, rank=rank, dim=dim, relu=relu, rows=rows)
    )


def signs(shape: tuple[int, int], rows: int = 1) -> CudaKernel:
    return cuda.write_kernel(
        PredictSignsSpec(neurons=shape[0], dim=shape[1], row_bytes=sign_row_bytes(shape[1]), rows=rows)
    )


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    built = [*(low_rank(*case) for case in CASES), low_rank(*CASES[1], BATCH)]
    built += [*map(signs, SIGN_SHAPES), signs(SIGN_SHAPES[1], BATCH)]
    return CudaWorkbench(tmp_path_factory.mktemp("predict") / "device.so", built)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_low_rank(workbench: CudaWorkbench, case: tuple[str, tuple[int, int, int], bool]) -> None:
    example, neurons = Learned(*case), case[1][0]
    bias = uniform(np.random.default_rng(neurons), neurons) * np.abs(example.logits).max()
    logits = example.logits + bias
    threshold = clear_threshold(logits)
    result = workbench.run(low_rank(*case), example.with_bias(bias, threshold))
    assert result["mask"].tolist() == [(logits > threshold).astype(int).tolist()]
    assert neurons == 1 or 0 < result["mask"].sum() < neurons


def test_low_rank_for_several_tokens(workbench: CudaWorkbench) -> None:
    format_name, (neurons, rank, dim), _ = CASES[1]
    rng = np.random.default_rng(1)
    fc1, first = packed(rng, format_name, rank, dim)
    fc2, second = packed(rng, second_format(format_name), neurons, rank)
    x, bias = uniform(rng, 5, dim), uniform(rng, neurons)
    logits = np.maximum(x.astype(np.float64) @ first.T, 0) @ second.T + bias
    threshold = clear_threshold(logits.ravel())
    inputs = {"x": x, "fc1": fc1, "fc2": fc2, "bias": bias, "threshold": np.array([threshold], np.float32)}
    masks = workbench.run(low_rank(*CASES[1], BATCH), inputs, tokens=5)["mask"]
    assert np.array_equal(masks[:5], logits > threshold)
    assert 0 < masks[:5].mean() < 1
    assert (masks[5:] == 255).all()


def test_a_logit_at_the_threshold_is_not_above_it(workbench: CudaWorkbench) -> None:
    example = Learned(*CASES[1])
    example.inputs["x"][:] = 0
    bias = np.where(np.arange(77) % 2, 0.25, 0.25 + 2**-20)
    mask = workbench.run(low_rank(*CASES[1]), example.with_bias(bias, 0.25))["mask"]
    assert mask.tolist() == [[1 - i % 2 for i in range(77)]]


def test_ranks_that_are_in_shared_memory_in_parts(tmp_path: Path) -> None:
    """As very large ones would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dot, "_COLUMNS", 64)
        kernel = low_rank("f16", (30, 150, 40), False)
    example = Learned("f16", (30, 150, 40), False)
    threshold = clear_threshold(example.logits)
    workbench = CudaWorkbench(tmp_path / "device.so", [kernel])
    mask = workbench.run(kernel, example.with_bias(np.zeros(30), threshold))["mask"]
    assert mask.tolist() == [(example.logits > threshold).astype(int).tolist()]


@pytest.mark.parametrize("shape", SIGN_SHAPES, ids=str)
def test_signs(workbench: CudaWorkbench, shape: tuple[int, int]) -> None:
    """Zeros count as positive, minus zero too."""
    rng = np.random.default_rng(shape)
    x, w = uniform(rng, 1, shape[1]), uniform(rng, *shape)
    for values in (x, w):
        values[rng.random(values.shape) < 0.1] = 0.0
        values[rng.random(values.shape) < 0.1] = -0.0
    stored = quantize_rows(torch.from_numpy(w), "f16")
    differing = ((x < 0) != (dequantize_rows(stored, "f16", shape[1]).numpy() < 0)).sum(axis=1)
    inputs = {"x": x, "signs": pack_signs(stored, "f16", shape[1]).numpy().view(np.int32)}
    for most in (0.0, float(np.median(differing)), float(shape[1])):
        result = workbench.run(signs(shape), inputs | {"most": np.array([most], np.float32)})
        assert result["mask"].tolist() == [(differing <= most).astype(int).tolist()]


def test_signs_for_several_tokens(workbench: CudaWorkbench) -> None:
    shape, rng = SIGN_SHAPES[1], np.random.default_rng(2)
    x, stored = uniform(rng, 5, shape[1]), quantize_rows(torch.from_numpy(uniform(rng, *shape)), "f16")
    weights = dequantize_rows(stored, "f16", shape[1]).numpy()
    expected = ((x[:, None] < 0) != (weights[None] < 0)).sum(axis=2) <= 128
    inputs = {"signs": pack_signs(stored, "f16", shape[1]).numpy().view(np.int32), "most": np.array([128], np.float32)}
    masks = workbench.run(signs(shape, BATCH), inputs | {"x": x}, tokens=5)["mask"]
    assert np.array_equal(masks[:5], expected)
    assert (masks[5:] == 255).all()
