from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest

from picompile.testing import LLAMA, OPT, build, structure
from picompile_passes.base import Pass, PassResult, Stage, set_stage, stage_of
from picompile_passes.errors import (
    PassError,
    PassOptionError,
    PropagateError,
    StageError,
    UnsupportedGraphError,
    VerifyError,
)
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.nodes import calls
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
    """A pipeline may be one of them, and nodes without a pass keep their names."""
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
    inner = Pipeline(LOWERING[:2], name="inner")
    assert (inner.requires, inner.ensures) == (Stage.CANONICAL, Stage.PARTITIONED)
    assert graph_text(Pipeline((inner, LOWERING[2]))(before).graph_module) == graph_text(by_hand)
    old, new = ([node.name for node in calls(g.graph, LAYER_NORM)] for g in (before, by_hand))
    assert old == new


def test_the_hook_sees_every_pass_with_what_it_got_and_gave():
    seen, before, one, other = [], build(LLAMA), Timings(), Timings()
    passes = (Nothing(), *LOWERING)
    hook = each(one, None, other, lambda *event: seen.append(event))
    result = Pipeline(passes, hook=hook)(before)
    assert [pass_ for _, pass_, _, _ in seen] == list(passes)
    assert seen[0][0] is seen[0][2] is before
    assert all(after is following for (_, _, after, _), (following, *_) in pairwise(seen))
    assert seen[-1][2] is result.graph_module
    assert all(seconds >= 0 for *_, seconds in seen)
    assert [name for name, _ in one.seconds] == [pass_.name for pass_ in passes]
    assert one == other


@pytest.mark.parametrize("passes", [(), (Nothing(), Nothing())])
def test_a_pipeline_that_changes_nothing_gives_back_its_input(passes):
    before = build(LLAMA)
    assert Pipeline(passes)(before) == PassResult(before, modified=False)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            (Quantize(), InsertPredictors()),
            "insert-predictors needs a graph of stage canonical to predicted, but this one is quantized "
            "(the order of passes is quantize, insert-predictors)",
        ),
        (
            (InsertPredictors(), Nothing()),
            "nothing needs a graph of stage canonical, but this one is predicted "
            "(the order of passes is insert-predictors, nothing)",
        ),
    ],
)
def test_a_wrong_order_is_an_error_before_anything_runs(passes, message):
    seen = []
    graph_module = build(LLAMA)
    set_stage(graph_module, passes[0].requires)
    with pytest.raises(StageError) as error:
        Pipeline(passes, hook=lambda *event: seen.append(event))(graph_module)
    assert str(error.value) == f"pass {message}"
    assert not seen


def test_a_failure_names_the_pass_and_those_before_it():
    cause = ValueError("no luck")
    with pytest.raises(PassError) as error:
        Pipeline((Nothing(), InsertPredictors(), Fail(cause), Quantize()))(build(LLAMA))
    assert str(error.value) == "pass fail (after nothing, insert-predictors) failed: ValueError: no luck"
    assert error.value.__cause__ is cause
    assert (error.value.pass_name, error.value.predecessors) == ("fail", ("nothing", "insert-predictors"))
    assert error.value.exit_code == 1
    graph_module = InsertPredictors()(build(LLAMA)).graph_module
    with pytest.raises(PassError, match=r"pass fail \(the first of its pipeline\) failed: PropagateError: odd shapes"):
        Pipeline((Fail(PropagateError("odd shapes")),))(graph_module)


@pytest.mark.parametrize("error", [UnsupportedGraphError("no silu"), PassOptionError("no such layer")])
def test_errors_for_the_user_are_raised_unchanged(error):
    with pytest.raises(type(error)) as raised:
        Pipeline((InsertPredictors(), Fail(error)))(build(LLAMA))
    assert raised.value is error


def test_verification_finds_the_pass_that_broke_the_graph(tmp_path):
    """The dumps are numbered, and end with the faulty graph."""
    folder, before = tmp_path / "ir" / "deep", build(OPT)
    passes = (Nothing(), InsertPredictors(), DropBias(), Quantize())
    with pytest.raises(PassError) as error:
        Pipeline(passes, hook=each(Dump(folder), verifying))(before)
    assert str(error.value).startswith(
        "pass drop-bias (after nothing, insert-predictors) failed: VerifyError: rule 'predictors' broken at "
        "sparse_ffn: its predictor exact reads"
    )
    assert isinstance(error.value.__cause__, VerifyError)
    assert error.value.__cause__.context in str(error.value)
    names = ["000_input", "001_nothing", "002_insert-predictors", "003_drop-bias"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.txt" for name in names]
    texts = [(folder / f"{name}.txt").read_text() for name in names]
    assert texts[0] == texts[1] == graph_text(before)
    assert "picompile.sparse_ffn(" in texts[2]
    assert "up_bias" not in texts[3]
    # Without the hook nobody looks.
    assert Pipeline((InsertPredictors(), DropBias()))(build(OPT)).modified


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PassOptionError, match=r"cannot make the folder for dumps .*file"):
        Dump(tmp_path / "file")
    folder = tmp_path / "ir"
    dump = Dump(folder)
    folder.rmdir()
    with pytest.raises(PassOptionError, match=r"cannot write the dump .*000_input.txt"):
        Pipeline((Nothing(),), hook=dump)(build(LLAMA))
