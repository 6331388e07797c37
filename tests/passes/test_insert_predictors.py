import pytest
import torch
from graphs import PROFILE
from hypothesis import example, given
from hypothesis import strategies as st

from picompile.testing import LLAMA, OPT, Shape, assert_equivalent, build, random_weights, shapes
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.materialize import materialize
from picompile_passes.nodes import arguments, calls
from picompile_passes.operands import FFN, PREDICT, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.stages import Stage, stage_of
from picompile_passes.verify import verify


def predictors(graph_module):
    return [arguments(node) for node in calls(graph_module.graph, PREDICT)]


@PROFILE
@example(shape=OPT, kind="auto", seed=0)
@example(shape=Shape(activation="fatrelu(0.02)", up_activation="relu"), kind="auto", seed=0)
@given(shape=shapes(), kind=st.sampled_from(["auto", "none"]), seed=st.integers(0, 100))
def test_predicted_graph_computes_the_same(shape, kind, seed):
    before = build(shape)
    result = InsertPredictors(kind)(before)
    assert result.modified
    assert stage_of(result.graph_module) is Stage.PREDICTED
    verify(result.graph_module, Stage.PREDICTED)
    assert_equivalent(before, result.graph_module, seed=seed)


def test_every_block_is_replaced_by_a_predictor_and_a_sparse_block():
    after = InsertPredictors("exact")(build(OPT)).graph_module
    assert not list(calls(after.graph, FFN))
    blocks = list(calls(after.graph, SPARSE_FFN))
    assert [block.meta["layer"] for block in blocks] == [0, 1]
    for block in blocks:
        assert arguments(block)["mask"].meta["layer"] == block.meta["layer"]
        assert arguments(block)["neurons"] is None


def test_exact_decides_on_the_gate_where_there_is_one():
    for up_activation in ("identity", "relu"):
        after = InsertPredictors("exact")(build(Shape(up_activation=up_activation))).graph_module
        assert [str(p["weights"][0].target) for p in predictors(after)] == [
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.1.mlp.gate_proj.weight",
        ]
        assert all(len(p["weights"]) == 1 for p in predictors(after))


def test_exact_decides_on_up_and_its_bias_where_there_is_no_gate():
    after = InsertPredictors("exact")(build(OPT)).graph_module
    assert [str(weight.target) for weight in predictors(after)[0]["weights"]] == [
        "model.layers.0.fc1.weight",
        "model.layers.0.fc1.bias",
    ]


@pytest.mark.parametrize(
    ("activation", "threshold"),
    [("relu", 0.0), ("relu2", 0.0), ("relu6", 0.0), ("fatrelu(0.25)", 0.25), ("fatrelu(0.0)", 0.0)],
)
def test_threshold_is_that_of_the_activation(activation, threshold):
    after = InsertPredictors("exact")(build(Shape(activation=activation))).graph_module
    assert [p["threshold"] for p in predictors(after)] == [threshold] * 2


@pytest.mark.parametrize("activation", ["relu", "relu2", "relu6", "fatrelu(0.1)"])
def test_mask_is_true_exactly_where_the_activation_is_not_zero(activation):
    before = build(Shape(activation=activation, layers=1))
    after = InsertPredictors("exact")(before).graph_module
    weights = random_weights(before)
    real = materialize(after, weights)
    seen = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, node):
            seen[node.name] = super().run_node(node)
            return seen[node.name]

    with torch.no_grad():
        Watch(real).run(torch.arange(9), torch.arange(9))
    mask = next(iter(calls(real.graph, PREDICT)))
    x = seen[arguments(mask)["x"].name]
    gate = x @ weights.tensors["model.layers.0.mlp.gate_proj.weight"].T
    fires = gate > (0.1 if activation.startswith("fatrelu") else 0.0)
    assert 0.1 < fires.float().mean() < 0.9
    assert torch.equal(seen[mask.name], fires)


def test_none_reads_up_alone():
    after = InsertPredictors("none")(build(OPT)).graph_module
    block = next(iter(calls(after.graph, SPARSE_FFN)))
    assert predictors(after)[0]["kind"] == "none"
    assert list(predictors(after)[0]["weights"]) == [arguments(block)["up"]]


@pytest.mark.parametrize(("activation", "kind"), [("relu", "exact"), ("fatrelu(0.1)", "exact"), ("silu", "none")])
def test_auto_is_exact_where_it_loses_nothing(activation, kind):
    after = InsertPredictors("auto")(build(Shape(activation=activation))).graph_module
    assert [p["kind"] for p in predictors(after)] == [kind, kind]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu"])
def test_exact_on_an_activation_that_is_never_silent_is_refused_in_one_line(activation):
    with pytest.raises(UnsupportedGraphError) as error:
        InsertPredictors("exact")(build(Shape(activation=activation)))
    assert str(error.value) == (
        "predictor exact needs an activation that can be silent, such as relu; "
        f"ffn of layer 0 uses {activation}: use predictor none"
    )
    assert error.value.exit_code == 3


def test_unknown_activation_is_refused():
    before = build(LLAMA)
    for block in calls(before.graph, FFN):
        block.update_arg(7, "swish7")
    with pytest.raises(UnsupportedGraphError, match="ffn of layer 0: unknown activation 'swish7'"):
        InsertPredictors()(before)


def test_unknown_kind_is_refused():
    with pytest.raises(PassOptionError, match="option kind of pass insert-predictors: 'magic' is not one of auto"):
        InsertPredictors("magic")


def test_second_run_changes_nothing():
    once = InsertPredictors()(build(LLAMA)).graph_module
    twice = InsertPredictors()(once)
    assert not twice.modified
    assert twice.graph_module is once
