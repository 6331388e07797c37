"""One token each of several sequences in a step, against each sequence decoded alone."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner, quantized, relative_error
from helpers.kernels.regions import Regions, check_step, every_region
from picompile.testing import LLAMA, OPT, GraphShape, random_weights, run
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_passes.passes.insert_predictors import InsertPredictors

CONTEXT, CHUNK, SEQUENCES = 12, 4, 7
TEXTS = np.random.default_rng(4).integers(0, 50, (SEQUENCES, CONTEXT)).tolist()


@dataclass(frozen=True)
class Case:
    shape: GraphShape
    predictor: str
    kv_dtype: str
    tolerance: float
    """Relative. A cache in float16 rounds the last bit of what it is given now up, now down."""

    def graph(self) -> GraphModule:
        return quantized(self.shape, InsertPredictors(self.predictor))


CASES = {
    "rotary, windows, exact": Case(
        replace(LLAMA, hidden=36, heads=6, kv_heads=2, ffn=77, window=3), "exact", "float32", 1e-5
    ),
    "q8 cache": Case(replace(OPT, layers=1, ffn=45), "none", "q8", 5e-3),
    "learned positions, rounded cache": Case(replace(OPT, ffn=45), "none", "float16", 1e-3),
}


@dataclass(frozen=True)
class Compiled:
    case: Case
    runner: Runner
    expected: list[torch.Tensor]
    """Of each text, logits [T, V] when it is decoded alone."""


@pytest.fixture(scope="module", params=list(CASES))
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    case: Case = CASES[request.param]
    graph_module = case.graph()
    weights = random_weights(graph_module)
    with every_region():
        lowered = lower(graph_module, LowerOptions(CONTEXT, CHUNK, case.kv_dtype, SEQUENCES))
    runner = Runner(tmp_path_factory.mktemp("batch") / "host.so", lowered, graph_module, weights)
    expected = []
    for text in TEXTS:
        runner.slot = len(expected)
        expected.append(runner.decode(text))
        if case.kv_dtype == "float32":
            assert relative_error(expected[-1], run(graph_module, weights, torch.tensor(text))) < case.tolerance
    runner.forget()
    return Compiled(case, runner, expected)


def _check(compiled: Compiled, measured: torch.Tensor, slot: int, position: int) -> None:
    error = relative_error(measured, compiled.expected[slot][position])
    assert error < compiled.case.tolerance, f"slot {slot}, position {position}: {error:.1e}"


@pytest.mark.slow("compiles programs")
def test_sequences_and_prompts_in_any_order(compiled: Compiled) -> None:
    """Any sequences, in any order, with prompts and single tokens of one of them in between."""
    random, runner = np.random.default_rng(0), compiled.runner
    positions = [0] * SEQUENCES
    sizes = set()
    while min(positions) < CONTEXT:
        going = [slot for slot in range(SEQUENCES) if positions[slot] < CONTEXT]
        runner.slot = slot = int(random.choice(going))
        runner.position, left = positions[slot], CONTEXT - positions[slot]
        function = str(random.choice(["batch", "batch", "prefill_last", "decode"]))
        if function == "batch":
            some = random.permutation(going)[: random.integers(1, len(going) + 1)].tolist()
            places = [positions[each] for each in some]
            tokens = [TEXTS[each][place] for each, place in zip(some, places, strict=True)]
            for row, each, place in zip(runner.run_batch(tokens, places, some), some, places, strict=True):
                _check(compiled, row, each, place)
                positions[each] += 1
            sizes.add(len(some))
        else:
            count = 1 if function == "decode" else int(random.integers(1, min(CHUNK, left) + 1))
            logits = runner.run(function, TEXTS[slot][positions[slot] : positions[slot] + count])
            assert logits is not None
            positions[slot] += count
            _check(compiled, logits[0], slot, positions[slot] - 1)
    assert len(sizes) > 3


@pytest.mark.slow("compiles programs")
def test_threads_change_no_bit_and_no_two_tasks_of_a_region_meet(compiled: Compiled, regions: Regions) -> None:
    results = []
    for threads in (1, 2, 3):
        for place in range(4):
            tokens = [text[place] for text in TEXTS]
            logits = compiled.runner.run_batch(tokens, [place] * SEQUENCES, list(range(SEQUENCES)), threads)
        results.append(logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    tokens = [text[0] for text in TEXTS[:5]]
    compiled.runner.prepare_batch(tokens, [0, 3, 1, 11, 0], [4, 0, 6, 1, 3])
    check_step(compiled.runner, "batch", regions)
    for function, start, end in (("prefill", 0, 4), ("prefill_last", 4, 7), ("decode", 7, 8), ("score", 8, 11)):
        compiled.runner.position = start
        compiled.runner.prepare(TEXTS[0][start:end])
        check_step(compiled.runner, function, regions)


def test_a_program_for_one_sequence_has_no_function_for_several() -> None:
    graph_module = CASES["rotary, windows, exact"].graph()
    one, several = (lower(graph_module, LowerOptions(CONTEXT, CHUNK, "float32", count)).program for count in (1, 3))
    assert set(several.functions) - set(one.functions) == {"batch"}
    assert set(several.buffers) - set(one.buffers) >= {"stats.batch", "logits.batch"}
    assert several.state_bytes == 3 * one.state_bytes
    assert {name: tensor.shape[0] for name, tensor in several.state.items()} == dict.fromkeys(several.state, 3)
    assert one.to_json()["sequences"] == 1
    # One token of each sequence needs room where there are more of them than tokens in a chunk.
    many = lower(graph_module, LowerOptions(CONTEXT, CHUNK, "float32", 9)).program
    assert {many.buffers[name].shape for name in ("tokens", "positions", "slots")} == {(9,)}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_attention_has_windows_and_blocks_have_rows_of_their_own(case: Case) -> None:
    """The bytes that an attention reads depend on its window. Blocks count several sequences apart."""
    functions = lower(case.graph(), LowerOptions(CONTEXT, CHUNK, case.kv_dtype, SEQUENCES)).program.functions
    for function in ("decode", "batch", "score"):
        windows = {call.layer: call.to_json().get("window") for call in functions[function] if call.op == "attention"}
        assert windows == {layer: case.shape.layer_window(layer) or None for layer in range(case.shape.layers)}
        assert not any("window" in call.to_json() for call in functions[function] if call.op != "attention")
    blocks = [call for call in functions["batch"] if call.op == "ffn"]
    rows = [[(arg.name, arg.offset) for arg in call.args if arg.name.startswith("stats")] for call in blocks]
    assert rows == [[("stats.batch", 16 * row)] for row in range(case.shape.layers)]
