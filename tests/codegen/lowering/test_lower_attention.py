"""Attention in each function of a program: its calls, and the state behind them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner
from picompile.testing import LLAMA, OPT, GraphShape, build, random_weights, run
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.program import LoweredProgram, ProgramTensor
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ADD, ATTENTION
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

WIDE = replace(LLAMA, hidden=72 * 4, heads=4, kv_heads=2, layers=1)
OPTIONS = LowerOptions(context=12, chunk=4, kv_dtype="float32", sequences=3)


def quantized(shape: GraphShape) -> GraphModule:
    return Pipeline((InsertPredictors("none"), Quantize("f16")))(build(shape)).graph_module


def operators(program: LoweredProgram, function: str) -> list[str]:
    return [call.op for call in program.functions[function] if call.op in ("rotary", "cache", "attention")]


@pytest.mark.parametrize(("shape", "rotary"), [(LLAMA, ["rotary"] * 2), (OPT, [])])
def test_a_single_token_takes_one_call(shape: GraphShape, rotary: list[str]) -> None:
    """Angles, cache and attention in decoding, of one sequence or several; apart for chunks of a prompt."""
    program = lower(quantized(shape), OPTIONS).program
    assert operators(program, "decode") == operators(program, "batch") == ["attention"] * shape.layers
    apart = [*rotary, "cache", "cache", "attention"] * shape.layers
    assert operators(program, "score") == apart
    assert operators(program, "prefill_last") == apart
    # The last layer's queries are nobody's input there.
    assert operators(program, "prefill") == [*apart[: -len(rotary) - 3], *rotary[1:], "cache", "cache"]


def test_angles_that_another_node_wants_are_turned_apart(tmp_path: Path) -> None:
    graph_module = quantized(LLAMA)
    attention = next(iter(calls(graph_module.graph, ATTENTION)))
    turned = arguments(attention)["q"]
    with graph_module.graph.inserting_before(attention):
        twice = graph_module.graph.call_function(ADD, (turned, turned))
    twice.meta.update(turned.meta)
    lowered = lower(graph_module, replace(OPTIONS, sequences=1))
    assert operators(lowered.program, "decode") == ["rotary", "rotary", "attention", "attention"]
    weights = random_weights(graph_module)
    runner = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    ids = [3, 1, 4, 1, 5]
    expected = run(graph_module, weights, torch.tensor(ids))
    assert float((runner.decode(ids) - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.slow(
    "compiles a program per option; all options together are fast", but=("softcap, alibi, sinks, window",)
)
@pytest.mark.parametrize(
    "options",
    [{"softcap": 0.5}, {"alibi": True}, {"sinks": True}, {"softcap": 1.5, "alibi": True, "sinks": True, "window": 3}],
    ids=lambda options: ", ".join(options),
)
def test_options_equal_eager(tmp_path: Path, options: dict[str, Any]) -> None:
    """Token by token, in chunks, and a token of one of several sequences."""
    graph_module = quantized(replace(LLAMA, heads=4, kv_heads=2, hidden=32, layers=1, **options))
    weights = random_weights(graph_module)
    runner = Runner(tmp_path / "host.so", lower(graph_module, OPTIONS), graph_module, weights)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = run(graph_module, weights, torch.tensor(ids))
    runner.slot = 2
    decoded = runner.decode(ids[:7])
    last = runner.run_batch(ids[7:], [7], [2])
    runner.position = 0
    scored = torch.cat([runner.run("score", ids[start : start + 4]) for start in (0, 4)])  # type: ignore[misc]
    for computed in (torch.cat([decoded, last]), scored):
        assert float((computed - expected).norm() / expected.norm()) < 1e-5
    without = run(quantized(replace(LLAMA, heads=4, kv_heads=2, hidden=32, layers=1)), weights, torch.tensor(ids))
    assert float((without - expected).norm() / expected.norm()) > 1e-3


@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "q8"])
def test_the_kv_cache_is_declared_for_every_dtype(kv_dtype: str) -> None:
    program = lower(quantized(WIDE), replace(OPTIONS, kv_dtype=kv_dtype)).program
    data = ProgramTensor("int8" if kv_dtype == "q8" else kv_dtype, (3, 2, 12, 72))
    scales = {f"{side}.0.scale": ProgramTensor("float16", (3, 2, 12, 3)) for side in "kv"} if kv_dtype == "q8" else {}
    assert program.state == {"k.0": data, "v.0": data, **scales}
    assert program.state_bytes == 2 * 3 * 2 * 12 * {"float16": 144, "float32": 288, "q8": 72 + 6}[kv_dtype]


@pytest.mark.slow("compiles a program per option; all options together are fast")
def test_q8_cache(tmp_path: Path) -> None:
    """Token by token, in chunks, and in eager PyTorch without a cache."""
    graph_module = quantized(replace(LLAMA, hidden=240, kv_heads=1, layers=1))
    weights = random_weights(graph_module)
    lowered = lower(graph_module, replace(OPTIONS, kv_dtype="q8"))
    runner = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    runner.slot = 2
    decoded = runner.decode(ids)
    runner.position = 0
    scored = torch.cat([runner.run("score", ids[start : start + 4]) for start in (0, 4)])  # type: ignore[misc]
    expected = run(graph_module, weights, torch.tensor(ids))
    error = float((decoded - expected).norm() / expected.norm())
    assert 1e-5 < error < 2e-2
    assert float((decoded - scored).norm() / expected.norm()) < 2e-3
