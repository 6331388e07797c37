"""A failure leaves a script behind that fails in the same way, on a small graph."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from picompile.testing import GraphShape, build, captured_decoders, random_weights, run, structure
from picompile_passes.base import Pass, Stage, stage_of
from picompile_passes.errors import PassError, PassOptionError, VerifyError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ADD, ATTENTION, EMBEDDING, LINEAR, SPARSE_FFN
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.source import graph_source
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.reproducer import reduce_graph
from picompile_passes.verify import verify

OPT = GraphShape(gated=False, layers=5)


@dataclass(frozen=True)
class DropBias(Pass):
    """Forgets the bias of `layer`, which its predictor still reads: the verifier objects."""

    name: ClassVar[str] = "drop-bias"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.PREDICTED

    layer: int = 3

    def rewrite(self, rewriter: Rewriter) -> None:
        for block in calls(rewriter.graph, SPARSE_FFN):
            if block.meta["layer"] == self.layer:
                rewriter.set_argument(block, "up_bias", None)


@dataclass(frozen=True)
class AddWeight(Pass):
    """Adds a weight where values are added: the operator objects, in the middle of the rewrite."""

    name: ClassVar[str] = "add-weight"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.PREDICTED

    def rewrite(self, rewriter: Rewriter) -> None:
        weight = arguments(next(calls(rewriter.graph, LINEAR)))["weight"]
        for node in calls(rewriter.graph, ADD):
            rewriter.set_argument(node, "other", weight)


@dataclass(frozen=True)
class CountAttentions(Pass):
    """Fails wherever there is more than one attention; with one, by an error of the same type elsewhere."""

    name: ClassVar[str] = "count-attentions"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[None] = None

    def rewrite(self, rewriter: Rewriter) -> None:
        if len(list(calls(rewriter.graph, ATTENTION))) < 2:
            raise ValueError("too few")
        raise ValueError("too many")


def failure(folder: Path, *passes: Pass) -> PassError:
    with pytest.raises(PassError) as error:
        Pipeline(passes, hook=verifying, reproducers=folder)(build(OPT))
    return error.value


def ended(script: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.slow("makes failing graphs smaller and runs their scripts")
def test_failures_are_reproduced_on_a_small_graph(tmp_path):
    error = failure(tmp_path, InsertPredictors(), DropBias(), Quantize())
    assert error.reproducer == tmp_path / "reproducer_drop_bias.py"
    assert str(error).splitlines()[0].endswith(f"to see it fail by itself, run {error.reproducer}")
    text = error.reproducer.read_text()
    assert "Pipeline((DropBias(layer=3),), hook=verifying)(graph())" in text
    # Of 5 layers of 15 calls: the block, its mask, and as many attentions as its number needs.
    assert text.count("b.call(") <= 12
    done = ended(error.reproducer)
    assert done.returncode == 1
    assert "pass drop-bias (the first of its pipeline) failed: VerifyError: rule 'predictors' broken" in done.stderr
    # An error within a pass says where.
    error = failure(tmp_path, InsertPredictors(), AddWeight())
    (marked,) = [line for line in error.context.splitlines() if line.startswith(">")]
    assert marked.split()[1].startswith("add")
    assert error.context in str(error)
    assert error.reproducer is not None
    assert "PropagateError: aten.add.Tensor does not accept" in ended(error.reproducer).stderr


def test_the_script_fails_as_long_as_the_pass_does(tmp_path, monkeypatch):
    error = failure(tmp_path, InsertPredictors(), DropBias())
    names: dict[str, object] = {"__name__": "reproducer"}
    exec(compile(error.reproducer.read_text(), "reproducer", "exec"), names)
    graph_module = names["graph"]()
    verify(graph_module, Stage.PREDICTED)
    with pytest.raises(PassError):
        Pipeline((DropBias(layer=3),), hook=verifying)(graph_module)
    monkeypatch.setattr(DropBias, "rewrite", lambda self, rewriter: False)
    Pipeline((DropBias(layer=3),), hook=verifying)(graph_module)


def test_a_smaller_graph_fails_in_the_same_line(tmp_path):
    with pytest.raises(PassError, match="too many") as error:
        Pipeline((CountAttentions(),), reproducers=tmp_path)(build(GraphShape(layers=2)))
    assert "ValueError: too many" in error.value.reproducer.read_text()


def test_what_is_no_fault_of_a_pass_writes_no_reproducer(tmp_path):
    """An error for the user, a failing hook, and a folder that cannot be written to, which hides no failure."""

    def full(*_):
        raise OSError("disk full")

    with pytest.raises(PassOptionError):
        Pipeline((InsertPredictors(), Partition({9: (1,)})), hook=verifying, reproducers=tmp_path)(build(OPT))
    with pytest.raises(PassError, match="disk full") as error:
        Pipeline((InsertPredictors(),), hook=full, reproducers=tmp_path)(build(OPT))
    assert error.value.reproducer is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    failed = failure(tmp_path / "file", InsertPredictors(), DropBias())
    assert (type(failed.cause), failed.reproducer) == (VerifyError, None)


@pytest.mark.parametrize(
    ("shape", "passes"),
    [
        (GraphShape(fused=True), ()),
        (OPT, (InsertPredictors(),)),
        (GraphShape(fused=True), (InsertPredictors(), Partition({1: (0, 3)}), Quantize())),
        (OPT, (InsertPredictors("sign", kinds={1: "learned"}, ranks={1: 2}), Partition({1: (0, 3)}), Quantize())),
    ],
    ids=["canonical", "predicted", "quantized", "learned"],
)
def test_source_builds_the_graph_again(shape, passes):
    before = Pipeline(passes)(build(shape)).graph_module
    after = rebuilt(before)
    verify(after, stage_of(before))
    made = [[node.name for node in g.graph.nodes if node.op == "call_function"] for g in (before, after)]
    assert made[0] == made[1]
    weights = random_weights(before)
    assert torch.equal(run(after, weights), run(before, weights))


def test_source_names_the_module_of_a_kind_that_is_not_ours():
    before = InsertPredictors("sign", kinds={1: "testing-linear"})(build(OPT)).graph_module
    lines = graph_source(before).splitlines()
    assert "import picompile.testing.weights  # a predictor kind" in lines
    assert not any("predictor_kinds" in line for line in lines)


@pytest.mark.slow("draws captured graphs; graphs of later stages are fast")
@settings(max_examples=8)
@given(before=captured_decoders(), seed=st.integers(0, 100))
def test_source_builds_captured_graphs_again(before, seed):
    weights = random_weights(before, seed)
    assert torch.equal(run(rebuilt(before), weights), run(before, weights))


def rebuilt(graph_module):
    names: dict[str, object] = {}
    exec(compile(graph_source(graph_module), "source", "exec"), names)
    return names["graph"]()


def test_reduction_keeps_the_property_in_a_small_graph():
    before = build(GraphShape(layers=6))
    was = structure(before)
    after = reduce_graph(before, lambda g: len(list(calls(g.graph, ATTENTION))) >= 2, seconds=30)
    assert structure(before) == was
    assert len(list(calls(after.graph, ATTENTION))) == 2
    assert not list(calls(after.graph, ADD))
    assert len([node for node in after.graph.nodes if node.op == "call_function"]) <= 5
    after.graph.lint()


def test_layers_are_numbered_anew():
    def keeps(graph_module):
        try:
            verify(graph_module, Stage.CANONICAL)
        except VerifyError:
            return False
        return any("layers.4.mlp" in name for name, _ in graph_module.named_parameters()) and any(
            calls(graph_module.graph, ATTENTION)
        )

    before = build(GraphShape(layers=5))
    after = reduce_graph(before, keeps, seconds=60)
    assert [arguments(node)["layer"] for node in calls(after.graph, ATTENTION)] == [0]
    assert reduce_graph(before, keeps, seconds=0) is before


def test_a_graph_by_hand():
    b = GraphBuilder()
    table = b.parameter("embed.weight", 9, 4)
    twice = b.call(ADD, *[b.call(EMBEDDING, b.tokens, table, 0, name="x", layer=3, neurons="hot")] * 2)
    shift = b.constant("shift", torch.arange(4.0))
    graph_module = b.finish(b.call(ADD, twice, b.read("shift")), Stage.CAPTURED)
    verify(graph_module, Stage.CAPTURED)
    node = graph_module.graph.find_nodes(op="call_function", target=EMBEDDING)[0]
    assert (node.name, node.meta["layer"], node.meta["neurons"]) == ("x", 3, "hot")
    assert shift.users == {}
    weights = random_weights(graph_module)
    expected = 2 * weights.load("embed.weight")[torch.arange(3)] + torch.arange(4.0)
    torch.testing.assert_close(run(graph_module, weights, torch.arange(3)), expected)
