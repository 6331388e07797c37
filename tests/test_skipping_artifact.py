"""An artifact whose projections leave out inputs: it passes all checks, computes what the graph does, and counts."""

from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from picompile.artifact.code import planned_code
from picompile.artifact.writer import ArtifactContents, make_room, write_artifact
from picompile.frontend.tokenizer_files import read_tokenizer
from picompile.predictors import OverlayWeights
from picompile.progress import NoProgress
from picompile.steps import capture_model, lower_graph, run_passes
from picompile_codegen.lowering.function import LowerOptions
from picompile_passes.graph.materialize import materialize
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.passes.skip_inputs import SkipInputs
from picompile_runtime.bench.bandwidth import bytes_per_token

pytestmark = pytest.mark.slow("compiles a whole model; one way through each kernel is fast")

BUNDLED = Path(__file__).resolve().parents[1] / "models" / "tiny-reglu"
TOKENS = np.random.default_rng(0).integers(0, 300, 24).tolist()


def test_an_artifact_end_to_end(tmp_path: Path) -> None:
    captured = capture_model(BUNDLED, NoProgress())
    layers, hidden = captured.facts.layers, captured.facts.hidden
    skip = SkipInputs(dict.fromkeys(range(layers), ("qkv", "attention_output")))
    passes = [*CANONICALIZE, InsertPredictors(), skip, Quantize("f16")]
    graph_module = run_passes(captured, passes, NoProgress(), verify=True)
    sites = {"qkv": 0.5, "attention_output": 0.05}
    limits = {
        f"predictors.layers.{i}.{site}_limits": torch.full((hidden,), value)
        for i in range(layers)
        for site, value in sites.items()
    }
    weights = OverlayWeights(captured.weights, dict.fromkeys(limits, (hidden,)), limits.__getitem__)
    lowered = lower_graph(graph_module, LowerOptions(64, 16, "float32", 2), NoProgress())
    output = tmp_path / "artifact"
    make_room(output, lowered)
    tokenizer = read_tokenizer(BUNDLED, captured.facts.vocab)
    code = planned_code("cpu")
    contents = ArtifactContents(captured, BUNDLED, tokenizer, "cpu", "f16", code, None, graph_module, lowered, weights)
    write_artifact(contents, output, NoProgress())

    expected = materialize(graph_module, weights)(torch.tensor(TOKENS), torch.arange(len(TOKENS))).detach().numpy()
    with picompile_runtime.load(output, threads=2) as engine:
        logits = np.stack([engine.decode(token).copy() for token in TOKENS])
        assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 1e-4
        inputs, firing = engine.inputs_read(), engine.firing()
        assert len(inputs) == 4 * layers
        assert all(0.02 < each.read_share < 0.98 for each in inputs)
        # Every projection's matrix is 2 bytes a weight, and all are read with all inputs.
        unread = sum(
            (1 - each.read_share) * engine.artifact.tensors[each.projection.weight].size_bytes for each in inputs
        )
        everything = bytes_per_token(engine.artifact, firing, cached=12)
        assert bytes_per_token(engine.artifact, firing, 12, inputs) == pytest.approx(everything - unread)
        assert sum(engine.artifact.tensors[each.projection.weight].size_bytes for each in inputs) < everything
        engine.reset()
        assert np.allclose(engine.prefill(TOKENS), logits[-1], rtol=0, atol=1e-3 * np.abs(logits).max())
