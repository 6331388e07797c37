"""Predictors' masks on the CPU and in the emulation of a GPU against the same decision in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.kernels.cuda_workbench import EITHER, CudaWorkbench
from helpers.kernels.workbench import Array, Workbench, as_seen, assert_rows, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile_codegen import cpu, cuda
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.cuda import dot
from picompile_codegen.errors import CodegenError
from picompile_codegen.signs import pack_signs, sign_row_bytes
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec
from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_passes.formats.panels import to_panels

# (neurons, rank, dim): one of everything; odd sizes; a rank wider than a group; sizes that are worth several threads;
# ranks that a warp of a GPU reads in turns; rows longer than a block of its threads.
Shape = tuple[int, int, int]
ODD = (77, 5, 72)
SHAPES = ((1, 1, 1), ODD, (200, 40, 100), (1100, 96, 1100), (70, 300, 1100), (300, 96, 4200))
MANY = 37
# Less than a vector of bits, just one, one column more, more words than a warp reads at once, and several blocks with a
# part of one.
SIGN_SHAPES = ((1, 1), (7, 13), (50, 256), (51, 257), (150, 4400), (1500, 1100))
SLOW = "compiles a kernel per case"


def second_format(form: str) -> str:
    """fc2 is stored in another format than fc1 where that is q8."""
    return "q4" if form == "q8" else form


def low_rank(form: str, shape: Shape, relu: bool, rows: int = 1) -> PredictLowRankSpec:
    return PredictLowRankSpec((form, second_format(form)), *shape, relu=relu, rows=rows)


def example_of(form: str, shape: Shape, relu: bool, tokens: int = 1) -> tuple[dict[str, Array], Array]:
    """Return a random predictor's arguments, and its logits without the bias in float64."""
    (neurons, rank, dim), rng = shape, np.random.default_rng([*shape, relu, tokens])
    (fc1, first), (fc2, second) = packed(rng, form, rank, dim), packed(rng, second_format(form), neurons, rank)
    x = uniform(rng, tokens, dim)
    hidden = x.astype(np.float64) @ first.T
    return {"x": x, "fc1": fc1, "fc2": fc2}, (np.maximum(hidden, 0) if relu else hidden) @ second.T


def with_bias(inputs: dict[str, Array], bias: Array, threshold: float) -> dict[str, Array]:
    return {**inputs, "bias": bias.astype(np.float32), "threshold": np.array([threshold], np.float32)}


def clear_threshold(logits: Array) -> float:
    """A threshold with logits on both sides, where there are several, that none of them is next to."""
    ordered = np.sort(logits)
    if len(ordered) == 1:
        return float(ordered[0]) - 1
    middle = slice(len(ordered) // 4, max(len(ordered) * 3 // 4, 1))
    place = int(np.argmax(np.diff(ordered)[middle])) + len(ordered) // 4
    return float(ordered[place : place + 2].mean())


@sampled(
    fixtures=EITHER,
    form=ROW_FORMATS,
    shape=SHAPES,
    relu=(False, True),
    when=lambda shape, relu, **_: shape in (ODD, SHAPES[4]) or not relu,
    fast={"shape": SHAPES[:4]},
    slow=SLOW,
)
def test_low_rank(either: Workbench, form: str, shape: Shape, relu: bool) -> None:
    """For several tokens the CPU rounds what it multiplies: see below."""
    for tokens in (1, 5) if shape == ODD and isinstance(either, CudaWorkbench) else (1,):
        inputs, logits = example_of(form, shape, relu, tokens)
        bias = uniform(np.random.default_rng(shape[0]), shape[0]) * np.abs(logits).max()
        logits = logits + bias
        threshold = clear_threshold(logits.ravel())
        spec = low_rank(form, shape, relu, 1 if tokens == 1 else 7)
        mask = either.same(spec, with_bias(inputs, bias, threshold), tokens=tokens)["mask"]
        assert_rows(mask, logits > threshold)
        assert shape[0] == 1 or 0 < mask[:tokens].mean() < 1


@pytest.mark.slow("compiles two kernels per case; one in panels is fast", but=("q4xq6",))
@pytest.mark.parametrize(
    ("formats", "relu", "panels"),
    [
        *(
            (each, False, False)
            for each in (("f16", "f16"), ("q8", "q4"), ("q6", "q6"), ("q4m", "q4m"), ("q4", "q4"), ("mxfp4", "mxfp4"))
        ),
        *((("q8", "q8"), False, True), (("q4", "q6"), True, True), (("q4m", "q8"), False, True)),
    ],
    ids=lambda value: "x".join(value) if isinstance(value, tuple) else str(value),
)
def test_low_rank_for_several_tokens(tmp_path: Path, formats: tuple[str, str], relu: bool, panels: bool) -> None:
    """Masks are those of the same products in float64, whichever tokens are beside."""
    workbench = Workbench(tmp_path / "host.so")
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


# Experts, how many are chosen, and the neurons of each: odd ones, one of one neuron, and whole panels.
EXPERTS = ((5, 2, 7), (3, 3, 1), (9, 2, 80))


def gains_of(rng: np.random.Generator, tokens: int, experts: int, chosen: int) -> Array:
    """Gains of `chosen` experts, or of fewer."""
    gains = np.zeros((tokens, experts), np.float32)
    for row in gains:
        count = chosen if rng.random() < 0.7 else rng.integers(chosen + 1)
        row[rng.permutation(experts)[:count]] = rng.uniform(-1, 1, count)
    return gains


@pytest.mark.slow("compiles two kernels per case; the last is fast", but=("q4xq6",))
@pytest.mark.parametrize(
    ("formats", "sizes", "panels"),
    [
        (("f16", "f16"), EXPERTS[0], False),
        (("q8", "q4"), EXPERTS[1], False),
        (("q6", "q8"), EXPERTS[2], False),
        (("q4", "q6"), EXPERTS[2], True),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_low_rank_of_experts(
    tmp_path: Path, formats: tuple[str, str], sizes: tuple[int, int, int], panels: bool
) -> None:
    """Neurons of other experts are never named, and those of chosen ones as in float64. None of the former is read."""
    workbench = Workbench(tmp_path / "host.so")
    (experts, chosen, each), (rank, dim), rng = sizes, (48, 100), np.random.default_rng(sizes)
    neurons = experts * each

    def run(inputs: dict[str, Array], rows: int, tokens: int = 1) -> Array:
        spec = PredictLowRankSpec(
            formats, neurons, rank, dim, relu=True, rows=rows, panels=panels, experts=experts, chosen=chosen
        )
        return workbench.run(cpu.write_kernel(spec), inputs, tokens=tokens)["mask"]

    def stored(data: Array, form: str, columns: int) -> Array:
        return to_panels(torch.from_numpy(data), form, columns).numpy() if panels else data

    fc1, first = packed(rng, formats[0], rank, dim)
    fc2, second = packed(rng, formats[1], neurons, rank)
    x, bias, gains = uniform(rng, MANY, dim), uniform(rng, neurons), gains_of(rng, MANY, experts, chosen)
    hidden = np.maximum(as_seen(x, formats[0]) @ first.T, 0)
    scores = as_seen(hidden.astype(np.float32), formats[1]) @ second.T + bias
    of_chosen = np.repeat(gains != 0, each, axis=1)
    inputs = {"fc1": stored(fc1, formats[0], dim), "fc2": stored(fc2, formats[1], rank)}
    inputs |= {"bias": bias, "threshold": np.array([0.1], np.float32)}
    masks = run(inputs | {"x": x, "gains": gains}, MANY, MANY - 3)
    assert (masks[-3:] == 255).all()
    clear = np.abs(scores - 0.1) > 1e-3 * np.abs(scores).max()
    assert ((masks == (of_chosen & (scores > 0.1))) | ~clear)[:-3].all()
    assert (masks[:-3] <= of_chosen[:-3]).all()
    assert 0.1 < masks[:-3][of_chosen[:-3]].mean() < 0.9
    for token in range(0, MANY - 3, 9):
        # What is not a number would show in a mask that has read it.
        bias = np.where(of_chosen[token], inputs["bias"], np.nan).astype(np.float32)
        alone = run(inputs | {"x": x[token, None], "gains": gains[token, None], "bias": bias}, 1)
        assert np.array_equal(alone[0], masks[token])


@pytest.mark.parametrize("rows", [1, MANY])
def test_signs_of_experts(tmp_path: Path, rows: int) -> None:
    """Neurons of other experts are never named, and those of chosen ones as without experts."""
    workbench, (experts, chosen, each), dim = Workbench(tmp_path / "host.so"), EXPERTS[0], 300
    rng, neurons = np.random.default_rng(rows), experts * each
    stored, matrix = packed(rng, "f16", neurons, dim)
    x, gains, most = uniform(rng, rows, dim), gains_of(rng, rows, experts, chosen), dim // 2
    signs = pack_signs(torch.from_numpy(stored), "f16", dim).numpy().view(np.int32)
    spec = PredictSignsSpec(neurons, dim, sign_row_bytes(dim), rows, experts, chosen)
    inputs = {"x": x, "gains": gains, "signs": signs, "most": np.array([most], np.float32)}
    mask = workbench.run(cpu.write_kernel(spec), inputs, tokens=rows)["mask"]
    differing = ((x < 0)[:, None] != (matrix < 0)[None]).sum(-1)
    assert np.array_equal(mask, np.repeat(gains != 0, each, axis=1) & (differing <= most))
    assert mask.any() or rows == 1


def test_experts_on_a_gpu_are_refused() -> None:
    for spec in (
        PredictLowRankSpec(("q4", "q4"), 32, 8, 16, relu=False, experts=4, chosen=2),
        PredictSignsSpec(32, 16, sign_row_bytes(16), experts=4, chosen=2),
    ):
        with pytest.raises(CodegenError, match="no GPU kernel that predicts neurons of experts"):
            cuda.write_kernel(spec)


def test_thresholds_below_above_and_at_logits(either: Workbench) -> None:
    """A logit at the threshold is not above it."""
    (inputs, _), spec = example_of("f16", ODD, False), low_rank("f16", ODD, False)
    for value in (-1000.0, 1000.0):
        mask = either.run(spec, with_bias(inputs, np.full(77, value), 0.5))["mask"]
        assert mask.tolist() == [[int(value > 0)] * 77]
    bias = np.where(np.arange(77) % 2, 0.25, 0.25 + 2**-20)
    mask = either.run(spec, with_bias(inputs | {"x": 0 * inputs["x"]}, bias, 0.25))["mask"]
    assert mask.tolist() == [[1 - i % 2 for i in range(77)]]


def test_ranks_that_are_in_shared_memory_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As very large ones would be."""
    monkeypatch.setattr(dot, "_COLUMNS", 64)
    case = ("f16", (30, 150, 40), False)
    inputs, logits = example_of(*case)
    threshold = clear_threshold(logits[0])
    mask = CudaWorkbench(tmp_path).run(low_rank(*case), with_bias(inputs, np.zeros(30), threshold))["mask"]
    assert_rows(mask, logits > threshold)


@sampled(
    fixtures=EITHER,
    form=ROW_FORMATS,
    shape=SIGN_SHAPES,
    tokens=(1, 5),
    # A GPU does nothing else for so many rows.
    when=lambda either, shape, **_: shape != SIGN_SHAPES[-1] or either == "cpu",
    slow=SLOW,
)
def test_signs(either: Workbench, form: str, shape: tuple[int, int], tokens: int) -> None:
    """Zeros count as positive, minus zero too."""
    rng = np.random.default_rng([*shape, tokens])
    x, w = uniform(rng, tokens, shape[1]), uniform(rng, *shape)
    for values in (x, w):
        values[rng.random(values.shape) < 0.1] = 0.0
        values[rng.random(values.shape) < 0.1] = -0.0
    stored = quantize_rows(torch.from_numpy(w), form)
    weights = dequantize_rows(stored, form, shape[1]).numpy()
    differing = np.stack([((row < 0) != (weights < 0)).sum(axis=1) for row in x])
    bits = pack_signs(stored, form, shape[1]).numpy()
    assert bits.shape == (shape[0], sign_row_bytes(shape[1]))
    # The matrix is given as it is stored; the kernel sees words.
    inputs = {"x": x, "signs": bits.view(np.int32)}
    spec = PredictSignsSpec(*shape, row_bytes=sign_row_bytes(shape[1]), rows=1 if tokens == 1 else 7)
    for most in (-1.0, 0.0, float(np.median(differing)), float(shape[1] - 1), float(shape[1])):
        found = either.run(spec, inputs | {"most": np.array([most], np.float32)}, tokens=tokens)
        assert_rows(found["mask"], differing <= most)


def test_signs_are_packed_a_block_of_rows_at_a_time() -> None:
    """Matrices larger than a block give what their rows give one by one, and rows are aligned."""
    for columns in (1, 255, 256, 300, 4096):
        assert sign_row_bytes(columns) % 64 == 0
        assert columns <= sign_row_bytes(columns) * 8 < columns + 512
    matrix = quantize_rows(torch.randn(1100, 2100), "q8")
    whole, chosen = pack_signs(matrix, "q8", 2100), [0, 997, 998, 999, 1099]
    assert torch.equal(whole[chosen], torch.cat([pack_signs(matrix[i : i + 1], "q8", 2100) for i in chosen]))
