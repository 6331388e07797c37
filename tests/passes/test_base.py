from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from picompile.testing import LLAMA, OPT, RandomWeights, build, random_weights, run, structure
from picompile_passes.base import Pass, Stage, copy_graph_module, set_stage, stage_of
from picompile_passes.errors import PassesError, StageError
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ADD, LINEAR, RMS_NORM
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize.raise_linear import RaiseLinear
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

PASSES = (InsertPredictors(), Partition({0: (1, 2, 3)}), Quantize())


@dataclass(frozen=True)
class DropFinalNorm(Pass):
    """Leaves out the last norm; `really` false does nothing, `by_rewriter` false does it without its rewriter."""

    name: ClassVar[str] = "drop-final-norm"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.CANONICAL

    really: bool = True
    by_rewriter: bool = True
    says_so: bool = False

    def rewrite(self, rewriter: Rewriter) -> None:
        if not self.really:
            return
        *_, norm = calls(rewriter.graph, RMS_NORM)
        if self.by_rewriter:
            rewriter.replace(norm, arguments(norm)["x"])
            return
        norm.replace_all_uses_with(arguments(norm)["x"])
        rewriter.graph.erase_node(norm)
        if self.says_so:
            rewriter.changed(arguments(rewriter.graph.output_node().args[0])["x"])


def test_dead_nodes_and_unread_weights_go():
    before = build(LLAMA)
    assert DropFinalNorm(really=False)(before).graph_module is before
    after = DropFinalNorm()(before).graph_module
    assert "model.norm.weight" in dict(before.named_parameters())
    assert "model.norm.weight" not in dict(after.named_parameters())
    assert all(node.users or node.op in ("placeholder", "output") for node in after.graph.nodes)
    # With a weight of ones and inputs of one size, leaving the norm out must show.
    assert not torch.allclose(run(after, random_weights(before)), run(before, random_weights(before)))


def test_a_pass_can_run_what_it_has_made_so_far():
    @dataclass(frozen=True)
    class Compare(Pass):
        name: ClassVar[str] = "compare"
        requires: ClassVar[Stage] = Stage.CANONICAL
        ensures: ClassVar[Stage] = Stage.CANONICAL

        def rewrite(self, rewriter: Rewriter) -> None:
            found.append(rewriter.graph_module(*inputs))
            DropFinalNorm().rewrite(rewriter)
            found.append(rewriter.graph_module(*inputs))

    found: list[torch.Tensor] = []
    before, inputs = materialize(build(LLAMA), random_weights(build(LLAMA))), (torch.arange(5), torch.arange(5))
    after = Compare()(before).graph_module
    assert torch.equal(found[0], before(*inputs))
    assert torch.equal(found[1], after(*inputs))
    assert not torch.equal(*found)


def test_a_change_without_the_rewriter_is_an_error_unless_the_pass_says_so():
    with pytest.raises(
        PassesError,
        match=r"pass drop-final-norm failed: RewriteError: DropFinalNorm\.rewrite removed node rms_norm_\d "
        r"without its rewriter, so the change would be lost: .* call rewriter\.changed\(node\)",
    ):
        DropFinalNorm(by_rewriter=False)(build(LLAMA))
    result = DropFinalNorm(by_rewriter=False, says_so=True)(build(LLAMA))
    assert result.modified
    assert graph_text(result.graph_module) == graph_text(DropFinalNorm()(build(LLAMA)).graph_module)


@dataclass(frozen=True)
class Misuse(Pass):
    """Does one thing to the graph that a pass must not do."""

    name: ClassVar[str] = "misuse"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.CANONICAL

    action: Callable[[Rewriter], object]

    def rewrite(self, rewriter: Rewriter) -> None:
        self.action(rewriter)


def linears(rewriter):
    return list(calls(rewriter.graph, LINEAR))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda r: linears(r)[0].update_arg(1, linears(r)[1].args[1]), "changed node linear without its rewriter"),
        (lambda r: r.graph.call_function(ADD, (r.graph.output_node().args[0],) * 2), "added node add_tensor"),
        (
            lambda r: r.replace(linears(r)[0], next(calls(build(OPT).graph, LINEAR))),
            "gave rewriter.replace the node linear of another graph: take nodes from rewriter.graph",
        ),
        (lambda r: r.replace(linears(r)[0], linears(r)[0]), "replaced linear by itself"),
        (
            lambda r: r.set_argument(linears(r)[0], "z", None),
            "set an argument of linear: picompile.linear.default has no argument 'z'",
        ),
        (
            lambda r: r.constant("table", torch.empty(3, device="meta")),
            "gave rewriter.constant the tensor table on meta: a constant is real",
        ),
        (
            lambda r: r.replace(linears(r)[0], linears(r)[-2]),
            "made .* which is computed after it: create .* with before=",
        ),
    ],
)
def test_errors_tell_the_author_of_a_pass_what_to_do(action, message):
    with pytest.raises(PassesError, match=f"pass misuse failed: RewriteError: Misuse.rewrite {message}"):
        Misuse(action)(build(LLAMA))


@pytest.mark.parametrize(
    ("pass_", "stage", "accepted"),
    [
        (InsertPredictors(), Stage.CAPTURED, "canonical to predicted"),
        (InsertPredictors(), Stage.PARTITIONED, "canonical to predicted"),
        (DropFinalNorm(), Stage.PREDICTED, "canonical"),
    ],
)
def test_a_graph_of_another_stage_is_refused(pass_, stage, accepted):
    graph_module = build(LLAMA)
    set_stage(graph_module, stage)
    text = f"^pass {pass_.name} needs a graph of stage {accepted}, but this one is {stage.name.lower()}$"
    with pytest.raises(StageError, match=text) as error:
        pass_(graph_module)
    assert error.value.exit_code == 2
    del graph_module.meta["stage"]
    with pytest.raises(StageError, match="does not say its stage"):
        pass_(graph_module)


def test_a_copy_is_changed_without_the_original():
    original = build(LLAMA)
    was = structure(original)
    copy = copy_graph_module(original)
    assert structure(copy) == was
    assert copy.meta == original.meta
    for node in copy.graph.nodes:
        node.meta["layer"] = 99
    copy.graph.output_node().args = (next(iter(calls(copy.graph, ADD))),)
    set_stage(copy, Stage.QUANTIZED)
    assert structure(original) == was
    assert stage_of(original) is Stage.CANONICAL


def test_passes_work_on_a_graph_that_torch_export_made():
    """The values of an exported graph, on the meta device and with its own symbol, are what new nodes build on."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)), torch.zeros(7, 8)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: tokens},)).run_decompositions({})
    captured = program.module(check_guards=False)
    set_stage(captured, Stage.CAPTURED)
    after = RaiseLinear()(captured).graph_module
    old, new = (list(calls(g.graph, op)) for g, op in ((captured, torch.ops.aten.linear.default), (after, LINEAR)))
    for a, b in zip(old, new, strict=True):
        assert a.meta["val"].shape == b.meta["val"].shape
        assert isinstance(b.meta["val"].shape[0], torch.SymInt)
        assert b.meta["nn_module_stack"] == a.meta["nn_module_stack"]
        assert b.meta["from"] == ("raise-linear", (a.name,))
    weights = RandomWeights({name: torch.randn(p.shape) for name, p in model.named_parameters()})
    x = torch.randn(3, 8)
    torch.testing.assert_close(materialize(after, weights)(x), materialize(captured, weights)(x), rtol=0, atol=2e-5)


@dataclass(frozen=True)
class CountUsers(Pass):
    """An analysis: it only annotates, at any stage from canonical on."""

    name: ClassVar[str] = "count-users"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage | None] = None

    def rewrite(self, rewriter: Rewriter) -> None:
        for node in calls(rewriter.graph, LINEAR):
            rewriter.annotate(node, users=len(node.users), why="counted, once")


def test_an_analysis_runs_at_any_stage_and_leaves_it():
    graph_module = build(OPT)
    for pass_ in (*PASSES, None):
        stage, was = stage_of(graph_module), structure(graph_module)
        result = CountUsers()(graph_module)
        assert result.modified
        assert stage_of(result.graph_module) is stage
        assert structure(graph_module) == was
        notes = [node.meta["notes"] for node in calls(result.graph_module.graph, LINEAR)]
        assert notes[0] == {"users": 1, "why": "counted, once"}
        # What is written already is no change.
        assert not CountUsers()(result.graph_module).modified
        assert "part head, users 1, why 'counted, once'" in graph_text(result.graph_module)
        if pass_ is not None:
            graph_module = pass_(graph_module).graph_module
    with pytest.raises(StageError, match="needs a graph of stage canonical to quantized, but this one is captured"):
        set_stage(graph_module, Stage.CAPTURED)
        CountUsers()(graph_module)


def test_provenance_names_only_nodes_of_the_input_graph():
    """The sources of a node are nodes of the graph that went in."""

    @dataclass(frozen=True)
    class TwoSteps(Pass):
        name: ClassVar[str] = "two-steps"
        requires: ClassVar[Stage] = Stage.CANONICAL
        ensures: ClassVar[Stage | None] = None

        def rewrite(self, rewriter: Rewriter) -> None:
            first = next(iter(calls(rewriter.graph, ADD)))
            step = rewriter.call(ADD, first.args, before=first, sources=(first,))
            last = rewriter.call(ADD, first.args, before=first, sources=(step, first))
            rewriter.replace(first, last)

    before = build(OPT)
    after = TwoSteps()(before).graph_module
    (made,) = [node for node in after.graph.nodes if "from" in node.meta]
    assert made.meta["from"] == ("two-steps", (next(iter(calls(before.graph, ADD))).name,))
