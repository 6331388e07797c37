"""Predictors' masks on a GPU against the same decision in float64, and the highest logits against a sort."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_kernels_predict import clear_threshold, second_format

from helpers.kernels.cuda_workbench import CudaWorkbench, assert_rows
from helpers.kernels.top_logits_cases import KINDS, check, logits_of
from helpers.kernels.workbench import Array, packed, uniform
from helpers.products import sampled
from picompile_codegen.cuda import dot
from picompile_codegen.signs import pack_signs, sign_row_bytes
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec, TopLogitsSpec
from picompile_passes.dialect import dequantize_rows, quantize_rows

# (format, (neurons, rank, dim), relu): one of everything; odd sizes; ranks that a few lanes read at once, and a whole
# warp in turns; rows longer than a block of threads.
Case = tuple[str, tuple[int, int, int], bool]
CASES: list[Case] = [
    ("f16", (1, 1, 1), False),
    ("q8", (77, 5, 72), True),
    ("q4m", (200, 40, 100), False),
    ("q6", (70, 300, 1100), True),
    ("q4", (300, 96, 4200), False),
]
ODD = CASES[1]
# Less than a word of bits, one column more than a block of them, and more words than a warp reads at once.
SIGN_SHAPES = ((7, 13), (51, 257), (150, 4400))


def low_rank(form: str, shape: tuple[int, int, int], relu: bool, rows: int = 1) -> PredictLowRankSpec:
    (neurons, rank, dim), formats = shape, (form, second_format(form))
    return PredictLowRankSpec(formats=formats, neurons=neurons, rank=rank, dim=dim, relu=relu, rows=rows)


def example_of(case: Case, tokens: int = 1) -> tuple[dict[str, Array], Array]:
    """Return a random predictor's arguments, and its logits without the bias in float64."""
    form, (neurons, rank, dim), relu = case
    rng = np.random.default_rng([neurons, rank, dim, tokens])
    (fc1, first), (fc2, second) = packed(rng, form, rank, dim), packed(rng, second_format(form), neurons, rank)
    x = uniform(rng, tokens, dim)
    hidden = x.astype(np.float64) @ first.T
    return {"x": x, "fc1": fc1, "fc2": fc2}, (np.maximum(hidden, 0) if relu else hidden) @ second.T


def with_bias(inputs: dict[str, Array], bias: Array, threshold: float) -> dict[str, Array]:
    return {**inputs, "bias": bias.astype(np.float32), "threshold": np.array([threshold], np.float32)}


@pytest.mark.parametrize(("case", "tokens"), [*((case, 1) for case in CASES), (ODD, 5)], ids=str)
def test_low_rank(workbench: CudaWorkbench, case: Case, tokens: int) -> None:
    (inputs, logits), neurons = example_of(case, tokens), case[1][0]
    bias = uniform(np.random.default_rng(neurons), neurons) * np.abs(logits).max()
    logits = logits + bias
    threshold = clear_threshold(logits.ravel())
    spec = low_rank(*case, rows=1 if tokens == 1 else 7)
    mask = workbench.run(spec, with_bias(inputs, bias, threshold), tokens=tokens)["mask"]
    assert_rows(mask, logits > threshold)
    assert neurons == 1 or 0 < mask[:tokens].mean() < 1


def test_a_logit_at_the_threshold_is_not_above_it(workbench: CudaWorkbench) -> None:
    inputs, _ = example_of(ODD)
    bias = np.where(np.arange(77) % 2, 0.25, 0.25 + 2**-20)
    mask = workbench.run(low_rank(*ODD), with_bias(inputs | {"x": 0 * inputs["x"]}, bias, 0.25))["mask"]
    assert mask.tolist() == [[1 - i % 2 for i in range(77)]]


def test_ranks_that_are_in_shared_memory_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As very large ones would be."""
    monkeypatch.setattr(dot, "_COLUMNS", 64)
    case = ("f16", (30, 150, 40), False)
    inputs, logits = example_of(case)
    threshold = clear_threshold(logits[0])
    mask = CudaWorkbench(tmp_path).run(low_rank(*case), with_bias(inputs, np.zeros(30), threshold))["mask"]
    assert_rows(mask, logits > threshold)


@pytest.mark.parametrize(("shape", "tokens"), [*((shape, 1) for shape in SIGN_SHAPES), (SIGN_SHAPES[1], 5)], ids=str)
def test_signs(workbench: CudaWorkbench, shape: tuple[int, int], tokens: int) -> None:
    """Zeros count as positive, minus zero too."""
    rng = np.random.default_rng([*shape, tokens])
    x, w = uniform(rng, tokens, shape[1]), uniform(rng, *shape)
    for values in (x, w):
        values[rng.random(values.shape) < 0.1] = 0.0
        values[rng.random(values.shape) < 0.1] = -0.0
    stored = quantize_rows(torch.from_numpy(w), "f16")
    differing = ((x[:, None] < 0) != (dequantize_rows(stored, "f16", shape[1]).numpy() < 0)).sum(axis=2)
    inputs = {"x": x, "signs": pack_signs(stored, "f16", shape[1]).numpy().view(np.int32)}
    spec = PredictSignsSpec(*shape, row_bytes=sign_row_bytes(shape[1]), rows=1 if tokens == 1 else 7)
    for most in (0.0, float(np.median(differing)), float(shape[1])):
        found = workbench.run(spec, inputs | {"most": np.array([most], np.float32)}, tokens=tokens)
        assert_rows(found["mask"], differing <= most)


# Part of a run, one run and a key more, runs that are no power of two, a slice and a token more; many slices; and more
# slices than a block merges at once. Rows, and how many of them count.
@sampled(
    slow="sorts large vocabularies in several orders of threads; small ones are fast",
    kind=KINDS,
    vocab=(37, 65, 300, 2049, pytest.param(50257, marks=pytest.mark.slow("is large")), 70001),
    counts=((1, 1), (3, 3), (3, 2)),
    when=lambda kind, vocab, counts: vocab < 5000 or (counts == (1, 1) and kind in ("normal", "ties", "nan")),
)
def test_highest_logits(workbench: CudaWorkbench, kind: str, vocab: int, counts: tuple[int, int]) -> None:
    """Equal logits come in one order, in whatever order threads run."""
    rows, tokens = counts
    logits = logits_of(kind, tokens, vocab)
    check(workbench.run(TopLogitsSpec(vocab=vocab, rows=rows), {"logits": logits}, tokens=tokens), logits)
