"""Calls that are computed in another way: thresholds of neurons, and caches that round."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from picompile.accuracy.variants import round_cache, silence_below
from picompile.predictors.firing import MEASURES, FiringRule
from picompile.streaming import new_states, run_segment, split_layers
from picompile.testing import GraphShape, build, random_weights
from picompile_passes.dialect.neurons import neuron_outputs
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors

CONSTANTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
NAMES = ("gate_bias", "up_bias", "activation", "up_activation")
TOKENS = [3, 49, 0, 7, 12, 30]


def _values(graph_module: GraphModule, weights: WeightSource, replaced: object = None) -> dict[str, Tensor]:
    """The value of each attention and feed-forward call, and its arguments, by name; and the logits."""
    found: dict[str, Tensor] = {}
    nodes = [*calls(graph_module.graph, ATTENTION, SPARSE_FFN), *graph_module.graph.output_node().all_input_nodes]
    wanted = {*nodes, *(each for node in nodes for each in node.all_input_nodes)}
    states = new_states(graph_module, [TOKENS])
    for segment in split_layers(graph_module):
        keep = partial(lambda node, value: found.__setitem__(node.name, value))
        run_segment(segment, weights, states, keep, wanted, replace=replaced)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("by", MEASURES)
@pytest.mark.parametrize("shape", [GraphShape(activation="silu"), GraphShape(gated=False, ffn_norm=True)])
def test_neurons_below_the_threshold_are_silent(shape: GraphShape, by: str) -> None:
    graph_module = InsertPredictors("none")(build(shape)).graph_module
    weights = random_weights(graph_module, seed=1)
    blocks = {node.meta["layer"]: node for node in calls(graph_module.graph, SPARSE_FFN)}
    plain = _values(graph_module, weights)
    assert silence_below(graph_module, {}) == {} == silence_below(graph_module, {0: FiringRule(by=by)})
    block = blocks[1]
    values = {
        name: evaluate_constant(graph_module, value, weights) if name in CONSTANTS and value else value
        for name, value in arguments(block).items()
    }
    x = plain[values["x"].name]
    hidden = neuron_outputs(x, values["gate"], values["up"], *(values[name] for name in NAMES))
    measured = hidden.abs() * (values["down"].norm(dim=1) if by == "contribution" else 1)
    threshold = float(measured.median())
    replaced = silence_below(graph_module, {1: FiringRule(threshold, by)})
    assert list(replaced) == [block]
    found = _values(graph_module, weights, replaced)[block.name]
    kept = torch.where(measured > threshold, hidden, 0)
    expected = kept @ values["down"]
    if values["down_bias"] is not None:
        expected = expected + values["down_bias"]
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain[block.name])


def test_limits_hold_beside_a_threshold() -> None:
    graph_module = InsertPredictors("none", output_limits=(1,))(build(GraphShape(activation="silu"))).graph_module
    weights = random_weights(graph_module, seed=1)
    block = next(node for node in calls(graph_module.graph, SPARSE_FFN) if node.meta["layer"] == 1)
    below, above = (
        _values(graph_module, weights, silence_below(graph_module, {1: FiringRule(t)}))[block.name] for t in (1e-9, 9.0)
    )
    assert torch.equal(below, _values(graph_module, weights)[block.name])
    assert not torch.allclose(above, below)


@pytest.mark.parametrize("kv_dtype", ["f16", "q8"])
def test_a_cache_rounds_keys_and_values_of_each_head(kv_dtype: str) -> None:
    graph_module = build(GraphShape(heads=4, hidden=80, kv_heads=2))
    weights = random_weights(graph_module, seed=2)
    replaced = round_cache(graph_module, kv_dtype)
    assert len(replaced) == 2
    plain, found = _values(graph_module, weights), _values(graph_module, weights, replaced)
    first = next(iter(replaced))
    values = [plain[node.name] for node in first.all_input_nodes[:3]]
    rounded = []
    for rows in values[1:]:
        heads = rows.reshape(len(TOKENS), 2, 20).unbind(1)
        each = [
            head.half().float() if kv_dtype == "f16" else dequantize_rows(quantize_rows(head, "q8"), "q8", 20)
            for head in heads
        ]
        rounded.append(torch.cat(each, dim=1))
    others = list(arguments(first).values())[3:]
    expected = first.target(values[0], *rounded, *others)  # type: ignore[operator]
    torch.testing.assert_close(found[first.name], expected)
    difference = (found[first.name] - plain[first.name]).abs().max()
    assert 0 < difference < (1e-2 if kv_dtype == "f16" else 0.1)
