from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.graphs import PROFILE
from picompile.testing import LLAMA, OPT, TOLERANCES, GraphShape, RandomWeights, build, random_weights, run, shapes
from picompile_passes.base import Stage, stage_of
from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_passes.errors import PassOptionError
from picompile_passes.formats import FORMATS
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import (
    DEQUANTIZE,
    ELEMENTWISE,
    EMBEDDING,
    LINEAR,
    PREDICT,
    QUANTIZE,
    SPARSE_FFN,
    TRANSPOSE,
    matrix_operands,
)
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.verify import verify


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCES[torch.float32] * float(expected.abs().max()))


DOWN = ("down_proj.weight", "fc2.weight")


def partitioned(shape=LLAMA, hot=None):
    predicted = InsertPredictors()(build(shape)).graph_module
    return Partition(hot or {})(predicted).graph_module


def rounded(weights, form, predictors=None, by_outputs=False, turned=False):
    """Return the weights after `form` and back; predictors' own matrices use `predictors`, which defaults to `form`.

    The head and embeddings use q6 where `form` has four bits, but for formats of quantized checkpoints. A down
    projection holds a neuron in each column, and is packed by neuron, unless `by_outputs`. Stacks of experts have
    inputs before outputs if they are `turned`.
    """

    def keep(name, weight):
        if weight.dim() < 2 or name.endswith("_bias"):
            return weight
        by_neurons = name.endswith(DOWN) and not by_outputs
        if weight.dim() == 3:
            by_neurons = (name.endswith("experts.down_proj") and not by_outputs) != turned
            rows = weight.transpose(1, 2) if by_neurons else weight
            left = dequantize_rows(quantize_rows(rows.flatten(0, 1), form), form, rows.shape[2]).view_as(rows)
            return left.transpose(1, 2) if by_neurons else left
        rows = weight.T if by_neurons else weight
        stored = (predictors or form) if name.startswith("predictors.") else form
        if "embed" in name or "lm_head" in name:
            stored = "q6" if form in ("q4", "q4m", "mxfp4") else form
        if name.endswith("router.weight"):
            stored = "f16"
        left = dequantize_rows(quantize_rows(rows, stored), stored, rows.shape[1])
        return left.T if by_neurons else left

    return RandomWeights({name: keep(name, weight) for name, weight in weights.tensors.items()})


@settings(PROFILE, max_examples=PROFILE.max_examples // 2)
@example(shape=OPT, form="q4", split=True, seed=0)
@example(shape=LLAMA, form="q8", split=True, seed=0)
@example(shape=GraphShape(hidden=2, heads=1, kv_heads=1, ffn=1, vocab=2, layers=1), form="q4", split=False, seed=0)
@given(shape=shapes(), form=st.sampled_from([*FORMATS]), split=st.booleans(), seed=st.integers(0, 100))
def test_quantized_graph_computes_what_the_rounded_weights_do(shape, form, split, seed):
    before = partitioned(shape, {0: range(0, shape.ffn, 3)} if split and not shape.experts else {})
    after = Quantize(form)(before).graph_module
    assert stage_of(after) is Stage.QUANTIZED
    verify(after, Stage.QUANTIZED)
    weights = random_weights(before, seed)
    assert_close(run(after, weights), run(before, rounded(weights, form, turned=shape.turned)))


def test_errors_of_formats_are_within_their_bounds():
    before = partitioned(LLAMA)
    weights = random_weights(before)
    expected = run(before, weights)
    errors = {}
    for form in FORMATS.builtin:
        actual = run(Quantize(form)(before).graph_module, weights)
        errors[form] = float((actual - expected).norm() / expected.norm())
    assert 0 < errors["f16"] < errors["q8"] < errors["q6"] < min(errors["q4m"], errors["q4"])
    assert errors["q6_k"] < errors["q5"] < errors["q3_k"] < errors["q2_k"]
    # Who makes files of the coarsest types chooses their numbers by a text.
    assert max(error for form, error in errors.items() if form not in ("q2_k", "iq2", "iq1")) < 0.75


def test_matrices_are_packed_and_vectors_are_not():
    """Each once, a tied weight and one that is read twice too."""
    before = partitioned(OPT)
    head = before.graph.output_node().args[0]
    with before.graph.inserting_before(head):
        again = before.graph.get_attr("model.embed.weight")
    again.meta["val"] = head.args[1].meta["val"]
    head.update_arg(1, again)
    for graph_module in (partitioned(OPT), before):
        after = Quantize("q8")(graph_module).graph_module
        verify(after, Stage.QUANTIZED)
        operands = [operand for node in after.graph.nodes for operand in matrix_operands(node)]
        assert operands
        assert all(operand.target is DEQUANTIZE for operand in operands)
        packed = list(calls(after.graph, QUANTIZE))
        assert all(node.args[0].meta["val"].dim() == 2 and node.args[1] == "q8" for node in packed)
        assert [node.args[0].target for node in packed].count("model.embed.weight") == 1
        assert len(packed) == len({str(node.args[0]) for node in packed})


@pytest.mark.slow("runs two graphs per case", but=("f16-", "q4m-auto", "q4-q4-"))
@pytest.mark.parametrize(
    ("form", "predictors", "own"),
    [
        *[("f16", "auto", "f16"), ("q8", "auto", "q8"), ("q6", "auto", "q6"), ("q4m", "auto", "q6")],
        *[("q4", "auto", "q6"), ("q4", "q4", "q4"), ("q4", "f16", "f16"), ("q4m", "q6", "q6")],
    ],
)
def test_matrices_of_a_learned_predictor_are_packed_and_its_bias_is_not(form, predictors, own):
    before = InsertPredictors("learned", ranks={0: 3, 1: 5}, inputs={1: "previous"})(build(OPT)).graph_module
    after = Quantize(form, predictors)(Partition({0: (1, 7)})(before).graph_module).graph_module
    verify(after, Stage.QUANTIZED)
    for mask in calls(after.graph, PREDICT):
        fc1, fc2, bias = arguments(mask)["weights"]
        packed = [arguments(weight)["packed"] for weight in (fc1, fc2)]
        assert [arguments(node)["format"] for node in packed] == [own] * 2
        names = [str(node.target).split(".")[-1] for node in (*(arguments(p)["weight"] for p in packed), bias)]
        assert names == ["fc1", "fc2", "bias"]
    weights = random_weights(before)
    assert_close(run(after, weights), run(before, rounded(weights, form, own)))


@pytest.mark.parametrize("shape", [LLAMA, OPT], ids=["llama", "opt"])
def test_signs_are_those_of_the_matrix_that_is_packed(shape):
    before = InsertPredictors("sign")(build(shape)).graph_module
    after = Quantize("q4")(Partition({0: (1, 7)})(before).graph_module).graph_module
    verify(after, Stage.QUANTIZED)
    for block in calls(after.graph, SPARSE_FFN):
        values = arguments(block)
        assert arguments(values["mask"])["weights"] == [values["up" if values["gate"] is None else "gate"]]
    weights = random_weights(before)
    assert_close(run(after, weights), run(before, rounded(weights, "q4")))


def test_predictor_and_block_read_the_same_packed_gating_matrix():
    after = Quantize()(partitioned(LLAMA, {0: (1, 2)})).graph_module
    for node in calls(after.graph, SPARSE_FFN):
        assert arguments(arguments(node)["mask"])["weights"][0] is arguments(node)["gate"]
    assert not Quantize("q8")(after).modified


WHOLE = GraphShape(hidden=32, heads=2, kv_heads=2, ffn=48, activation="silu")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", ["q4", "q6_k"])
def test_down_is_packed_by_outputs_where_every_neuron_is_computed(gated, form):
    before = partitioned(replace(WHOLE, gated=gated))
    after = Quantize(form)(before).graph_module
    verify(after, Stage.QUANTIZED)
    stored = [arguments(block)["down"] for block in calls(before.graph, SPARSE_FFN)]
    for block, down in zip(calls(after.graph, SPARSE_FFN), stored, strict=True):
        transposed = arguments(block)["down"]
        assert is_call(transposed, TRANSPOSE)
        values = arguments(transposed.args[0])
        assert (values["format"], values["columns"]) == (form, 48)
        # Of a parameter that has its outputs in rows, nothing is transposed.
        assert arguments(values["packed"])["weight"].target == down.args[0].target
    weights = random_weights(before)
    assert_close(run(after, weights), run(before, rounded(weights, form, by_outputs=True)))
    assert not Quantize("q8")(after).modified


@pytest.mark.parametrize(
    ("change", "form", "tensors"),
    [
        ({"hidden": 24}, "q4", {}),
        ({"ffn": 40}, "q4", {}),
        ({}, "f16", {}),
        ({}, "q4", {f"model.layers.{layer}.mlp.gate_proj.weight": "f16" for layer in (0, 1)}),
        ({}, "q4", {f"model.layers.{layer}.mlp.down_proj.weight": "f16" for layer in (0, 1)}),
    ],
)
def test_down_is_packed_by_neurons_where_a_matrix_has_no_panels(change, form, tensors):
    before = partitioned(replace(WHOLE, **change))
    after = Quantize(form, tensors=tensors)(before).graph_module
    verify(after, Stage.QUANTIZED)
    assert all(arguments(block)["down"].target is DEQUANTIZE for block in calls(after.graph, SPARSE_FFN))


@pytest.mark.parametrize(
    ("insert", "hot"),
    [
        (InsertPredictors("exact"), {}),
        (InsertPredictors("learned", ranks={0: 16, 1: 16}), {}),
        (InsertPredictors("none", output_limits=(0, 1)), {}),
        (InsertPredictors("none"), {0: range(16), 1: range(48)}),
    ],
)
def test_down_is_packed_by_neurons_where_these_are_read_one_by_one(insert, hot):
    predicted = insert(build(replace(WHOLE, activation="relu"))).graph_module
    before = Partition(hot)(predicted).graph_module
    after = Quantize("q4")(before).graph_module
    verify(after, Stage.QUANTIZED)
    assert all(arguments(block)["down"].target is DEQUANTIZE for block in calls(after.graph, SPARSE_FFN))
    weights = random_weights(before)
    assert_close(run(after, weights), run(before, rounded(weights, "q4", "q6")))


def test_the_head_has_its_format_where_logits_are_capped_too():
    b = GraphBuilder()
    x = b.call(EMBEDDING, b.tokens, b.parameter("embed", 9, 4), 0)
    for name, rows in (("body", 4), ("head", 9)):
        x = b.call(LINEAR, x, b.parameter(name, rows, 4), None)
    before = b.finish(b.call(ELEMENTWISE, [x], "tanh(x0)"), Stage.PREDICTED)
    after = Quantize("q4")(before).graph_module
    verify(after, Stage.QUANTIZED)
    packed = [arguments(node) for node in calls(after.graph, QUANTIZE)]
    formats = {values["weight"].target: values["format"] for values in packed}
    assert formats == {"embed": "q6", "body": "q4", "head": "q6"}


def test_unknown_format_is_refused():
    with pytest.raises(
        PassOptionError, match=r"option format of pass quantize: 'q9' is not one of f16, .*q8, .*, q2_k$"
    ):
        Quantize("q9")
