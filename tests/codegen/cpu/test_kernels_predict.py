"""Predictors' masks against the same decision in float64, and the signs packed ahead of time."""

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Array, Workbench, as_seen, packed, uniform
from helpers.products import sampled
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.signs import pack_signs, sign_row_bytes
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec
from picompile_codegen.weight_panels import to_panels
from picompile_passes.dialect import dequantize_rows, quantize_rows

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# (neurons, rank, dim): one of everything; odd sizes; a rank wider than a group; sizes that are worth several threads.
SHAPES = ((1, 1, 1), (77, 5, 72), (200, 40, 100), (1100, 96, 1100))
BATCH, MANY = 7, 37
# Less than a vector of bits, just one, one column more, and several blocks with a part of one.
SIGN_SHAPES = ((1, 1), (7, 13), (50, 256), (51, 257), (1500, 1100))


def second_format(format_name: str) -> str:
    """fc2 is stored in another format than fc1 where that is q8."""
    return "q4" if format_name == "q8" else format_name


def low_rank(form: str, shape: tuple[int, int, int], relu: bool) -> Kernel:
    return cpu.write_kernel(PredictLowRankSpec((form, second_format(form)), *shape, relu=relu, rows=1))


def signs(shape: tuple[int, int], rows: int = 1) -> Kernel:
    return cpu.write_kernel(PredictSignsSpec(*shape, row_bytes=sign_row_bytes(shape[1]), rows=rows))


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


@sampled(
    form=FORMATS,
    shape=SHAPES,
    relu=(False, True),
    when=lambda shape, relu, **_: shape[0] == 77 or not relu,
    slow="compiles a kernel per case",
)
def test_low_rank(workbench: Workbench, form: str, shape: tuple[int, int, int], relu: bool) -> None:
    example = Learned(form, shape, relu)
    bias = uniform(np.random.default_rng(shape[0]), shape[0]) * np.abs(example.logits).max()
    logits = example.logits + bias
    threshold = clear_threshold(logits)
    inputs = example.with_bias(bias, threshold)
    for threads in (1, 2, 5):
        result = workbench.run(low_rank(form, shape, relu), inputs, threads=threads)
        assert result["mask"].tolist() == [(logits > threshold).astype(int).tolist()]
        assert shape[0] == 1 or 0 < result["mask"].sum() < shape[0]


@pytest.mark.slow("compiles two kernels per case; f16 and one in panels are fast", but=("f16xf16", "q4xq6"))
@pytest.mark.parametrize(
    ("formats", "relu", "panels"),
    [
        *((each, False, False) for each in (("f16", "f16"), ("q8", "q4"), ("q6", "q6"), ("q4m", "q4m"), ("q4", "q4"))),
        *((("q8", "q8"), False, True), (("q4", "q6"), True, True), (("q4m", "q8"), False, True)),
    ],
    ids=lambda value: "x".join(value) if isinstance(value, tuple) else str(value),
)
def test_low_rank_for_several_tokens(workbench: Workbench, formats: tuple[str, str], relu: bool, panels: bool) -> None:
    """Masks are those of the same products in float64, whichever tokens are beside."""
    (neurons, rank, dim), rng = (112, 48, 100), np.random.default_rng([relu, *map(len, formats)])

    def kernel(rows: int) -> Kernel:
        spec = PredictLowRankSpec(formats, neurons=neurons, rank=rank, dim=dim, relu=relu, rows=rows, panels=panels)
        return cpu.write_kernel(spec)

    def stored(data: Array, form: str, columns: int) -> Array:
        return to_panels(torch.from_numpy(data), form, columns).numpy() if panels else data

    fc1, first = packed(rng, formats[0], rank, dim)
    fc2, second = packed(rng, formats[1], neurons, rank)
    x, bias = uniform(rng, MANY, dim), uniform(rng, neurons)
    hidden = as_seen(x, formats[0]) @ first.T
    hidden = np.maximum(hidden, 0) if relu else hidden
    scores = as_seen(hidden.astype(np.float32), formats[1]) @ second.T + bias
    inputs = {"fc1": stored(fc1, formats[0], dim), "fc2": stored(fc2, formats[1], rank), "bias": bias}
    inputs["threshold"] = np.array([0.1], np.float32)
    masks = workbench.run(kernel(MANY), inputs | {"x": x}, tokens=MANY - 3)["mask"]
    assert (masks[-3:] == 255).all()
    clear = np.abs(scores - 0.1) > 1e-3 * np.abs(scores).max()
    assert clear.mean() > 0.95
    assert ((masks == (scores > 0.1)) | ~clear)[:-3].all()
    assert 0.1 < masks[:-3].mean() < 0.9
    alone = [workbench.run(kernel(1), inputs | {"x": row[None]})["mask"][0] for row in x[:-3]]
    assert np.array_equal(masks[:-3], np.stack(alone))


def test_signs_for_several_tokens(workbench: Workbench) -> None:
    shape, rng = SIGN_SHAPES[3], np.random.default_rng(2)
    stored = quantize_rows(torch.from_numpy(uniform(rng, *shape)), "f16")
    x = uniform(rng, 5, shape[1])
    inputs = {"signs": pack_signs(stored, "f16", shape[1]).numpy().view(np.int32), "most": np.array([128], np.float32)}
    masks = workbench.run(signs(shape, BATCH), inputs | {"x": x}, tokens=5)["mask"]
    expected = [workbench.run(signs(shape), inputs | {"x": row[None]})["mask"][0] for row in x]
    assert np.array_equal(masks[:5], np.stack(expected))
    assert (masks[5:] == 255).all()


def test_thresholds_below_above_and_at_logits(workbench: Workbench) -> None:
    """A logit at the threshold is not above it."""
    example = Learned("f16", SHAPES[1], relu=False)
    for value in (-1000.0, 1000.0):
        inputs = example.with_bias(np.full(77, value), 0.5)
        assert workbench.run(low_rank("f16", SHAPES[1], False), inputs)["mask"].tolist() == [[int(value > 0)] * 77]
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


def test_signs_are_packed_a_block_of_rows_at_a_time() -> None:
    """Matrices larger than a block give what their rows give one by one, and rows are aligned."""
    for columns in (1, 255, 256, 300, 4096):
        assert sign_row_bytes(columns) % 64 == 0
        assert columns <= sign_row_bytes(columns) * 8 < columns + 512
    matrix = quantize_rows(torch.randn(1100, 2100), "q8")
    whole, chosen = pack_signs(matrix, "q8", 2100), [0, 997, 998, 999, 1099]
    assert torch.equal(whole[chosen], torch.cat([pack_signs(matrix[i : i + 1], "q8", 2100) for i in chosen]))
