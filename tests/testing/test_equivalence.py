import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from picompile.testing import (
    LLAMA,
    OPT,
    TOLERANCES,
    GraphShape,
    assert_equivalent,
    build,
    random_weights,
    run,
    with_predictors,
)
from picompile.testing.equivalence import near_jump
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import argument_position, arguments, calls
from picompile_passes.graph.operands import EMBEDDING, FFN, LAYER_NORM, LINEAR, PREDICT, RMS_NORM
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize

ONE_LAYER = GraphShape(layers=1, vocab=2)


def changed(shape, op, **values):
    """The graph of `shape` with other arguments for the first call of `op`."""
    graph_module = build(shape)
    node = next(iter(calls(graph_module.graph, op)))
    for name, value in values.items():
        node.update_arg(argument_position(node, name), value)
    graph_module.recompile()
    return graph_module


def swapped_gate_and_up():
    graph_module = build(LLAMA)
    node = next(iter(calls(graph_module.graph, FFN)))
    values = arguments(node)
    node.update_arg(argument_position(node, "gate"), values["up"])
    node.update_arg(argument_position(node, "up"), values["gate"])
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (OPT, changed(OPT, LINEAR, bias=None)),
        (OPT, changed(OPT, FFN, down_bias=None)),
        (OPT, changed(OPT, FFN, up_bias=None)),
        (LLAMA, changed(LLAMA, RMS_NORM, eps=1e-6)),
        (OPT, changed(OPT, LAYER_NORM, eps=1e-6)),
        (LLAMA, changed(LLAMA, FFN, activation="relu2")),
        (LLAMA, swapped_gate_and_up()),
        (GraphShape(window=3), build(LLAMA)),
    ],
    ids=["bias", "down bias", "up bias", "eps", "layer norm's eps", "activation", "gate and up", "window"],
)
def test_faults_are_found(before, after):
    with pytest.raises(AssertionError, match="the graph of stage canonical and the graph of stage canonical differ"):
        assert_equivalent(build(before), after, seed=1)


def test_a_failure_says_how_much_where_and_with_which_seed():
    before, after = build(OPT), changed(OPT, FFN, down_bias=None)
    form = (
        r"^the graph of stage canonical and the graph of stage canonical differ, 3 tokens, seed 5: "
        r"off by 0\.\d+ of the largest logit [\d.]+, tolerance 2e-05, at token [012], vocabulary entry \d+$"
    )
    with pytest.raises(AssertionError, match=form):
        assert_equivalent(before, after, tokens=(3,), seed=5)

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.right = materialize(before, random_weights(before))

        def forward(self, tokens, positions):
            logits = self.right(tokens, positions)
            logits[2, 17] += logits.abs().max()
            return logits

    with pytest.raises(AssertionError, match=r"module Wrong and .* at token 2, vocabulary entry 17"):
        assert_equivalent(Wrong(), before, weights=random_weights(before), tokens=(4,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_on_either_side(value):
    graph_module = build(LLAMA)
    weights = random_weights(graph_module)
    weights.tensors["lm_head.weight"][7] = value
    with pytest.raises(AssertionError, match="an expected logit is not finite, at token 0, vocabulary entry 7"):
        assert_equivalent(graph_module, graph_module, weights=weights)
    bad = changed(LLAMA, RMS_NORM, eps=-1e9)
    for bound in (None, 1e9):
        with pytest.raises(AssertionError, match="a computed logit is not finite"):
            assert_equivalent(graph_module, bad, bound=bound)


def test_logits_of_another_shape_are_a_failure():
    with pytest.raises(AssertionError, match=r"logits are \[2, 49\], not \[2, 50\]"):
        other = build(LLAMA)
        (*_, head) = calls(other.graph, LINEAR)
        head.update_arg(1, other.graph.call_function(torch.ops.aten.slice.Tensor, (head.args[1], 0, 0, 49)))
        head.prepend(head.args[1])
        other.recompile()
        assert_equivalent(build(LLAMA), other, tokens=(2,))


def test_a_bound_is_on_the_relative_error_in_the_two_norm():
    before = InsertPredictors()(build(LLAMA)).graph_module
    after = Quantize("q8")(before).graph_module
    weights = random_weights(before)
    expected, actual = run(before, weights), run(after, weights)
    assert 1e-4 < float((actual - expected).norm() / expected.norm()) < 0.1
    assert_equivalent(before, after, weights=weights, bound=0.1)
    with pytest.raises(AssertionError, match=r"relative error 0\.0\d+ in the 2-norm, where bound=0.0001"):
        assert_equivalent(before, after, weights=weights, bound=1e-4)
    with pytest.raises(AssertionError, match="tolerance 2e-05"):
        assert_equivalent(before, after, weights=weights)


class Eager(nn.Module):
    """The graph `tiny`, written as a module."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 24), nn.Linear(24, 50)
        self.norm = nn.LayerNorm(24)

    def forward(self, tokens, positions):
        return self.head(self.norm(self.embed(tokens)))


def tiny(eps=1e-5):
    b = GraphBuilder()
    x = b.call(EMBEDDING, b.tokens, b.parameter("embed.weight", 50, 24), 0)
    x = b.call(LAYER_NORM, x, b.parameter("norm.weight", 24), b.parameter("norm.bias", 24), eps)
    return b.finish(b.call(LINEAR, x, b.parameter("head.weight", 50, 24), b.parameter("head.bias", 50)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_module_may_compute_in_another_dtype(dtype):
    """It is compared by its own weights; graphs compute in float32 whatever the weights are."""
    module = Eager().to(dtype)
    assert_equivalent(module, tiny(), dtype=dtype)
    with pytest.raises(AssertionError, match=f"module Eager and .* differ.*tolerance {TOLERANCES[dtype]:g}"):
        assert_equivalent(module, tiny(eps=1.0), dtype=dtype)
    if dtype != torch.float32:
        with pytest.raises(AssertionError, match="tolerance 2e-05"):
            assert_equivalent(module, tiny())
    assert_equivalent(tiny(), tiny(), dtype=dtype)
    with pytest.raises(AssertionError, match="tolerance 2e-05"):
        assert_equivalent(tiny(), tiny(eps=1.1e-5), dtype=dtype, seed=1)


def at_the_threshold(shape, token, value):
    """Weights with which the first neuron of layer 0 has gate value `value` after `token` alone."""
    graph_module = build(shape)
    weights = random_weights(graph_module)
    real = materialize(graph_module, weights)
    (block,) = calls(real.graph, FFN)
    x = node_values(real, torch.tensor([token]))[block.args[0].name][0]
    weights.tensors["model.layers.0.mlp.gate_proj.weight"][0] = x * value / x.dot(x)
    return weights


def test_a_neuron_next_to_its_threshold_is_detected():
    shape = GraphShape(layers=1, vocab=2, activation="fatrelu(0.2)")
    weights = at_the_threshold(shape, token=1, value=0.2 + 3e-6)
    real = materialize(build(shape), weights)
    assert near_jump(real, torch.tensor([1]))
    assert not near_jump(real, torch.tensor([0]))
    # Where the activation does not jump, nothing is told.
    for activation in ("relu", "silu"):
        smooth = changed(shape, FFN, activation=activation)
        assert not near_jump(materialize(smooth, weights), torch.tensor([1]))


def test_other_tokens_are_tried_where_a_jump_may_be_why():
    shape = GraphShape(layers=1, vocab=4, activation="fatrelu(0.2)")
    before = build(shape)
    weights = at_the_threshold(shape, token=1, value=0.2 + 3e-6)
    # As good as the same model, but on the other side of its jump for one of the four tokens.
    after = changed(shape, FFN, activation=f"fatrelu({0.2 + 6e-6})")
    expected, actual = (run(each, weights, torch.tensor([1])) for each in (before, after))
    assert float((actual - expected).abs().max()) > 1e-3
    assert_equivalent(before, after, weights=weights, tokens=[1] * 20)
    # A fault shows all the same.
    wrong = changed(shape, FFN, activation="fatrelu(0.4)")
    with pytest.raises(AssertionError, match="tolerance 2e-05"):
        assert_equivalent(before, wrong, weights=weights, tokens=[1] * 20)


def always_at_the_threshold():
    """Two graphs and weights such that a jump may explain why they differ, whatever the tokens are."""
    shape = GraphShape(gated=False, activation="fatrelu(0.2)", layers=1)
    weights = random_weights(build(shape))
    weights.tensors["model.layers.0.fc1.weight"][0] = 0.0
    weights.tensors["model.layers.0.fc1.bias"][0] = 0.2 + 3e-6
    return build(shape), changed(shape, FFN, activation=f"fatrelu({0.2 + 6e-6})"), weights


def test_a_jump_each_time_is_an_error_which_hypothesis_gives_up():
    before, after, weights = always_at_the_threshold()
    with pytest.raises(AssertionError, match="; a neuron lay next to a jump in each of 5 draws, which may be why"):
        assert_equivalent(before, after, weights=weights)
    reached = []

    @settings(max_examples=10, phases=[Phase.generate])
    @given(jumps=st.booleans())
    def compare(jumps):
        assert_equivalent(before, after if jumps else before, weights=weights)
        reached.append(jumps)

    compare()
    assert set(reached) == {False}


@pytest.mark.parametrize("kind", ["testing-linear", "testing-low-rank"])
def test_predictors_jump_at_their_threshold(kind):
    predicted = InsertPredictors("none")(build(ONE_LAYER)).graph_module
    assert not near_jump(materialize(predicted, random_weights(predicted)), torch.arange(2))
    for threshold, near in ((0.0, True), (0.1, False)):
        graph_module = with_predictors(predicted, kind, threshold)
        weights = random_weights(graph_module)
        (mask,) = calls(graph_module.graph, PREDICT)
        weights.tensors[arguments(mask)["weights"][-1].target][3] = 0.0
        assert near_jump(materialize(graph_module, weights), torch.arange(2)) == near


def test_signs_jump_where_a_value_is_next_to_zero():
    before = build(ONE_LAYER)
    graph_module = InsertPredictors("sign")(before).graph_module
    weights = random_weights(before)
    real = materialize(graph_module, weights)
    assert not near_jump(real, torch.arange(2))
    # As many columns agree as may where a neuron is silent; x is 0, or nearly, in a column that does not.
    norm, gate = (f"model.layers.0.{name}.weight" for name in ("post_norm", "mlp.gate_proj"))
    (mask,) = calls(real.graph, PREDICT)
    x = node_values(real, torch.arange(1))[arguments(mask)["x"].name][0]
    row = torch.where(torch.arange(24) < 12, x, -x)
    weights.tensors[gate] = weights.tensors[gate].clone()
    weights.tensors[gate][3] = row
    weights.tensors[norm] = weights.tensors[norm].clone()
    weights.tensors[norm][20] = 1e-7
    assert near_jump(materialize(graph_module, weights), torch.arange(1))


def test_comparisons_of_captured_graphs_jump_too():
    class Thresholded(nn.Module):
        def forward(self, tokens, positions):
            x = tokens.to(torch.float32) / 10
            return torch.where(x > 0.3, x, 0.0), F.threshold(x, 0.7, 0.0), torch.where(x > 0, x, 0.0)

    example = (torch.tensor([1]), torch.tensor([0]))
    graph_module = torch.export.export(Thresholded(), example).run_decompositions({}).module(check_guards=False)
    near = [token for token in range(10) if near_jump(graph_module, torch.tensor([token]))]
    assert near == [3, 7]
