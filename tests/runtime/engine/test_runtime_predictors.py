"""Artifacts whose blocks follow a mask or leave out neurons below limits: their counts, bytes and perplexity."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from picompile_runtime import load, perplexity
from picompile_runtime.artifact.program import FeedForward
from picompile_runtime.bench.bandwidth import bytes_per_token
from picompile_runtime.bench.perplexity import negative_log_likelihood, token_losses
from picompile_runtime.engine.timing import FiringCounts

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.config import CompileOptions
    from picompile.frontend.captured import Captured

IDS = np.random.default_rng(4).integers(0, 300, 50).tolist()
WINDOW = 24


def options(predictors: str) -> CompileOptions:
    from picompile.config import CompileOptions

    passes = (f"insert-predictors{{{predictors}}}",)
    return CompileOptions(quant="f16", kv_dtype="f32", context=64, passes=passes)


LEARNED = "kind=sign,kinds=(1:learned),ranks=(1:9),inputs=(1:previous),thresholds=(0:0.49)"
LIMITS = "kind=none,kinds=(1:sign),thresholds=(1:0.49),gate_limits=(0),output_limits=(0,1)"
LIMIT = 0.1
NEURONS, ROW_BYTES = 200, 192  # rows of 96 columns in f16
CACHE_BYTES = 2 * 2 * 2 * 24 * 4 * 10  # layers, keys and values, heads, columns, bytes, tokens


@pytest.fixture(scope="module")
def captured(tiny_model: Path) -> Captured:
    """The tiny model, and the weights of a predictor and limits beside its own."""
    import torch

    from picompile.frontend.hf import load_model
    from picompile.testing import RandomWeights

    model = load_model(tiny_model)
    tensors = {name: model.weights.load(name) for name in model.weights.names()}
    random = torch.Generator().manual_seed(5)
    for name, shape in (("fc1", (9, 96)), ("fc2", (200, 9)), ("bias", (200,))):
        tensors[f"predictors.layers.1.{name}"] = torch.randn(shape, generator=random)
    for name in ("0.gate_limits", "0.output_limits", "1.output_limits"):
        tensors[f"predictors.layers.{name}"] = torch.full((NEURONS,), LIMIT)
    return dataclasses.replace(model, weights=RandomWeights(tensors))


def compiled(captured: Captured, folder: Path, predictors: str) -> Path:
    from picompile.compile import compile_model

    compile_model(captured, folder / "artifact", options(predictors))
    return folder / "artifact"


@pytest.fixture(scope="module")
def artifact(captured: Captured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(captured, tmp_path_factory.mktemp("predicted"), LEARNED)


def eager(captured: Captured, predictors: str) -> GraphModule:
    """The graph, its weights in f16, predictors and all."""
    from picompile.compile.passes import pipeline_passes, run_passes
    from picompile.progress import NoProgress
    from picompile_passes.graph.materialize import materialize

    passes = pipeline_passes(options(predictors))
    return materialize(run_passes(captured, passes, NoProgress()), captured.weights)


def eager_nll(captured: Captured) -> float:
    """That of windows that know nothing of each other."""
    import torch

    module, total = eager(captured, LEARNED), 0.0
    for start in range(0, len(IDS) - 1, WINDOW):
        ids = torch.tensor(IDS[start : start + WINDOW + 1])
        count = min(WINDOW, len(ids) - 1)
        with torch.no_grad():
            logits = module(ids[:count], torch.arange(count))
        total += float(torch.nn.functional.cross_entropy(logits, ids[1 : count + 1], reduction="sum"))
    return total


@pytest.mark.slow("compiles a model with predictors")
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
    assert measured == pytest.approx(others + predictors + blocks + CACHE_BYTES)


# ---- limits below which neurons are left out ----


SHORT = IDS[:20]


def counted_by_hand(captured: Captured) -> list[dict[str, int]]:
    """For each layer the rows of gate, up and down that tokens of SHORT read, from magnitudes of its neurons."""
    import torch
    from torch.nn.functional import linear, relu

    from picompile_passes.graph.materialize import node_values
    from picompile_passes.graph.nodes import arguments, calls
    from picompile_passes.graph.operands import SPARSE_FFN

    module, found = eager(captured, LIMITS), []
    values = node_values(module, torch.tensor(SHORT))
    for layer, block in enumerate(calls(module.graph, SPARSE_FFN)):
        x, mask, gate, up = (values[arguments(block)[name].name] for name in ("x", "mask", "gate", "up"))
        activated = relu(linear(x, gate))
        listed = activated.abs() > LIMIT if layer == 0 else mask
        kept = (listed & ((activated * linear(x, up)).abs() > LIMIT)).sum()
        gates = listed.numel() if layer == 0 else listed.sum()
        found.append({"gate": int(gates), "up": int(listed.sum()), "down": int(kept)})
    return found


@pytest.mark.slow("compiles a model with limits for seconds")
def test_bytes_per_token_are_those_of_the_rows_that_are_read(captured: Captured, tmp_path: Path) -> None:
    artifact = compiled(captured, tmp_path, LIMITS)
    with load(artifact, threads=1) as engine, load(artifact, threads=3) as three:
        assert all(np.array_equal(engine.decode(token), three.decode(token)) for token in SHORT)
        firing, program = engine.firing(), engine.artifact.program
        others = sum(call.weight_bytes for call in program.functions["decode"] if call.op != "ffn")
        measured = bytes_per_token(engine.artifact, firing, cached=10)
    counted = counted_by_hand(captured)
    assert all(0 < rows["down"] < rows["up"] < rows["gate"] or layer == 1 for layer, rows in enumerate(counted))
    assert 0 < counted[1]["down"] < counted[1]["up"] == counted[1]["gate"]
    blocks = sum(sum(rows.values()) for rows in counted) * ROW_BYTES / len(SHORT)
    assert measured == pytest.approx(others + CACHE_BYTES + blocks)
    assert [(row.part.rows, row.part.kept_rows) for row in firing] == [(2, 1), (3, 1)]
    with load(artifact, threads=2) as engine:
        assert np.isfinite([perplexity(engine, SHORT, 8, by_decode).nll for by_decode in (True, False)]).all()


def test_share_of_rows_that_are_read() -> None:
    for rows, kept_rows, read in ((3, 0, 0.5), (3, 1, 0.4), (2, 1, 0.35), (3, 2, 0.3), (1, 1, 0.2)):
        part = FeedForward(0, "all", 10, "none", 0, rows, kept_rows)
        assert FiringCounts(part, 0.5, 0.2).read_share == pytest.approx(read)
