"""An artifact whose blocks follow a mask, in the engine: what it says of its neurons, its bytes and its perplexity."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from picompile_runtime import load, perplexity
from picompile_runtime.bench.bandwidth import bytes_per_token
from picompile_runtime.bench.perplexity import negative_log_likelihood, token_losses

if TYPE_CHECKING:
    from picompile.config import CompileOptions
    from picompile.frontend import Captured

IDS = np.random.default_rng(4).integers(0, 300, 50).tolist()
WINDOW = 24


def options() -> CompileOptions:
    from picompile.config import CompileOptions

    predictors = "insert-predictors{kind=sign,kinds=(1:learned),ranks=(1:9),inputs=(1:previous),thresholds=(0:0.49)}"
    return CompileOptions(quant="f16", kv_dtype="f32", context=64, passes=(predictors,))


@pytest.fixture(scope="module")
def captured(tiny_model: Path) -> Captured:
    """The tiny model, and the weights of a predictor beside its own."""
    import torch

    from picompile.frontend import load_model
    from picompile.testing import RandomWeights

    model = load_model(tiny_model)
    tensors = {name: model.weights.load(name) for name in model.weights.names()}
    random = torch.Generator().manual_seed(5)
    for name, shape in (("fc1", (9, 96)), ("fc2", (200, 9)), ("bias", (200,))):
        tensors[f"predictors.layers.1.{name}"] = torch.randn(shape, generator=random)
    return dataclasses.replace(model, weights=RandomWeights(tensors))


@pytest.fixture(scope="module")
def artifact(captured: Captured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from picompile.compile import compile_model

    folder = tmp_path_factory.mktemp("predicted") / "artifact"
    compile_model(captured, folder, options())
    return folder


def eager_nll(captured: Captured) -> float:
    """That of the graph, its weights in f16, predictors and all, in windows that know nothing of each other."""
    import torch

    from picompile.compile_steps import pipeline_passes
    from picompile.progress import NoProgress
    from picompile.steps import run_passes
    from picompile_passes.graph.materialize import materialize

    module = materialize(run_passes(captured, pipeline_passes(options()), NoProgress()), captured.weights)
    total = 0.0
    for start in range(0, len(IDS) - 1, WINDOW):
        ids = torch.tensor(IDS[start : start + WINDOW + 1])
        count = min(WINDOW, len(ids) - 1)
        with torch.no_grad():
            logits = module(ids[:count], torch.arange(count))
        total += float(torch.nn.functional.cross_entropy(logits, ids[1 : count + 1], reduction="sum"))
    return total


def test_perplexity_by_decode_is_that_of_the_predicted_graph(captured: Captured, artifact: Path) -> None:
    with load(artifact, threads=2) as engine:
        by_decode, by_prompt = (perplexity(engine, IDS, WINDOW, by) for by in (True, False))
    expected = eager_nll(captured)
    assert by_decode.nll == pytest.approx(expected, rel=1e-5)
    assert by_decode.perplexity == pytest.approx(math.exp(expected / (len(IDS) - 1)), rel=1e-4)
    # Prompts are read with every neuron.
    assert abs(by_prompt.nll - expected) > 1e-3 * expected


def test_losses_as_generated_are_those_of_one_token_after_another(artifact: Path) -> None:
    """Steps of several tokens are shorter, and have the same bits, also the last one of fewer."""
    with load(artifact, threads=2) as engine:
        assert engine.most_checked == 8
        found, firing = token_losses(engine, IDS[:22], "tokens"), engine.firing("all")
        engine.reset()
        engine.reset_firing()
        logits = np.stack([engine.decode(token).copy() for token in IDS[:21]])
        assert firing == engine.firing() == engine.firing("all")
    np.testing.assert_array_equal(found, negative_log_likelihood(logits, np.asarray(IDS[1:22])))


def test_bytes_per_token_count_predictors_in_full_and_blocks_by_computed_neurons(artifact: Path) -> None:
    """A row of 96 columns takes 192 bytes in f16, one of 9 columns, padded to 32, 64. Of signs, it is 64."""
    with load(artifact, threads=1) as engine:
        for token in IDS[:20]:
            engine.decode(token)
        program, firing = engine.artifact.program, engine.firing()
        others = sum(call.weight_bytes for call in program.functions["decode"] if call.op not in ("ffn", "predict"))
        measured = bytes_per_token(engine.artifact, firing, cached=10)
        assert engine.artifact.manifest.predictor == "learned+sign"
    parts = [(row.part.layer, row.part.predictor, row.part.neurons) for row in firing]
    assert parts == [(0, "sign", 200), (1, "learned", 200)]
    assert all(0.1 < row.fired_share < row.computed_share < 0.9 for row in firing)
    predictors = 200 * 64 + 9 * 192 + 200 * 64 + 200 * 4
    blocks = sum(row.computed_share for row in firing) * 200 * 3 * 192
    cache = 2 * 2 * 2 * 24 * 4 * 10  # layers, keys and values, heads, columns, bytes, tokens
    assert measured == pytest.approx(others + predictors + blocks + cache)


def test_same_logits_for_any_number_of_threads(artifact: Path) -> None:
    results = []
    for threads in (1, 2, 3):
        with load(artifact, threads=threads) as engine:
            results.append(np.stack([engine.decode(token) for token in IDS[:12]]))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
