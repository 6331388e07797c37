"""Attention in each function of a program: its calls, and the state behind them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.kernels.lowered import Runner, quantized, relative_error
from picompile.testing import LLAMA, OPT, GraphShape, random_weights, run
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.program import LoweredProgram, ProgramState
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ADD, ATTENTION
from picompile_passes.passes.insert_predictors import InsertPredictors

WIDE = replace(LLAMA, hidden=72 * 4, heads=4, kv_heads=2, layers=1)
NARROW = replace(WIDE, hidden=32)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
NONE = InsertPredictors("none")
OPTIONS = LowerOptions(context=12, chunk=4, kv_dtype="float32", sequences=3)


def operators(program: LoweredProgram, function: str) -> list[str]:
    return [call.op for call in program.functions[function] if call.op in ("rotary", "cache", "attention")]


@pytest.mark.parametrize(("shape", "rotary"), [(LLAMA, ["rotary"] * 2), (OPT, [])])
def test_a_single_token_takes_one_call(shape: GraphShape, rotary: list[str]) -> None:
    """Angles, cache and attention in decoding, of one sequence or several; apart for chunks of a prompt."""
    program = lower(quantized(shape, NONE), OPTIONS).program
    assert operators(program, "decode") == operators(program, "batch") == ["attention"] * shape.layers
    apart = [*rotary, "cache", "cache", "attention"] * shape.layers
    assert operators(program, "score") == apart
    assert operators(program, "prefill_last") == apart
    # The last layer's queries are nobody's input there.
    assert operators(program, "prefill") == [*apart[: -len(rotary) - 3], *rotary[1:], "cache", "cache"]


@pytest.mark.slow("compiles a program")
def test_angles_that_another_node_wants_are_turned_apart(tmp_path: Path) -> None:
    graph_module = quantized(LLAMA, NONE)
    attention = next(iter(calls(graph_module.graph, ATTENTION)))
    turned = arguments(attention)["q"]
    with graph_module.graph.inserting_before(attention):
        twice = graph_module.graph.call_function(ADD, (turned, turned))
    twice.meta.update(turned.meta)
    lowered = lower(graph_module, replace(OPTIONS, sequences=1))
    assert operators(lowered.program, "decode") == ["rotary", "rotary", "attention", "attention"]
    weights = random_weights(graph_module)
    runner = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    assert relative_error(runner.decode(IDS), run(graph_module, weights, torch.tensor(IDS))) < 1e-5


@pytest.mark.slow("compiles a program per option; one is fast", but=("alibi",))
@pytest.mark.parametrize(
    "options",
    [{"softcap": 0.5}, {"alibi": True}, {"sinks": True}, {"softcap": 1.5, "alibi": True, "sinks": True, "window": 3}],
    ids=lambda options: ", ".join(options),
)
def test_options_equal_eager(tmp_path: Path, options: dict[str, Any]) -> None:
    """Token by token, in chunks, and a token of one of several sequences."""
    graph_module = quantized(replace(NARROW, **options), NONE)
    weights = random_weights(graph_module)
    runner = Runner(tmp_path / "host.so", lower(graph_module, OPTIONS), graph_module, weights)
    expected = run(graph_module, weights, torch.tensor(IDS))
    runner.slot = 2
    decoded = runner.decode(IDS[:7])
    last = runner.run_batch(IDS[7:], [7], [2])
    for computed in (torch.cat([decoded, last]), runner.score(IDS, 4)):
        assert relative_error(computed, expected) < 1e-5
    assert relative_error(run(quantized(NARROW, NONE), weights, torch.tensor(IDS)), expected) > 1e-3


@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "q8"])
def test_the_kv_cache_is_declared_for_every_dtype(kv_dtype: str) -> None:
    program = lower(quantized(WIDE, NONE), replace(OPTIONS, kv_dtype=kv_dtype)).program
    data = ProgramState("int8" if kv_dtype == "q8" else kv_dtype, (3, 2, 12, 72), grows=1)
    scales = (
        {f"{side}.0.scale": ProgramState("float16", (3, 2, 12, 3), grows=1) for side in "kv"}
        if kv_dtype == "q8"
        else {}
    )
    assert program.state == {"k.0": data, "v.0": data, **scales}
    assert program.state_bytes == 2 * 3 * 2 * 12 * {"float16": 144, "float32": 288, "q8": 72 + 6}[kv_dtype]


@pytest.mark.slow("compiles a program per option; all options together are fast")
def test_q8_cache(tmp_path: Path) -> None:
    """Token by token, in chunks, and in eager PyTorch without a cache."""
    graph_module = quantized(replace(LLAMA, hidden=240, kv_heads=1, layers=1), NONE)
    weights = random_weights(graph_module)
    lowered = lower(graph_module, replace(OPTIONS, kv_dtype="q8"))
    runner = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    runner.slot = 2
    decoded, scored = runner.decode(IDS), runner.score(IDS, 4)
    expected = run(graph_module, weights, torch.tensor(IDS))
    assert 1e-5 < relative_error(decoded, expected) < 2e-2
    assert relative_error(decoded, scored) < 2e-3
