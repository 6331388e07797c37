"""Projections that leave out small inputs: the operator, and the pass that makes it of others."""

import math

import pytest
import torch
import transformers

from helpers.families import VARIANTS
from picompile.frontend import capture_config
from picompile.testing import (
    LLAMA,
    OPT,
    GraphShape,
    RandomWeights,
    assert_equivalent,
    build,
    every_neuron,
    random_weights,
)
from picompile_passes.base import Effect, Stage
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    ELEMENTWISE,
    EMBEDDING,
    FFN,
    LINEAR,
    RMS_NORM,
    SPARSE_LINEAR,
    TRANSPOSE,
)
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.passes.skip_inputs import SITES, SkipInputs
from picompile_passes.registry import make_pass
from picompile_passes.verify import verify

sparse_linear = torch.ops.picompile.sparse_linear
OF_ATTENTION = ("qkv", "attention_output")


def everywhere(graph_module, names=OF_ATTENTION):
    return SkipInputs({arguments(node)["layer"]: tuple(names) for node in calls(graph_module.graph, ATTENTION)})


def projections(graph_module):
    return [arguments(node) for node in calls(graph_module.graph, SPARSE_LINEAR)]


def with_limits(weights, limit):
    """Return weights in which every limit is `limit`, and all else is as in `weights`."""
    tensors = weights.tensors
    limits = {name: torch.full_like(value, limit) for name, value in tensors.items() if name.endswith("_limits")}
    return RandomWeights(tensors | limits)


def test_inputs_above_their_limits_are_multiplied():
    x = torch.tensor([[1.0, -2.0, 0.5], [-0.25, 0.0, 3.0]])
    weight = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    limits, bias = torch.tensor([0.5, 2.0, 0.25]), torch.tensor([0.5, -0.5])
    expected = torch.tensor([[1.0 + 0.5 * 4, 10 + 0.5 * 40], [12.0, 120.0]])
    assert torch.equal(sparse_linear(x, weight, limits, None), expected)
    assert torch.equal(sparse_linear(x, weight, limits, bias), expected + bias)
    for limit in (-1.0, 0.0):
        assert torch.equal(sparse_linear(x, weight, torch.full((3,), limit), None), x @ weight)
    torch.library.opcheck(sparse_linear, (x, weight, limits, bias), raise_exception=True)


def test_what_is_no_number_shows_and_what_is_infinite_can_be_left_out():
    x = torch.tensor([[math.nan, 1.0], [1.0, math.inf]])
    result = sparse_linear(x, torch.ones(2, 1), torch.full((2,), math.inf), None)
    assert result[0].isnan().all()
    assert result[1].item() == 0.0
    assert sparse_linear(x, torch.ones(2, 1), torch.tensor([0.0, math.nan]), None)[1].item() == math.inf


@pytest.mark.parametrize("shape", [LLAMA, OPT, GraphShape(parallel=True)], ids=["llama", "opt", "parallel"])
def test_every_projection_of_attention_is_replaced(shape):
    before = build(shape)
    after = everywhere(before)(before).graph_module
    # The head is left.
    assert len(list(calls(after.graph, LINEAR))) == 1
    found = [(node.meta["layer"], arguments(node)) for node in calls(after.graph, SPARSE_LINEAR)]
    assert [(layer, values["limits"].target) for layer, values in found] == [
        (layer, f"predictors.layers.{layer}.{site}_limits")
        for layer in (0, 1)
        for site in ["qkv"] * 3 + ["attention_output"]
    ]
    for _, values in found:
        assert values["weight"].target is TRANSPOSE
        assert values["weight"].all_input_nodes[0].target.endswith("proj.weight")
    assert_equivalent(before, after, weights=with_limits(random_weights(after), -1.0))
    assert not everywhere(before)(after).modified


def test_a_site_reads_its_inputs_above_the_limits():
    before = build(LLAMA)
    after = SkipInputs({1: ("attention_output",)})(before).graph_module
    weights = random_weights(after)
    limits = torch.linspace(0, 0.4, LLAMA.hidden)
    weights.tensors["predictors.layers.1.attention_output_limits"] = limits
    values = node_values(materialize(after, weights), torch.arange(9))
    (node,) = calls(after.graph, SPARSE_LINEAR)
    x, weight = values[arguments(node)["x"].name], weights.tensors["model.layers.1.o_proj.weight"]
    assert 0 < (x.abs() > limits).float().mean() < 1
    assert torch.allclose(values[node.name], (x * (x.abs() > limits)) @ weight.T, atol=1e-6)
    del weights.tensors["predictors.layers.1.attention_output_limits"]
    with pytest.raises(PassOptionError, match=r"hold no predictors.layers.1.attention_output_limits: limits need"):
        materialize(after, weights)


def test_quantize_packs_rows_of_inputs():
    before = InsertPredictors()(build(GraphShape(hidden=36, heads=3, kv_heads=1))).graph_module
    skipping = everywhere(before)(before).graph_module
    after = Quantize("q8")(skipping).graph_module
    verify(after, Stage.QUANTIZED)
    for values in projections(after):
        packed, form, columns = arguments(values["weight"]).values()
        assert form == "q8"
        assert columns == arguments(packed)["weight"].meta["val"].shape[1]
        assert arguments(packed)["weight"].target is TRANSPOSE
    with pytest.raises(UnsupportedGraphError, match=r"layer 0: dequantize\w* is quantized already: leave qkv out"):
        everywhere(before)(Quantize("q8")(before).graph_module)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (GraphShape(activation="fatrelu(0.02)", up_activation="relu"), ("ffn_input",)),
        (GraphShape(activation="silu", fused=True), ("ffn_input", "down")),
        (OPT, SITES),
    ],
)
def test_blocks_are_written_as_projections(shape, names):
    before = build(shape)
    after = everywhere(before, names)(before).graph_module
    verify(after, Stage.CANONICAL)
    assert not list(calls(after.graph, FFN))
    assert_equivalent(before, after, weights=with_limits(random_weights(after), -1.0))
    assert not everywhere(before, names)(after).modified


def test_only_the_sites_that_were_named():
    """Other layers may have predictors."""
    before = build(OPT)
    attending = SkipInputs({1: ("qkv",)})(before).graph_module
    assert [node.meta["layer"] for node in calls(attending.graph, SPARSE_LINEAR)] == [1, 1, 1]
    assert not SkipInputs()(before).modified
    after = InsertPredictors()(SkipInputs({1: ("ffn_input",)})(before).graph_module).graph_module
    verify(after, Stage.PREDICTED)
    assert len(projections(after)) == 2
    assert_equivalent(every_neuron(before), after, weights=with_limits(random_weights(after), 0.0))


def test_effect_and_options():
    assert SkipInputs({0: ("qkv",)}).effect is Effect.SKIPS
    # The text too, which reproducers have.
    made = make_pass("skip-inputs{sites=(1:(qkv,qkv),0:(qkv,attention_output))}")
    assert repr(made) == repr(SkipInputs({0: ("qkv", "attention_output"), 1: ("qkv",)}))
    for sites, message in [
        ({0: ("gate_up",)}, "layer 0: 'gate_up' is not one of qkv, attention_output"),
        ({3: ("down",)}, "layer 3: down needs ffn_input beside it"),
        ({7: ("qkv",)}, "layer 7: the graph has no attention of that number"),
    ]:
        with pytest.raises(PassOptionError, match=message):
            SkipInputs(sites)(build(LLAMA))


@pytest.mark.slow("exports a model per family; small graphs are fast")
@pytest.mark.parametrize("name", ["falcon-40b", "falcon-serial", "persimmon", "qwen2", "nanochat", "bitnet"])
def test_models_of_transformers(name):
    """Projections that a model has fused, biases, norms of heads, and a norm behind attention."""
    variant = VARIANTS[name]
    config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
    before = canonicalize(capture_config(config | {"architectures": [variant.model_class]} | dict(variant.rename)))
    after = everywhere(before)(before).graph_module
    verify(after, Stage.CANONICAL)
    assert len(projections(after)) == 8
    assert_equivalent(before, after, weights=with_limits(random_weights(after), 0.0))
    # Fused projections are rows of one parameter, selected before they are transposed.
    quantized = Quantize("q8")(InsertPredictors()(after).graph_module).graph_module
    verify(quantized, Stage.QUANTIZED)


def attending(write_key):
    """A graph of one layer, whose keys are `write_key(builder, x, h)` of the stream and its norm."""
    b, d = GraphBuilder(), 8
    x = b.call(EMBEDDING, b.tokens, b.parameter("embed.weight", 11, d), 0)
    h = b.call(RMS_NORM, x, b.parameter("norm.weight", d), 1e-5)
    q, v = (b.call(LINEAR, h, b.parameter(f"{name}.weight", d, d), None) for name in "qv")
    y = b.call(ATTENTION, q, write_key(b, x, h), v, 2, 2, 0.5, 0, 0, layer=0)
    x = b.call(ADD, x, y)
    return b.finish(b.call(LINEAR, x, b.parameter("head.weight", 11, d), None), Stage.CANONICAL)


def test_keys_that_are_a_sum_with_a_bias_behind():
    def key(b, x, h):
        parts = [b.call(LINEAR, h, b.parameter(f"k{i}.weight", 8, 8), None) for i in (0, 1)]
        return b.call(ELEMENTWISE, [b.call(ADD, *parts), b.parameter("shift", 8)], "add(x0, x1)")

    before = attending(key)
    verify(before, Stage.CANONICAL)
    after = SkipInputs({0: ("qkv",)})(before).graph_module
    verify(after, Stage.CANONICAL)
    assert len(projections(after)) == 4
    assert_equivalent(before, after, weights=with_limits(random_weights(after), 0.0))


@pytest.mark.parametrize(
    ("write_key", "site", "message"),
    [
        (lambda b, x, h: b.call(LINEAR, x, b.parameter("k.weight", 8, 8), None), "qkv", "read different values"),
        (lambda b, x, h: x, "qkv", "there is no projection"),
        (lambda b, x, h: h, "attention_output", "there is no projection"),
        (lambda b, x, h: h, "ffn_input", "there is no feed-forward block"),
    ],
    ids=["another value", "no projection", "nothing behind attention", "no block"],
)
def test_what_is_not_found_is_left_alone(write_key, site, message):
    with pytest.raises(UnsupportedGraphError, match=f"layer 0: .*{message}: leave {site} out of the sites"):
        SkipInputs({0: (site,)})(attending(write_key))


def test_blocks_with_a_predictor_or_a_norm_are_refused():
    for graph_module, message in [
        (InsertPredictors()(build(OPT)).graph_module, "its block has a predictor"),
        (build(GraphShape(ffn_norm=True)), "its block has a norm across the neurons"),
    ]:
        with pytest.raises(UnsupportedGraphError, match=message):
            SkipInputs({0: ("ffn_input",)})(graph_module)
