"""A pass that skips neurons is held to what it does with all of them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from picompile.cli.passes import _EFFECTS
from picompile.testing import OPT, GraphShape, build, check_run, random_weights
from picompile.testing.checking import PropertyError
from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import PREDICT, SPARSE_FFN
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors


@dataclass(frozen=True)
class SkipMore(Pass):
    """Raises every threshold to 0.75; with `and_more` it also forgets the biases of down."""

    name: ClassVar[str] = "skip-more"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.PREDICTED
    default_effect: ClassVar[Effect] = Effect.SKIPS

    and_more: bool = False

    def rewrite(self, rewriter: Rewriter) -> None:
        for mask in calls(rewriter.graph, PREDICT):
            if arguments(mask)["threshold"] != 0.75:
                rewriter.set_argument(mask, "threshold", 0.75)
        for block in calls(rewriter.graph, SPARSE_FFN):
            if self.and_more and arguments(block)["down_bias"] is not None:
                rewriter.set_argument(block, "down_bias", None)


class SaysExact(SkipMore):
    default_effect: ClassVar[Effect] = Effect.EXACT


class NeverDone(SkipMore):
    def rewrite(self, rewriter: Rewriter) -> None:
        for mask in calls(rewriter.graph, PREDICT):
            rewriter.set_argument(mask, "threshold", arguments(mask)["threshold"] + 0.75)


def predicted():
    before = InsertPredictors("sign")(build(OPT)).graph_module
    return before, random_weights(before)


def test_a_pass_may_skip_neurons_where_it_says_so():
    """It may do nothing else."""
    check_run(SkipMore(), *predicted())
    for pass_ in (SaysExact(), SkipMore(and_more=True)):
        with pytest.raises(PropertyError, match="property equivalent does not hold"):
            check_run(pass_, *predicted())


def test_a_second_run_may_modify_nothing_unless_the_pass_says_so():
    with pytest.raises(PropertyError, match="property idempotent does not hold"):
        check_run(NeverDone(), *predicted())


@pytest.mark.parametrize("kind", ["learned", "sign"])
def test_predictors_that_skip_keep_every_property(kind):
    before = build(GraphShape(activation="silu"))
    ranks = {0: 2, 1: 3} if kind == "learned" else {}
    check_run(InsertPredictors(kind, ranks=ranks), before, random_weights(before))


@dataclass(frozen=True)
class AddWeight(Pass):
    """Makes a parameter that is no predictor's."""

    name: ClassVar[str] = "add-weight"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.CANONICAL
    default_effect: ClassVar[Effect] = Effect.CHANGES

    def rewrite(self, rewriter: Rewriter) -> None:
        end = rewriter.graph.output_node().args[0]
        rows, columns = arguments(end)["weight"].meta["val"].shape
        weight = rewriter.parameter("other.head", (rows, columns), sources=(end,))
        rewriter.set_argument(end, "weight", weight)


def test_another_new_parameter_is_a_fault():
    before = build(OPT)
    with pytest.raises(PropertyError, match=r"property keeps-weights .*other\.head is new"):
        check_run(AddWeight(), before, random_weights(before))


def test_every_effect_is_explained_by_the_command():
    assert set(_EFFECTS) == {effect.value for effect in Effect}
