"""The mixtures that tests build compute what a mixture is, and passes keep it."""

import pytest
import torch

from helpers.mixtures import MIXTURES, EagerExperts, captured_mixture
from picompile.testing import GraphShape, assert_equivalent, build, random_weights
from picompile_passes.base import Stage
from picompile_passes.errors import PassOptionError, VerifyError
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, ROUTE, SPARSE_FFN
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.verify import verify


@pytest.mark.parametrize("name", ["silu", "relu", "shared"])
def test_experts_are_those_of_the_equations(name: str) -> None:
    shape = MIXTURES[name]
    graph_module = build(shape)
    weights = random_weights(graph_module, 2)
    values = node_values(materialize(graph_module, weights), torch.arange(17))
    for layer, block in enumerate(calls(graph_module.graph, FFN)):
        (result,) = block.users
        # Behind the block comes the one beside it, if there is one.
        y = values[(result if shape.shared else block).name]
        expected = EagerExperts(shape, weights, layer)(values[arguments(block)["x"].name])
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", list(MIXTURES))
def test_what_is_raised_already_stays(name: str) -> None:
    captured = captured_mixture(MIXTURES[name])
    canonical = canonicalize(captured.graph_module)
    verify(canonical, Stage.CANONICAL)
    assert_equivalent(captured.graph_module, canonical, weights=captured.weights)


def test_predictors_get_the_gains_of_their_block_and_name_neurons_of_chosen_experts_alone() -> None:
    graph_module = build(GraphShape(experts=3, ffn=8))
    for kind, options in (("sign", {}), ("learned", {"ranks": {0: 2, 1: 2}})):
        predicted = InsertPredictors(kind, **options)(graph_module).graph_module  # type: ignore[arg-type]
        verify(predicted, Stage.PREDICTED)
        values = node_values(materialize(predicted, random_weights(predicted)), torch.arange(9))
        for block in calls(predicted.graph, SPARSE_FFN):
            mask, gains = (values[arguments(block)[name].name] for name in ("mask", "gains"))
            assert not mask[(gains == 0).repeat_interleave(8, dim=-1)].any()
            assert mask.any()
            other = next(calls(predicted.graph, ROUTE))
        arguments(block)["mask"].update_arg(4, other)
        with pytest.raises(VerifyError, match="of other gains than its own"):
            verify(predicted, Stage.PREDICTED)


def test_experts_have_no_limits_or_parts() -> None:
    shape = GraphShape(experts=3, ffn=8)
    graph_module = build(shape)
    with pytest.raises(PassOptionError, match="one of experts"):
        InsertPredictors("none", output_limits=(0,))(graph_module)
    predicted = InsertPredictors()(graph_module).graph_module
    with pytest.raises(PassOptionError, match="experts cannot be split"):
        Partition({0: range(0, 24, 2)})(predicted)
    whole = Partition({0: range(24), 1: ()})(predicted).graph_module
    verify(whole, Stage.PARTITIONED)
