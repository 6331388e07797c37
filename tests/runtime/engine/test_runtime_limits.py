"""An artifact whose blocks leave out neurons below limits, in the engine: its perplexity, counts and bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from picompile_runtime import load, perplexity
from picompile_runtime.artifact.program import FeedForward
from picompile_runtime.bench.bandwidth import bytes_per_token
from picompile_runtime.engine.timing import FiringCounts

if TYPE_CHECKING:
    from picompile.frontend import Captured

PASSES = ("insert-predictors{kind=none,kinds=(1:sign),thresholds=(1:0.49),gate_limits=(0),output_limits=(0,1)}",)
IDS = np.random.default_rng(4).integers(0, 300, 20).tolist()
LIMIT = 0.1
NEURONS, ROW_BYTES = 200, 192  # rows of 96 columns in f16


@pytest.fixture(scope="module")
def captured(tiny_model: Path) -> Captured:
    """The tiny model, and limits beside its own weights."""
    import torch

    from picompile.frontend import load_model
    from picompile.testing import RandomWeights

    model = load_model(tiny_model)
    tensors = {name: model.weights.load(name) for name in model.weights.names()}
    for name in ("0.gate_limits", "0.output_limits", "1.output_limits"):
        tensors[f"predictors.layers.{name}"] = torch.full((NEURONS,), LIMIT)
    return dataclasses.replace(model, weights=RandomWeights(tensors))


@pytest.fixture(scope="module")
def artifact(captured: Captured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from picompile.compile import compile_model
    from picompile.config import CompileOptions

    folder = tmp_path_factory.mktemp("limits") / "artifact"
    compile_model(captured, folder, CompileOptions(quant="f16", kv_dtype="f32", context=64, passes=PASSES))
    return folder


def counted_by_hand(captured: Captured) -> list[dict[str, int]]:
    """For each layer the rows of gate, up and down that the tokens of IDS read, from the magnitudes of its neurons."""
    import torch
    from torch.nn.functional import linear, relu

    from picompile.compile_steps import pipeline_passes
    from picompile.config import CompileOptions
    from picompile.progress import NoProgress
    from picompile.steps import run_passes
    from picompile_passes.graph.materialize import materialize, node_values
    from picompile_passes.graph.nodes import arguments, calls
    from picompile_passes.graph.operands import SPARSE_FFN

    options = CompileOptions(quant="f16", kv_dtype="f32", context=64, passes=PASSES)
    module = materialize(run_passes(captured, pipeline_passes(options), NoProgress()), captured.weights)
    values, found = node_values(module, torch.tensor(IDS)), []
    for layer, block in enumerate(calls(module.graph, SPARSE_FFN)):
        x, mask, gate, up = (values[arguments(block)[name].name] for name in ("x", "mask", "gate", "up"))
        activated = relu(linear(x, gate))
        listed = activated.abs() > LIMIT if layer == 0 else mask
        kept = (listed & ((activated * linear(x, up)).abs() > LIMIT)).sum()
        gates = listed.numel() if layer == 0 else listed.sum()
        found.append({"gate": int(gates), "up": int(listed.sum()), "down": int(kept)})
    return found


@pytest.mark.slow("compiles a model with limits for seconds")
def test_bytes_per_token_are_those_of_the_rows_that_are_read(captured: Captured, artifact: Path) -> None:
    with load(artifact, threads=1) as engine, load(artifact, threads=3) as three:
        assert all(np.array_equal(engine.decode(token), three.decode(token)) for token in IDS)
        firing, program = engine.firing(), engine.artifact.program
        others = sum(call.weight_bytes for call in program.functions["decode"] if call.op != "ffn")
        cache = 2 * 2 * 2 * 24 * 4 * 10  # layers, keys and values, heads, columns, bytes, tokens
        measured = bytes_per_token(engine.artifact, firing, cached=10)
    counted = counted_by_hand(captured)
    assert all(0 < rows["down"] < rows["up"] < rows["gate"] or layer == 1 for layer, rows in enumerate(counted))
    assert 0 < counted[1]["down"] < counted[1]["up"] == counted[1]["gate"]
    blocks = sum(sum(rows.values()) for rows in counted) * ROW_BYTES / len(IDS)
    assert measured == pytest.approx(others + cache + blocks)
    assert [(row.part.rows, row.part.kept_rows) for row in firing] == [(2, 1), (3, 1)]
    with load(artifact, threads=2) as engine:
        assert np.isfinite([perplexity(engine, IDS, 8, by_decode).nll for by_decode in (True, False)]).all()


def test_share_of_rows_that_are_read() -> None:
    for rows, kept_rows, read in ((3, 0, 0.5), (3, 1, 0.4), (2, 1, 0.35), (3, 2, 0.3), (1, 1, 0.2)):
        part = FeedForward(0, "all", 10, "none", 0, rows, kept_rows)
        assert FiringCounts(part, 0.5, 0.2).read_share == pytest.approx(read)
