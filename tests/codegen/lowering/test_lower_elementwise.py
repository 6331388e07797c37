"""Programs with arithmetic between layers and behind the head, norms of heads and computed weights, on both sides."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner, relative_error
from picompile.testing import CapturedStyle, build_captured, random_weights, run
from picompile.testing.captured.style import AttentionStyle, FfnStyle, NormStyle, PositionStyle, Sizes
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.packing import _parameter_name
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ELEMENTWISE, EMBEDDING, LAYER_NORM, LINEAR, QUANTIZE, RMS_NORM, TRANSPOSE
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

aten = torch.ops.aten
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
CHUNK = 4
# Gemma and Granite in one: factors everywhere, weights less one, norms of queries and keys, a soft cap at the end.
GEMMA = CapturedStyle(
    sizes=Sizes(hidden=27, heads=4, kv_heads=2, head_dim=6, value_dim=6, ffn=40, vocab=31, layers=2),
    norm=NormStyle(one_more=True),
    attention=AttentionStyle(head_norm="before"),
    positions=PositionStyle(rotary="halves", turning="first"),
    ffn=FfnStyle(gated=True, activation="relu"),
    embedding_factor=9.5,
    residual_factor=0.25,
    logits="capped",
    tied="one node",
)
CASES = {
    "gemma": GEMMA,
    "one head of keys": replace(
        GEMMA,
        sizes=replace(GEMMA.sizes, kv_heads=1, head_dim=8, value_dim=8),
        attention=AttentionStyle(head_norm="after", operator="products"),
        positions=PositionStyle(rotary="halves"),
        norm=NormStyle(kind="centered"),
        block="sandwich",
        logits="scaled",
    ),
    "tables of positions": replace(
        GEMMA,
        positions=PositionStyle(learned="sliced sinusoid"),
        ffn=FfnStyle(),
        block="parallel with two norms",
        logits="plain",
        batch="none",
    ),
}


@lru_cache
def canonical(style: CapturedStyle) -> GraphModule:
    return canonicalize(build_captured(style))


def quantized(style: CapturedStyle) -> GraphModule:
    passes = (InsertPredictors("exact"), Partition({0: range(0, 40, 3), 1: range(11)}), Quantize("f16"))
    return Pipeline(passes)(canonical(style)).graph_module


def options(placement: Placement | None) -> LowerOptions:
    device = None if placement is None else "cpu"
    return LowerOptions(16, CHUNK, "float32", 3, device, placement or ON_HOST)


def logits(runner: Runner) -> torch.Tensor:
    """Logits of two chunks of a prompt, of single tokens, and of a token in a batch, [5, vocabulary]."""
    runner.slot, runner.position = 2, 0
    found = [runner.run("prefill", IDS[:4]), runner.run("prefill_last", IDS[4:7])]
    found += [runner.run("decode", [token]) for token in IDS[7:9]]
    found.append(runner.run_batch(IDS[9:], [9], [2]))
    return torch.cat([each[:1] for each in found if each is not None])


EVERY = frozenset({0, 1})
PLACEMENTS = {
    "host alone": None,
    "all": Placement.all_of(2),
    "hot neurons": ON_HOST,
    "attention of one layer, and the head": Placement(attention=frozenset({0}), head=True),
    "caches": Placement(caches=EVERY),
}


@pytest.mark.slow("compiles a program per case; kernels and graphs are fast")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_programs_equal_eager(name: str, placement: str, tmp_path: Path) -> None:
    graph_module = quantized(CASES[name])
    weights = random_weights(graph_module)
    expected = run(graph_module, weights, torch.tensor(IDS))
    lowered = lower(graph_module, options(PLACEMENTS[placement]))
    runner = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    assert relative_error(runner.score(IDS[:4], CHUNK), expected[:4]) < 1e-5
    assert relative_error(logits(runner), expected[6:]) < 1e-5


def test_each_thing_is_in_the_graph() -> None:
    """The cases have what the tests above are for."""
    graph = quantized(CASES["gemma"]).graph
    assert [arguments(node)["groups"] for node in calls(graph, RMS_NORM)] == [1, 4, 2, 1, 1, 4, 2, 1, 1]
    assert len(list(calls(graph, ELEMENTWISE))) == 6
    assert graph.output_node().args[0].target is ELEMENTWISE
    program = lower(quantized(CASES["gemma"]), options(Placement.all_of(2))).program
    last = [call.device for call in program.functions["decode"] if call.op == "elementwise"][-1]
    assert last == "accelerator", "arithmetic behind the head is where the head is"
    graph = quantized(CASES["one head of keys"]).graph
    assert [arguments(node)["groups"] for node in calls(graph, LAYER_NORM)][1:3] == [4, 1]
    graph = quantized(CASES["tables of positions"]).graph
    assert [arguments(node)["ids"].target for node in calls(graph, EMBEDDING)] == ["tokens", "positions"]


def test_constants_that_are_computed_in_different_ways_have_different_names() -> None:
    """Two vectors made of one parameter would be one weight of the artifact."""
    b = GraphBuilder()
    weight, table = b.parameter("w", 6), b.constant("table", torch.tensor([0, 2]))
    matrix = b.parameter("m", 4, 6)
    made = (
        (aten.add.Tensor, weight, 1.0),
        (aten.add.Tensor, weight, 2.0),
        (aten.mul.Tensor, weight, 2.0),
        (aten.sub.Tensor, weight, 1.0),
        (aten.index_select.default, weight, 0, table),
        (aten.index_select.default, matrix, 0, table),
        (aten.index_select.default, matrix, 1, table),
        (aten.reshape.default, weight, [1, 6]),
        (aten.select.int, matrix, 0, 1),
        (aten.select.int, matrix, 0, 2),
        (aten.sum.dim_IntList, matrix, [0]),
        (aten.add.Tensor, b.call(aten.mul.Tensor, weight, 2.0), 1.0),
    )
    names = [_parameter_name(node) for node in (weight, matrix, *(b.call(*each) for each in made))]
    assert len(set(names)) == len(names)
    again = b.call(aten.add.Tensor, weight, 1.0)
    assert _parameter_name(again) == names[2]
    assert all(name.split(".")[0].split("[")[0] in ("w", "m") for name in names)
    rows = b.call(QUANTIZE, b.call(TRANSPOSE, matrix, 0, 1), "f16")
    assert _parameter_name(rows) == "m", "a matrix that is turned and packed keeps its name"
    x = b.call(EMBEDDING, b.tokens, b.parameter("e", 5, 6), 0)
    b.finish(b.call(LINEAR, x, matrix, None))
