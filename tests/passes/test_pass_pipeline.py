from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest

from picompile.testing import LLAMA, OPT, build, structure
from picompile_passes.base import Pass, Stage, set_stage, stage_of
from picompile_passes.errors import (
    PassError,
    PassOptionError,
    PropagateError,
    StageError,
    UnsupportedGraphError,
    VerifyError,
)
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import LAYER_NORM, SPARSE_FFN
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Dump, Pipeline, Timings, each, verifying

LOWERING = (InsertPredictors(), Partition({0: (1, 2)}), Quantize())


@dataclass(frozen=True)
class Fail(Pass):
    """Raises what it is given."""

    name: ClassVar[str] = "fail"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.PREDICTED

    error: Exception

    def rewrite(self, rewriter: Rewriter) -> None:
        raise self.error


@dataclass(frozen=True)
class DropBias(Pass):
    """Breaks the graph: the predictor decides with a bias that the block has no more."""

    name: ClassVar[str] = "drop-bias"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.PREDICTED

    def rewrite(self, rewriter: Rewriter) -> None:
        for block in calls(rewriter.graph, SPARSE_FFN):
            rewriter.set_argument(block, "up_bias", None)


@dataclass(frozen=True)
class Nothing(Pass):
    """Changes nothing, at the canonical stage."""

    name: ClassVar[str] = "nothing"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.CANONICAL

    def rewrite(self, rewriter: Rewriter) -> None:
        pass


def test_passes_run_in_order_and_the_input_stays():
    before = build(OPT)
    was = structure(before)
    result = Pipeline(LOWERING)(before)
    by_hand = before
    for pass_ in LOWERING:
        by_hand = pass_(by_hand).graph_module
    assert result.modified
    assert stage_of(result.graph_module) is Stage.QUANTIZED
    assert graph_text(result.graph_module) == graph_text(by_hand)
    assert structure(before) == was


def test_the_hook_sees_every_pass_with_what_it_got_and_gave():
    seen = []
    before = build(LLAMA)
    passes = (Nothing(), *LOWERING)
    result = Pipeline(passes, hook=lambda *event: seen.append(event))(before)
    assert [pass_ for _, pass_, _, _ in seen] == list(passes)
    assert seen[0][0] is seen[0][2] is before
    assert all(after is following for (_, _, after, _), (following, *_) in pairwise(seen))
    assert seen[-1][2] is result.graph_module
    assert all(seconds >= 0 for *_, seconds in seen)


def test_a_pipeline_is_a_pass():
    inner = Pipeline(LOWERING[:2], name="inner")
    assert (inner.requires, inner.ensures) == (Stage.CANONICAL, Stage.PARTITIONED)
    whole = Pipeline((inner, LOWERING[2]))(build(OPT)).graph_module
    assert graph_text(whole) == graph_text(Pipeline(LOWERING)(build(OPT)).graph_module)


@pytest.mark.parametrize("passes", [(), (Nothing(), Nothing())])
def test_a_pipeline_that_changes_nothing_gives_back_its_input(passes):
    before = build(LLAMA)
    result = Pipeline(passes)(before)
    assert not result.modified
    assert result.graph_module is before


@pytest.mark.parametrize(
    ("passes", "stage", "message"),
    [
        (
            (Quantize(), InsertPredictors()),
            Stage.PREDICTED,
            "pass insert-predictors needs a graph of stage canonical to predicted, but this one is quantized "
            "(the order of passes is quantize, insert-predictors)",
        ),
        (
            (InsertPredictors(), Nothing()),
            Stage.CANONICAL,
            "pass nothing needs a graph of stage canonical, but this one is predicted "
            "(the order of passes is insert-predictors, nothing)",
        ),
        (
            LOWERING,
            Stage.CAPTURED,
            "pass insert-predictors needs a graph of stage canonical to predicted, but this one is captured "
            "(the order of passes is insert-predictors, partition, quantize)",
        ),
    ],
)
def test_a_wrong_order_is_an_error_before_anything_runs(passes, stage, message):
    seen = []
    graph_module = build(LLAMA)
    set_stage(graph_module, stage)
    with pytest.raises(StageError) as error:
        Pipeline(passes, hook=lambda *event: seen.append(event))(graph_module)
    assert str(error.value) == message
    assert not seen


def test_a_failure_names_the_pass_and_those_before_it():
    cause = ValueError("no luck")
    with pytest.raises(PassError) as error:
        Pipeline((Nothing(), InsertPredictors(), Fail(cause), Quantize()))(build(LLAMA))
    assert str(error.value) == "pass fail (after nothing, insert-predictors) failed: ValueError: no luck"
    assert error.value.__cause__ is cause
    assert (error.value.pass_name, error.value.predecessors) == ("fail", ("nothing", "insert-predictors"))
    assert error.value.exit_code == 1


def test_a_failure_of_the_first_pass_says_so():
    graph_module = InsertPredictors()(build(LLAMA)).graph_module
    with pytest.raises(PassError, match=r"pass fail \(the first of its pipeline\) failed: PropagateError: odd shapes"):
        Pipeline((Fail(PropagateError("odd shapes")),))(graph_module)


@pytest.mark.parametrize("error", [UnsupportedGraphError("no silu"), PassOptionError("no such layer")])
def test_errors_for_the_user_are_raised_unchanged(error):
    with pytest.raises(type(error)) as raised:
        Pipeline((InsertPredictors(), Fail(error)))(build(LLAMA))
    assert raised.value is error


def test_verification_finds_the_pass_that_broke_the_graph():
    with pytest.raises(PassError) as error:
        Pipeline((InsertPredictors(), DropBias(), Quantize()), hook=verifying)(build(OPT))
    assert str(error.value).startswith(
        "pass drop-bias (after insert-predictors) failed: VerifyError: rule 'predictors' broken at sparse_ffn: "
        "its predictor exact reads"
    )
    assert isinstance(error.value.__cause__, VerifyError)
    assert error.value.__cause__.context in str(error.value)
    # Without the hook nobody looks.
    assert Pipeline((InsertPredictors(), DropBias()))(build(OPT)).modified


def test_dumps_are_numbered_and_end_with_the_faulty_graph(tmp_path):
    folder = tmp_path / "ir" / "deep"
    before = build(OPT)
    with pytest.raises(PassError):
        Pipeline((Nothing(), InsertPredictors(), DropBias(), Quantize()), hook=each(Dump(folder), verifying))(before)
    assert [path.name for path in sorted(folder.iterdir())] == [
        "000_input.txt",
        "001_nothing.txt",
        "002_insert-predictors.txt",
        "003_drop-bias.txt",
    ]
    assert (folder / "000_input.txt").read_text() == (folder / "001_nothing.txt").read_text() == graph_text(before)
    assert "picompile.sparse_ffn(" in (folder / "002_insert-predictors.txt").read_text()
    assert "up_bias" not in (folder / "003_drop-bias.txt").read_text()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PassOptionError, match=r"cannot make the folder for dumps .*file"):
        Dump(tmp_path / "file")
    folder = tmp_path / "ir"
    dump = Dump(folder)
    folder.rmdir()
    with pytest.raises(PassOptionError, match=r"cannot write the dump .*000_input.txt"):
        Pipeline((Nothing(),), hook=dump)(build(LLAMA))


def test_timings_and_joined_hooks():
    one, other = Timings(), Timings()
    Pipeline(LOWERING, hook=each(one, None, other))(build(LLAMA))
    assert [name for name, _ in one.seconds] == ["insert-predictors", "partition", "quantize"]
    assert one == other


def test_nodes_without_a_pass_keep_their_names_through_the_pipeline():
    before = build(OPT)
    after = Pipeline(LOWERING)(before).graph_module
    old, new = ([node.name for node in calls(g.graph, LAYER_NORM)] for g in (before, after))
    assert old == new
    assert arguments(after.graph.output_node().args[0])["bias"] is None
