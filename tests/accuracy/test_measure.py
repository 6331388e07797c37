"""Figures of the parts equal those of whole graphs, and memory holds the logits of one window."""

import gc
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import picompile_runtime
from picompile.accuracy import measure
from picompile.accuracy.comparison import CheckpointComparison
from picompile.accuracy.distances import TokenDistances, measure_tokens
from picompile.accuracy.measure import ComparedArtifact, ComparedText, compare_variants
from picompile.accuracy.variants import Variant
from picompile.errors import UnsupportedModelError
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile.progress import NoProgress
from picompile_passes.graph.materialize import materialize
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_runtime.errors import KernelError

VOCABULARY = 300


@pytest.fixture(scope="module")
def captured(tiny_model: Path) -> Captured:
    return load_model(tiny_model)


@pytest.fixture(scope="module")
def text() -> ComparedText:
    generator = torch.Generator().manual_seed(4)
    windows = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (65, 33, 65, 2)]
    return ComparedText(windows, "random tokens")


def _quantized(captured: Captured, form: str) -> GraphModule:
    passes = (InsertPredictors("none"), Quantize(form))
    return Pipeline(passes)(canonicalize(captured.graph_module)).graph_module


def _compared(
    captured: Captured, artifact: Path, text: ComparedText, by_decode: bool = False, bound: float | None = None
) -> CheckpointComparison:
    variants = [
        Variant("weights", form, f"another than {form}", _quantized(captured, form), captured.weights)
        for form in ("q4", "q8")
    ]
    folder = ComparedArtifact(artifact, by_decode, "the artifact", "")
    checkpoint = (canonicalize(captured.graph_module), captured.weights)
    return compare_variants(checkpoint, variants, folder, text, bound, NoProgress())


def _whole(captured: Captured, graph_module: GraphModule, text: ComparedText) -> list[Tensor]:
    eager = materialize(graph_module, captured.weights)
    with torch.no_grad():
        return [eager(torch.tensor(ids), torch.arange(len(ids))) for ids in text.inputs]


def _read(artifact: Path, text: ComparedText) -> list[Tensor]:
    with picompile_runtime.load(artifact) as engine:
        found = []
        for ids in text.inputs:
            engine.reset()
            found.append(torch.stack([torch.from_numpy(engine.decode(token)) for token in ids]))
        return found


@pytest.mark.slow("measures a model with each option")
def test_figures_are_those_of_whole_graphs(captured: Captured, tiny_artifact: Path, text: ComparedText) -> None:
    found = _compared(captured, tiny_artifact, text)
    reference = torch.cat(_whole(captured, canonicalize(captured.graph_module), text)).double().log_softmax(-1)
    targets = torch.cat(text.targets)
    nll = -reference.gather(1, targets[:, None]).mean()
    assert found.tokens == len(targets) == 161
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    logits = [
        *(_whole(captured, _quantized(captured, form), text) for form in ("q4", "q8")),
        _read(tiny_artifact, text),
    ]
    for line, each in zip(found.lines, logits, strict=True):
        own = torch.cat(each).double().log_softmax(-1)
        kl = (reference.exp() * (reference - own)).sum(-1).mean()
        ratio = (-own.gather(1, targets[:, None]).mean() - nll).exp()
        tolerance = 1e-4 if line.part == "weights" else 1e-2
        assert line.kl.value == pytest.approx(float(kl), rel=10 * tolerance, abs=1e-9)
        assert line.relative_change.value == pytest.approx(float(ratio) - 1, abs=1e-5)
        assert line.perplexity == pytest.approx(found.perplexity * (1 + line.relative_change.value), rel=1e-9)
        assert line.same_top == pytest.approx(float((reference.argmax(-1) == own.argmax(-1)).double().mean()), abs=0.02)
    assert found.lines[0].kl.value > 10 * found.lines[1].kl.value > 0
    lines = found.lines
    assert math.fsum(line.added_change for line in lines) == pytest.approx(lines[-1].relative_change.value, abs=1e-12)
    assert math.fsum(line.added_kl for line in lines) == pytest.approx(lines[-1].kl.value, abs=1e-12)
    for figure in (each for line in lines for each in (line.relative_change, line.kl)):
        assert figure.low is not None and figure.high is not None
        assert figure.low <= figure.value <= figure.high
    # The predictor is lossless, so that only the order of sums differs token by token.
    single = _compared(captured, tiny_artifact, text, by_decode=True).lines[-1]
    assert lines[-1].kl.value == pytest.approx(single.kl.value, rel=0.01)


def test_memory_holds_the_logits_of_one_window(
    captured: Captured, tiny_artifact: Path, text: ComparedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def spy(reference: Tensor, logits: Tensor, targets: Tensor) -> TokenDistances:
        alive = (each for each in gc.get_objects() if type(each) is Tensor and each.shape[1:] == (VOCABULARY,))
        stores = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
        rows.append(sum(stores.values()) // (4 * VOCABULARY))
        return measure_tokens(reference, logits, targets)

    monkeypatch.setattr(measure, "measure_tokens", spy)
    _compared(captured, tiny_artifact, text)
    longest = max(map(len, text.inputs))
    assert longest <= max(rows) <= 2 * longest < sum(map(len, text.inputs)) + longest
    assert len(rows) == 3 * len(text.windows)


def test_logits_that_are_not_numbers(
    captured: Captured, tiny_artifact: Path, text: ComparedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(reference: Tensor, logits: Tensor, targets: Tensor) -> TokenDistances:
        return measure_tokens(reference, logits * math.nan, targets)

    monkeypatch.setattr(measure, "measure_tokens", broken)
    with pytest.raises(UnsupportedModelError, match="logits of q4 contain NaN"):
        _compared(captured, tiny_artifact, text)
    folder = ComparedArtifact(tiny_artifact, False, "the artifact", "")
    with pytest.raises(KernelError, match="NaN"):
        compare_variants((canonicalize(captured.graph_module), captured.weights), [], folder, text, None, NoProgress())
