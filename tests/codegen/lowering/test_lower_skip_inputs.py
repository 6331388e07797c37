"""Programs whose projections leave out small inputs, against the eager graph: tokens, prompts, several sequences."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner, quantized, relative_error
from picompile.testing import LLAMA, OPT, GraphShape, RandomWeights, random_weights, run
from picompile_codegen.lowering import slices
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.placement import Placement
from picompile_passes.base import Pass
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_LINEAR
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.skip_inputs import SkipInputs

CONTEXT, CHUNK, SEQUENCES = 12, 4, 3
TEXT = np.random.default_rng(4).integers(0, 50, CONTEXT).tolist()

ATTENTION = ("qkv", "attention_output")
CASES: dict[str, tuple[GraphShape, str, tuple[Pass, ...]]] = {
    "llama": (LLAMA, "f16", (InsertPredictors(), SkipInputs({0: ATTENTION, 1: ("qkv",)}))),
    "opt": (OPT, "q8", (SkipInputs({0: ATTENTION, 1: ATTENTION}), InsertPredictors())),
    "blocks": (
        GraphShape(activation="silu", kv_heads=1),
        "f16",
        (SkipInputs({0: (*ATTENTION, "ffn_input", "down"), 1: ("ffn_input",)}), InsertPredictors("none")),
    ),
}


@dataclass(frozen=True)
class Compiled:
    graph_module: GraphModule
    weights: RandomWeights
    lowered: Lowered
    runner: Runner
    expected: torch.Tensor
    tolerance: float


@pytest.fixture(scope="module", params=list(CASES))
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    shape, form, passes = CASES[request.param]
    graph_module = quantized(shape, *passes, form=form)
    weights = random_weights(graph_module)
    for name, value in weights.tensors.items():
        if name.endswith("_limits"):
            weights.tensors[name] = value * (0.02 if "attention_output" in name or "down" in name else 0.5)
    lowered = lower(graph_module, LowerOptions(CONTEXT, CHUNK, "float32", SEQUENCES))
    runner = Runner(tmp_path_factory.mktemp("skip") / "host.so", lowered, graph_module, weights)
    expected = run(graph_module, weights, torch.tensor(TEXT))
    return Compiled(graph_module, weights, lowered, runner, expected, 2e-5 if form == "f16" else 0.04)


@pytest.mark.slow("compiles programs")
def test_tokens_and_what_they_count(compiled: Compiled) -> None:
    compiled.runner.slot = 0
    compiled.runner.stats()
    assert relative_error(compiled.runner.decode(TEXT), compiled.expected) < compiled.tolerance
    counts, program = compiled.runner.stats(), compiled.lowered.program
    projections = list(calls(compiled.graph_module.graph, SPARSE_LINEAR))
    assert len(program.projections) == len(projections)
    rows = [each.stats_row for each in (*program.ffn, *program.projections)]
    assert sorted(rows) == list(range(len(counts)))
    values = node_values(materialize(compiled.graph_module, compiled.weights), torch.tensor(TEXT))
    for each, node in zip(program.projections, projections, strict=True):
        x, limits = (values[arguments(node)[name].name] for name in ("x", "limits"))
        assert each.layer == node.meta["layer"]
        assert each.inputs == x.shape[1]
        assert each.weight.endswith(".inputs")
        assert compiled.lowered.weights.tensors[each.weight].shape[0] == each.inputs
        read = int((x.abs() > limits).sum())
        assert read > 0
        # Inputs beside a limit fall to the other side where sums are rounded in another way.
        assert counts[each.stats_row].tolist() == pytest.approx([read, read], abs=0.03 * x.numel())


def check_prompt(compiled: Compiled, runner: Runner) -> None:
    """Logits of a second chunk, and of the last token."""
    runner.slot, runner.position = 1, 0
    runner.run("prefill", TEXT[:CHUNK])
    scored = runner.run("score", TEXT[CHUNK : 2 * CHUNK])
    last = runner.run("prefill_last", TEXT[2 * CHUNK :])
    assert scored is not None and last is not None
    expected = torch.cat([compiled.expected[CHUNK : 2 * CHUNK], compiled.expected[-1:]])
    assert relative_error(torch.cat([scored, last[:1]]), expected) < compiled.tolerance


@pytest.mark.slow("compiles programs that take seconds each; one of blocks is fast", but=("blocks",))
def test_prompts_and_several_sequences(compiled: Compiled) -> None:
    """Each sequence has the logits of the eager graph, and the bits that it has alone."""
    check_prompt(compiled, compiled.runner)
    texts = [TEXT, TEXT[::-1], TEXT[3:] + TEXT[:3]]
    alone = compiled.runner.check_sequences(texts)
    expected = run(compiled.graph_module, compiled.weights, torch.tensor(texts[1]))
    assert relative_error(alone[1], expected) < compiled.tolerance


@pytest.mark.slow("compiles programs that take seconds each; one of blocks is fast")
@pytest.mark.parametrize("stage_bytes", [slices.STAGE_BYTES, 1])
def test_prompts_on_an_accelerator(
    compiled: Compiled, stage_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the head alone. Matrices come to it whole, and stay with the host if they are larger than a stage."""
    monkeypatch.setattr(slices, "STAGE_BYTES", stage_bytes)
    options = LowerOptions(CONTEXT, CHUNK, "float32", SEQUENCES, "cpu", Placement(head=True))
    lowered = lower(compiled.graph_module, options)
    calls_of = lowered.program.functions["prefill_last"]
    devices = {call.device for call in calls_of if call.kernel.startswith("sparse_linear")}
    assert devices == {"device" if stage_bytes > 1 else "host"}
    check_prompt(compiled, Runner(tmp_path / "host.so", lowered, compiled.graph_module, compiled.weights))
