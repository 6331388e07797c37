import pytest
import torch

from picompile.testing import LLAMA, OPT, GraphShape, RandomWeights, assert_equivalent, build, random_weights, run
from picompile_passes.base import Effect, Stage
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, PREDICT, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.registry import make_pass
from picompile_passes.verify import verify


def predictors(graph_module):
    return [arguments(node) for node in calls(graph_module.graph, PREDICT)]


def test_every_block_is_replaced_by_a_predictor_and_a_sparse_block():
    """Exact decides on the gate where there is one, else on up and its bias; none reads up alone."""
    read = {
        ("exact", GraphShape()): ["mlp.gate_proj.weight"],
        ("exact", GraphShape(up_activation="relu")): ["mlp.gate_proj.weight"],
        ("exact", OPT): ["fc1.weight", "fc1.bias"],
        ("none", OPT): ["fc1.weight"],
    }
    for (kind, shape), names in read.items():
        before = build(shape)
        after = InsertPredictors(kind)(before).graph_module
        assert not list(calls(after.graph, FFN))
        blocks = list(calls(after.graph, SPARSE_FFN))
        assert [block.meta["layer"] for block in blocks] == [0, 1]
        for layer, block in enumerate(blocks):
            mask = arguments(block)["mask"]
            assert (mask.meta["layer"], arguments(mask)["kind"], arguments(block)["neurons"]) == (layer, kind, None)
            weights = [str(weight.target) for weight in arguments(mask)["weights"]]
            assert weights == [f"model.layers.{layer}.{name}" for name in names]
        assert_equivalent(before, after)


@pytest.mark.parametrize(
    ("activation", "kind", "threshold"),
    [
        *[("relu", "exact", 0.0), ("relu2", "exact", 0.0), ("relu6", "exact", 0.0), ("silu", "none", 0.0)],
        *[("fatrelu(0.25)", "exact", 0.25), ("fatrelu(0.0)", "exact", 0.0)],
    ],
)
def test_auto_is_exact_with_the_activations_threshold_where_that_loses_nothing(activation, kind, threshold):
    after = InsertPredictors("auto")(build(GraphShape(activation=activation))).graph_module
    assert [(p["kind"], p["threshold"]) for p in predictors(after)] == [(kind, threshold)] * 2


@pytest.mark.parametrize("activation", ["relu", "relu2", "relu6", "fatrelu(0.1)"])
def test_mask_is_true_exactly_where_the_activation_is_not_zero(activation):
    before = build(GraphShape(activation=activation, layers=1))
    after = InsertPredictors("exact")(before).graph_module
    weights = random_weights(before)
    values = node_values(materialize(after, weights), torch.arange(9))
    (mask,) = calls(after.graph, PREDICT)
    gate = values[arguments(mask)["x"].name] @ weights.tensors["model.layers.0.mlp.gate_proj.weight"].T
    fires = gate > (0.1 if activation.startswith("fatrelu") else 0.0)
    assert 0.1 < fires.float().mean() < 0.9
    assert torch.equal(values[mask.name], fires)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu"])
def test_exact_on_an_activation_that_is_never_silent_is_refused_in_one_line(activation):
    text = f"exact needs an activation that can be silent, such as relu; ffn of layer 0 uses {activation}: use .* none$"
    with pytest.raises(UnsupportedGraphError, match=text):
        InsertPredictors("exact")(build(GraphShape(activation=activation)))


def test_unknown_activation_is_refused():
    before = build(LLAMA)
    for block in calls(before.graph, FFN):
        block.update_arg(7, "swish7")
    with pytest.raises(UnsupportedGraphError, match="ffn of layer 0: unknown activation 'swish7'"):
        InsertPredictors()(before)


@pytest.mark.parametrize("shape", [LLAMA, OPT, GraphShape(fused=True, layers=2)], ids=["llama", "opt", "fused"])
def test_sign_reads_the_gating_matrix_alone(shape):
    after = InsertPredictors("sign", thresholds={1: 0.375})(build(shape)).graph_module
    verify(after, Stage.PREDICTED)
    for block in calls(after.graph, SPARSE_FFN):
        values = arguments(block)
        assert arguments(values["mask"])["weights"] == [values["up" if values["gate"] is None else "gate"]]
    assert [p["threshold"] for p in predictors(after)] == [0.5, 0.375]


def test_learned_reads_new_parameters_of_the_weight_source():
    before = build(GraphShape(hidden=18, ffn=11))
    pass_ = InsertPredictors("learned", kinds={1: "learned-relu"}, ranks={0: 3, 1: 5}, thresholds={1: -0.25})
    after = pass_(before).graph_module
    verify(after, Stage.PREDICTED)
    shapes = {name: tuple(weight.shape) for name, weight in after.named_parameters() if name.startswith("predictors")}
    expected = [{"fc1": (rank, 18), "fc2": (11, rank), "bias": (11,)} for rank in (3, 5)]
    assert shapes == {
        f"predictors.layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in expected[layer].items()
    }
    assert [(p["kind"], p["threshold"]) for p in predictors(after)] == [("learned", 0.0), ("learned-relu", -0.25)]
    assert [weight.target for p in predictors(after) for weight in p["weights"]] == list(shapes)
    assert not any(name.startswith("predictors") for name, _ in before.named_parameters())
    weights = random_weights(after)
    del weights.tensors["predictors.layers.1.fc2"]
    with pytest.raises(
        PassOptionError, match=r"^the weights hold no predictors.layers.1.fc2: a learned predictor needs"
    ):
        materialize(after, weights)


@pytest.mark.parametrize("shape", [GraphShape(layers=3), GraphShape(layers=3, gated=False, parallel=True)], ids=repr)
def test_inputs_of_learned_predictors(shape):
    after = InsertPredictors("learned", ranks={0: 1, 1: 2, 2: 3}, inputs={0: "stream", 2: "previous"})(build(shape))
    verify(after.graph_module, Stage.PREDICTED)
    blocks = [arguments(block)["x"] for block in calls(after.graph_module.graph, SPARSE_FFN)]
    read = [p["x"] for p in predictors(after.graph_module)]
    assert read == [arguments(blocks[0])["x"], blocks[1], blocks[1]]


def test_computed_neurons_are_those_that_the_predictor_predicts():
    """The logits are those of a model whose down rows are zero where the predictor, computed apart, says no."""
    before = build(GraphShape(layers=1))
    after = InsertPredictors("learned", ranks={0: 2}, inputs={0: "stream"}, thresholds={0: 0.1})(before).graph_module
    weights = random_weights(after)
    ids = torch.arange(1, 6)
    real = materialize(before, weights)
    values = node_values(real, ids)
    (block,) = calls(real.graph, FFN)
    stream = values[arguments(arguments(block)["x"])["x"].name]
    fc1, fc2, bias = (weights.tensors[f"predictors.layers.0.{name}"] for name in ("fc1", "fc2", "bias"))
    fires = stream @ fc1.T @ fc2.T + bias > 0.1
    assert 0.1 < fires.float().mean() < 0.9
    for token in range(len(ids)):
        name = "model.layers.0.mlp.down_proj.weight"
        alone = RandomWeights(weights.tensors | {name: weights.tensors[name] * fires[token]})
        torch.testing.assert_close(run(after, weights, ids)[token], run(before, alone, ids)[token], rtol=0, atol=1e-4)


def test_a_predictor_that_keeps_every_neuron_loses_nothing():
    before = build(LLAMA)
    everything = {0: -1e9, 1: -1.0}
    after = InsertPredictors("learned", {1: "sign"}, {0: 2}, {0: "stream"}, everything)(before).graph_module
    assert_equivalent(before, after, weights=random_weights(after))


@pytest.mark.parametrize(
    ("options", "effect"),
    [
        ({}, Effect.EXACT),
        ({"kind": "exact", "kinds": {0: "none", 1: "auto"}}, Effect.EXACT),
        ({"kind": "sign"}, Effect.SKIPS),
        ({"kinds": {7: "learned"}, "ranks": {7: 1}}, Effect.SKIPS),
        ({"kind": "none", "gate_limits": (0, 1)}, Effect.SKIPS),
        ({"kind": "none", "output_limits": (0, 1)}, Effect.SKIPS),
    ],
)
def test_the_effect_is_that_of_the_kinds(options, effect):
    assert InsertPredictors(**options).effect is effect
    assert InsertPredictors.default_effect is Effect.EXACT


def test_options_can_be_given_as_text():
    text = "kind=sign,kinds=(1:learned,0:none),ranks=(1:32),inputs=(1:previous),thresholds=(1:-0.5,2:0.45)"
    given = make_pass(f"insert-predictors{{{text}}}")
    assert given == InsertPredictors("sign", {0: "none", 1: "learned"}, {1: 32}, {1: "previous"}, {1: -0.5, 2: 0.45})
    assert list(given.kinds) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "magic"}, "option kind of pass insert-predictors: 'magic' is not one of auto"),
        ({"kinds": {1: "magic"}}, "option kinds of pass insert-predictors: layer 1: 'magic' is not one of auto"),
        ({"inputs": {1: "norm"}}, "inputs .*: layer 1: 'norm' is not one of block, stream, prev"),
        ({"ranks": {1: 0}}, "option ranks of pass insert-predictors: layer 1: 0 is not 1 or more"),
        ({"thresholds": {0: float("nan")}}, "thresholds of pass insert-predictors: layer 0: nan is not finite"),
        ({"thresholds": {0: float("-inf")}}, "thresholds of pass insert-predictors: layer 0: -inf is not finite"),
    ],
)
def test_options_that_fit_no_graph_are_refused_at_once(options, message):
    with pytest.raises(PassOptionError, match=message):
        InsertPredictors(**{"kind": "learned"} | options)


RANKS = {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": {0: 2}}, "option ranks of pass insert-predictors: layer 1: predictor learned needs one"),
        ({"kinds": {1: "sign"}}, "ranks .*: layer 1: predictor sign has no rank"),
        ({"ranks": RANKS | {2: 4}}, "ranks .*: layer 2: the graph has no feed-forward block of that number"),
        ({"kinds": {9: "none"}}, "kinds .*: layer 9: the graph has no feed-forward block"),
        ({"inputs": {0: "previous"}}, "inputs .*: layer 0: previous .*: there is no block in the layer before"),
        (
            {"ranks": {1: 2}, "kinds": {0: "sign"}, "inputs": {0: "stream"}},
            "inputs .*: layer 0: predictor sign reads the block's own input only",
        ),
        (
            {"ranks": {1: 2}, "kinds": {0: "exact"}, "thresholds": {0: 0.5}},
            "thresholds .*: layer 0: predictor exact takes none",
        ),
    ],
)
def test_options_that_do_not_fit_the_graph_are_refused(options, message):
    with pytest.raises(PassOptionError, match=message):
        InsertPredictors("learned", **{"ranks": RANKS} | options)(build(LLAMA))


def test_without_a_norm_there_is_no_stream():
    before = build(OPT)
    for block in calls(before.graph, FFN):
        block.update_arg(0, arguments(block.args[0])["x"])
    with pytest.raises(PassOptionError, match="layer 1: stream is not available: the block's input is not from a norm"):
        InsertPredictors("learned", ranks=RANKS, inputs={1: "stream"})(before)


SWIGLU = GraphShape(activation="silu", layers=3)
LIMITS = {"gate_limits": (1, 0), "output_limits": (1,)}


def test_limits_are_new_parameters_of_the_weight_source():
    """They change what is computed unless they are zero."""
    before = build(SWIGLU)
    after = InsertPredictors("none", **LIMITS)(before).graph_module
    verify(after, Stage.PREDICTED)
    blocks = list(calls(after.graph, SPARSE_FFN))
    read = [[arguments(block)[name] for name in LIMITS] for block in blocks]
    assert [[limits and limits.target for limits in of_block] for of_block in read] == [
        ["predictors.layers.0.gate_limits", None],
        ["predictors.layers.1.gate_limits", "predictors.layers.1.output_limits"],
        [None, None],
    ]
    assert all(tuple(limits.meta["val"].shape) == (SWIGLU.ffn,) for of_block in read for limits in of_block if limits)
    assert len(blocks[-1].args) == 11
    weights, ids = random_weights(after), torch.arange(1, 6)
    assert not torch.allclose(run(before, weights, ids), run(after, weights, ids), atol=1e-3)
    zeros = {name: value * 0 for name, value in weights.tensors.items() if name.endswith("limits")}
    assert_equivalent(before, after, weights=RandomWeights(weights.tensors | zeros))
    del weights.tensors["predictors.layers.0.gate_limits"]
    with pytest.raises(
        PassOptionError, match=r"^the weights hold no predictors.layers.0.gate_limits: limits need values"
    ):
        materialize(after, weights)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            OPT,
            {"gate_limits": (1,)},
            "gate_limits .*: layer 1: the block has no gate; give its limits in output_limits",
        ),
        (SWIGLU, {"gate_limits": (3,)}, "gate_limits .*: layer 3: the graph has no feed-forward block of that number"),
        (SWIGLU, {"output_limits": (-1,)}, "output_limits .*: layer -1: the graph has no feed-forward block"),
        (GraphShape(ffn_norm=True), {"output_limits": (0,)}, "output_limits .*: layer 0: the block normalizes its"),
        (GraphShape(ffn_norm=True), {"gate_limits": (0,)}, "gate_limits .*: layer 0: the block normalizes its neurons"),
    ],
)
def test_limits_that_a_block_cannot_have_are_refused(shape, options, message):
    with pytest.raises(PassOptionError, match=message):
        InsertPredictors("none", **options)(build(shape))
