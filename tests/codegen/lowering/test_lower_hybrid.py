"""Programs for a host and an accelerator: what runs where has no influence, and nothing is read before it is there."""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from test_lower_blocks import OTHER, SMALL, SOME, Case
from torch.fx import Node

from helpers.hybrid import SIDES, Naps, compile_naps
from helpers.kernels.lowered import Runner
from helpers.kernels.workbench import Array
from helpers.products import sampled
from picompile.placement.model_bytes import LayerBytes, LayerLaunches
from picompile.placement.problem import predicts_early
from picompile.placement.times import PartPlaces
from picompile.testing import GraphShape, random_weights
from picompile_codegen.lowering import lower as lowering
from picompile_codegen.lowering import slices
from picompile_codegen.lowering.arena import Lifetime
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.fusion import Sum, find_fusions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_codegen.lowering.program import Device, LoweredProgram, ProgramCall, ProgramTensor, tensor_bytes
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.operands import ADD, EMBEDDING, LINEAR, RMS_NORM
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_runtime.artifact.program import WAITING_OPS
from picompile_runtime.artifact.program_file import read_program
from picompile_runtime.devices.memory import Tensor as Stored

CONTEXT, CHUNK, SEQUENCES = 32, 5, 3
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
# No neuron is above it.
NONE = 1e9
RANKS = {0: 5, 1: 5, 2: 5}


_SMALL = replace(SMALL, layers=3, activation="silu")
CASES = {
    # Each kind of predictor, in layers that are split or cold; one of the layer before, and one that keeps no neuron.
    "gated": Case(
        replace(_SMALL, layers=4, activation="relu"),
        InsertPredictors(
            "learned",
            kinds={1: "sign", 3: "exact"},
            ranks={0: 5, 2: 5},
            inputs={2: "previous"},
            thresholds={0: NONE, 1: 0.48, 2: -0.1},
        ),
        {0: SOME, 1: OTHER, 2: (), 3: SOME},
    ),
    # With biases, which a block has whether any of its neurons fires or not.
    "plain": Case(
        GraphShape(hidden=66, heads=3, ffn=131, vocab=50, layers=3, gated=False, activation="relu2"),
        InsertPredictors("learned", ranks={0: 7, 1: 7, 2: 7}, inputs={1: "stream"}, thresholds={0: NONE}),
        {0: (), 1: range(1, 131, 3), 2: range(131)},
    ),
    # With all options of attention.
    "parallel": Case(
        replace(_SMALL, parallel=True, softcap=1.5, alibi=True, sinks=True),
        InsertPredictors("learned", kinds={2: "none"}, ranks={0: 5, 1: 5}, inputs={1: "previous"}),
        {0: SOME, 1: OTHER, 2: OTHER},
    ),
    # With limits, where gates decide and where masks name the neurons.
    "limited": Case(
        _SMALL,
        InsertPredictors("none", kinds={1: "learned"}, ranks={1: 5}, gate_limits=(0, 1), output_limits=(0, 1, 2)),
        {0: SOME, 1: OTHER, 2: OTHER},
    ),
}


def placements(layers: int, count: int, seed: int) -> list[Placement]:
    """All, none, masks alone, and at random."""
    random = np.random.default_rng(seed)

    def some() -> frozenset[int]:
        return frozenset(np.flatnonzero(random.integers(0, 2, layers)).tolist())

    drawn = [Placement(some(), some(), some(), bool(random.integers(2))) for _ in range(count)]
    return [Placement.all_of(layers), ON_HOST, Placement(predictors=frozenset(range(layers))), *drawn]


def options(placement: Placement | None, kv_dtype: str = "float32") -> LowerOptions:
    device = None if placement is None else "cpu"
    return LowerOptions(CONTEXT, CHUNK, kv_dtype, SEQUENCES, device, placement or ON_HOST)


# ---- what is computed ----


def every_step(runner: Runner) -> dict[str, Array]:
    """The logits of every kind of step, by its name."""
    found: dict[str, Array] = {}

    def run(name: str, function: str, tokens: Sequence[int], slot: int, position: int) -> None:
        runner.slot, runner.position = slot, position
        logits = runner.run(function, list(tokens))
        if logits is not None:
            found[name] = np.asarray(logits)[: len(tokens)]

    run("", "prefill", IDS[:5], 0, 0)
    run("prompt of two chunks", "prefill_last", IDS[5:8], 0, 5)
    for position in range(8, 11):
        run(f"token {position}", "decode", [IDS[position]], 0, position)
    run("scored", "score", IDS[:5], 1, 0)
    run("scored, too", "score", IDS[5:7], 1, 5)
    run("prompt", "prefill_last", IDS[3:6], 2, 0)
    found["batch"] = np.asarray(runner.run_batch(IDS[7:10], [11, 3, 7], [0, 2, 1]))
    found["batch of two"] = np.asarray(runner.run_batch(IDS[10:12], [8, 4], [1, 2]))
    return found


def stats_of(runner: Runner) -> dict[tuple[int, str], list[int]]:
    """By layer and part: computed and fired since the last call."""
    counts = runner.stats().tolist()
    return {(part.layer, part.part): counts[part.stats_row] for part in runner.program.ffn}


@pytest.fixture(scope="module")
def naps(tmp_path_factory: pytest.TempPathFactory) -> Naps:
    return compile_naps(tmp_path_factory.mktemp("naps"))


@pytest.mark.slow("compiles a program per placement")
@pytest.mark.parametrize("name", list(CASES))
def test_placement_does_not_change_the_results(name: str, naps: Naps, tmp_path: Path) -> None:
    """Bits are those of the host alone, whichever side is late; so are the neurons that are counted."""
    graph_module = CASES[name].graph()
    weights, lowered = random_weights(graph_module), lower(graph_module, options(None))
    alone = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    expected, stats = every_step(alone), stats_of(alone)
    for number, placement in enumerate(placements(CASES[name].shape.layers, 1, seed=7)):
        (folder := tmp_path / str(number)).mkdir()
        runner = Runner(folder / "host.so", lower(graph_module, options(placement)), graph_module, weights)
        for sides in ((), SIDES[:1], SIDES[1:], SIDES):
            with naps.delaying(sides, seed=number):
                runner.bind()
            found = every_step(runner)
            for step, logits in expected.items():
                assert np.isfinite(logits).all()
                np.testing.assert_array_equal(found[step], logits, f"{placement}, {sides} late: {step}")
            assert stats_of(runner) == stats
            runner.stats("stats.batch")
        if number == 0 and name == "parallel":
            functions = runner.program.functions
            functions["decode"] = [call for call in functions["decode"] if call.op != "wait"]
            with naps.delaying(("accelerator",), seed=1):
                runner.bind()
            wrong = every_step(runner)["token 8"]
            assert not np.array_equal(wrong, expected["token 8"]), "a program without waits gives wrong results"


# ---- in which order ----


# What both sides find in shared memory, whatever they do.
GIVEN = {"step", "tokens", "positions", "slots", "flags", "abandoned"}


def check_function(program: LoweredProgram, function: str, ahead: float, seed: int = 0) -> None:
    """Run both sides in an order that flags allow, in which the host goes on first as often as `ahead`.

    AssertionError where a call reads what is not there yet or no longer, or where both sides wait for ever. The first
    call in the list that uses memory writes it. With `ahead` 0 and 1 whoever may read too early does.
    """
    calls, random = program.functions[function], np.random.default_rng(seed)
    queues = [deque(call for call in calls if call.device == device) for device in ("host", "accelerator")]
    shared = {name: tensor for name, tensor in program.buffers.items() if tensor.memory == "shared"}
    places = {name: range(*_span(tensor), 64) for name, tensor in shared.items() if name not in GIVEN}
    used = {id(call): {arg.name for arg in call.args if arg.space == "buffer"} & places.keys() for call in calls}
    writers = {name: id(call) for call in reversed(calls) for name in used[id(call)]}
    memory, flags = dict[int, str](), set[int | None]()
    while any(queues):
        waits = [queue and queue[0].op in ("wait", "receive") and flag_of(queue[0]) not in flags for queue in queues]
        ready = [queue for queue, is_waiting in zip(queues, waits, strict=True) if queue and not is_waiting]
        assert ready, f"{function}: both sides wait for ever"
        call = (ready[0] if random.random() < ahead else ready[-1]).popleft()
        for name in used[id(call)]:
            if writers[name] == id(call):
                memory.update(dict.fromkeys(places[name], name))
            found = {memory.get(place, "nothing") for place in places[name]}
            assert found == {name}, f"{call.kernel} on the {call.device} finds {found - {name}} in {name}"
        assert (flag_of(call) is not None) == (call.op in ("wait", "receive", "send", "signal")), (
            f"{call.kernel}'s flag"
        )
        if call.op in ("send", "signal"):
            assert flag_of(call) not in flags, f"flag {flag_of(call)} is set twice"
            flags.add(flag_of(call))


def flag_of(call: ProgramCall) -> int | None:
    """Which flag a call sets or waits for."""
    return next((arg.offset for arg in call.args if arg.name == "flags"), None)


def check_memory(program: LoweredProgram) -> None:
    """AssertionError where a device is given the other's memory, or reads what is not there or overwritten."""
    for calls in program.functions.values():
        for call in calls:
            for arg in call.args:
                kept = {"buffer": program.buffers, "state": program.state}.get(arg.space, {})
                assert arg.name not in kept or kept[arg.name].memory in (call.device, "shared"), (call.kernel, arg.name)
    shared = {name: _span(tensor) for name, tensor in program.buffers.items() if tensor.memory == "shared"}
    kept_until = [end for name, (_, end) in shared.items() if name.partition(".")[0] not in program.functions]
    for function in program.functions:
        first = min((start for name, (start, _) in shared.items() if name.startswith(f"{function}.")), default=None)
        assert first is None or all(end <= first for end in kept_until), function
        for seed, ahead in enumerate((0, 1, *(0.02, 0.5, 0.98) * 2)):
            check_function(program, function, ahead, seed)


def _span(tensor: ProgramTensor) -> tuple[int, int]:
    assert tensor.offset is not None
    return tensor.offset, tensor.offset + tensor_bytes(tensor.dtype, tensor.shape)


@pytest.mark.slow("lowers programs of many placements; those of one graph are fast", but=("plain",))
@pytest.mark.parametrize(("name", "kv_dtype"), [("gated", "float32"), ("plain", "q8"), ("parallel", "float16")])
def test_no_buffer_is_read_before_it_is_written(name: str, kv_dtype: str) -> None:
    """In programs of many placements, on paper: no device has to be late for it to show."""
    graph_module = CASES[name].graph()
    for placement in placements(CASES[name].shape.layers, 3, seed=len(name)):
        lowered = lower(graph_module, options(placement, kv_dtype))
        check_memory(lowered.program)
        # The runtime does not refuse the program.
        stored = {tensor.name: Stored(tensor.dtype, tensor.shape) for tensor in lowered.weights.tensors.values()}
        read_program(json.dumps(lowered.program.to_json()).encode(), stored, "program.json")


@pytest.mark.parametrize(("op", "message"), [("wait", "finds .*nothing"), ("signal", "for ever"), ("send", "for ever")])
def test_the_checker_finds_a_missing_transfer_call(op: str, message: str) -> None:
    """Each of the calls of `decode` with which devices meet."""
    program = lower(CASES["gated"].graph(), options(Placement.all_of(4))).program
    calls = program.functions["decode"]
    places = [place for place, call in enumerate(calls) if call.op == op]
    assert len(places) >= 3
    for place in places:
        program.functions["decode"] = [*calls[:place], *calls[place + 1 :]]
        with pytest.raises(AssertionError, match=message):
            for ahead in (0, 1):
                check_function(program, "decode", ahead)


def test_the_checker_finds_memory_that_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower(CASES["plain"].graph(), options(Placement.all_of(3))).program
    check_memory(program)
    sent = [name for name in program.buffers if name.startswith("decode.") and name.endswith(("x.sent", "mask.sent"))]
    program.buffers[sent[0]] = replace(program.buffers[sent[0]], offset=program.buffers[sent[1]].offset)
    with pytest.raises(AssertionError, match=f"finds .*{sent[0]}|finds .*{sent[1]}"):
        check_memory(program)
    monkeypatch.setattr(lowering, "shared_overlap", lambda calls, kernels: Lifetime.overlaps)
    program = lower(CASES["parallel"].graph(), options(ON_HOST, "q8")).program
    with pytest.raises(AssertionError, match="finds"):
        check_memory(program)


def test_caches_are_lent_one_after_another() -> None:
    """In prompts; what one layer no longer needs of shared memory the next takes."""
    graph_module = CASES["parallel"].graph()
    program = lower(graph_module, options(ON_HOST, "q8")).program
    check_memory(program)
    calls = program.functions["prefill_last"]
    assert [call.device for call in calls if call.op == "attention"] == ["accelerator"] * 3
    assert all(tensor.memory == "host" for tensor in program.state.values())
    lent = [call for call in calls if call.kernel.startswith("lend_cache")]
    borrowed = [call for call in calls if call.kernel.startswith("borrow_cache")]
    # Keys and values, each with their scales.
    assert [call.layer for call in lent] == [call.layer for call in borrowed] == [0] * 4 + [1] * 4 + [2] * 4
    shared = [name for name in program.buffers if name.startswith("prefill_last.")]
    spans = [_span(program.buffers[name]) for name in shared if program.buffers[name].memory == "shared"]
    starts, ends = zip(*spans, strict=True)
    assert max(ends) - min(starts) < 0.6 * (sum(ends) - sum(starts))
    # Steps of single tokens attend on the host.
    assert [call.device for call in program.functions["decode"] if call.op == "attention"] == ["host"] * 3


def test_the_slices_of_a_block_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of its neurons reads the sum of all, and adds the bias of down."""
    monkeypatch.setattr(slices, "STAGING_BYTES", 1)
    case = Case(replace(CASES["plain"].shape, layers=1, ffn_norm=True), InsertPredictors("exact"), {0: range(2)})
    calls = lower(case.graph(), options(ON_HOST)).program.functions["score"]
    made = {call.args[-1].name: call for call in calls}

    def terms(name: str) -> list[str]:
        op, args = made[name].op, made[name].args
        return terms(args[1].name) + terms(args[2].name) if op == "add" else [op]

    (norm,) = (call for call in calls if call.op == "ffn_norm")
    # The hot part, and slices of 64, 64 and 1 neurons.
    assert terms(norm.args[1].name) == ["ffn"] * 4
    assert norm.args[2].name == "model.layers.0.fc2.bias"
    sources = [arg for call in calls if call.op == "upload" for arg in call.args if arg.space == "weight"]
    assert sources
    for first, second in pairwise(sorted(sources, key=lambda arg: (arg.name, arg.offset))):
        assert first.name != second.name or first.offset + prod(first.shape or ()) == second.offset, "copied twice"


def test_projections_of_one_input_are_parts_of_one_where_a_gpu_reads_them() -> None:
    case = Case(replace(CASES["plain"].shape, layers=1, hidden=96), InsertPredictors("exact"), {0: SOME})
    functions = lower(case.graph(), replace(options(Placement.all_of(1)), panels=False)).program.functions
    args = [arg for call in functions["score"] if call.op == "linear" for arg in call.args]
    biases = [(arg.name, arg.offset, arg.shape) for arg in args if arg.name.endswith("bias.joined")]
    assert biases == [("model.layers.0.q_proj.bias.joined", 4 * 96 * place, (96,)) for place in range(3)]


def test_blocks_of_different_sizes_share_kernels_for_a_gpu() -> None:
    """Where tokens are decoded each side has one for its largest block, and in prompts the GPU for its largest."""
    case = Case(
        CASES["plain"].shape,
        InsertPredictors("learned", ranks=dict.fromkeys(range(3), 7)),
        {0: range(3), 1: range(50), 2: range(100)},
    )
    functions = lower(case.graph(), replace(options(ON_HOST), accelerator="cuda")).program.functions

    def kernels(function: str, device: Device) -> set[str]:
        blocks = [call for call in functions[function] if (call.op, call.device) == ("ffn", device)]
        return {call.kernel.split("x66_")[0] for call in blocks}

    for function in ("decode", "batch"):
        assert kernels(function, "host") == {"counted_ffn_masked_f16_128"}
        assert kernels(function, "accelerator") == {"counted_ffn_masked_f16_100"}
    assert kernels("score", "accelerator") == {"counted_ffn_dense_f16_128"}


# ---- what crosses ----


@pytest.mark.parametrize("place", ["accelerator", "host", "another function"])
def test_a_projection_that_is_made_elsewhere_is_added_by_itself(place: str) -> None:
    b = GraphBuilder()
    embedded = b.call(EMBEDDING, b.tokens, b.parameter("e", 5, 6), 0)
    x = b.call(RMS_NORM, embedded, b.parameter("n", 6), 1e-5)
    y = b.call(LINEAR, x, b.parameter("w", 6, 6), None)
    total = b.call(ADD, x, y)
    devices: dict[Node, Device] = {x: "accelerator", total: "accelerator"}
    if place != "another function":
        devices[y] = "accelerator" if place == "accelerator" else "host"
    nodes = [node for node in (x, y, total) if node in devices]
    found = find_fusions(nodes, devices, {}, rows=1).sums.get(total)
    expected = {"accelerator": Sum(total, (x, y), y, None, None, ()), "host": Sum(total, (x, y), None, y, None, ())}
    assert found == expected.get(place)


def test_a_value_that_is_added_to_itself_is_no_sum_of_two() -> None:
    b = GraphBuilder()
    x = b.call(EMBEDDING, b.tokens, b.parameter("e", 5, 6), 0)
    total = b.call(ADD, x, x)
    nodes = [x, total, b.call(RMS_NORM, total, b.parameter("n", 6), 1e-5)]
    assert find_fusions(nodes, dict.fromkeys(nodes, "accelerator"), {}, rows=1).sums == {}


def test_no_transfers_where_everything_is_on_the_device() -> None:
    """But for the embedding: an exchange takes as long as many neurons."""
    case = replace(CASES["gated"], predictors=InsertPredictors("exact"), hot=dict.fromkeys(range(4), range(77)))
    program = lower(case.graph(), options(Placement.all_of(4))).program
    for function in ("decode", "batch", "score", "prefill_last", "prefill"):
        found = [call.op for call in program.functions[function]]
        assert [found.count(op) for op in ("signal", "receive", "send", "wait")] == [1, 1, 0, 0], function
        assert found.count("leading") == (function not in ("score", "prefill"))


def test_logits_stay_with_the_head() -> None:
    """And the highest of them are shared, but where the runtime copies all of them."""
    graph_module = CASES["plain"].graph()
    for head in (True, False):
        program = lower(graph_module, options(replace(Placement.all_of(3), head=head))).program
        memories = {function: program.buffers[name].memory for function, name in program.logits.items()}
        assert memories == dict.fromkeys(
            ("decode", "prefill_last", "batch", "score"), "accelerator" if head else "host"
        )
        assert set(program.top_logits) == ({"decode", "prefill_last", "batch"} if head else set())
        assert ("leading" in program.to_json()) == head
        for function, leading in program.top_logits.items():
            rows = SEQUENCES if function == "batch" else 1
            for name, dtype in ((leading.scores, "float32"), (leading.ids, "int32")):
                found = program.buffers[name]
                assert (found.dtype, found.shape, found.memory) == (dtype, (rows, 50), "shared")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_from_the_layer_before_is_made_while_the_host_computes(device: Literal["cpu", "cuda"]) -> None:
    """Its mask is sent with the input of its own block, once that is there."""
    case = replace(CASES["parallel"], predictors=InsertPredictors("learned", ranks=RANKS, inputs={2: "previous"}))
    case = replace(case, shape=replace(case.shape, parallel=False))
    placement = Placement.all_of(case.shape.layers)
    program = lower(case.graph(), replace(options(placement), accelerator=device)).program
    calls = [call for call in program.functions["decode"] if call.device == "accelerator"]
    order = [(call.op, call.layer) for call in calls if call.op in ("predict", "ffn", "attention", "send", "receive")]
    received, sent = ("receive", None), ("send", None)
    expected = [received, ("attention", 0), ("predict", 0), sent, ("ffn", 0), received]
    expected += [("attention", 1), ("predict", 1), sent, ("ffn", 1), ("predict", 2), received]
    assert order == [*expected, ("attention", 2), sent, ("ffn", 2), received]


@sampled(
    device=("cpu", "cuda"),
    hot=(pytest.param(SOME, id="split"), pytest.param((), id="cold")),
    caches=(frozenset(range(4)), frozenset[int]()),
    predictors=(frozenset(range(4)), frozenset({1, 3})),
    slow="lowers a program for each",
)
def test_predictions_that_a_plan_counts_as_early_wait_for_no_cold_neurons(
    device: Literal["cpu", "cuda"], hot: Sequence[int], caches: frozenset[int], predictors: frozenset[int]
) -> None:
    """The device sends its block's input to the host, makes the prediction, and only then waits for cold neurons."""
    previous = InsertPredictors(
        "learned", ranks=dict.fromkeys(range(4), 5), inputs=dict.fromkeys(range(1, 4), "previous")
    )
    case = replace(CASES["gated"], predictors=previous, hot=dict.fromkeys(range(4), hot))
    placement = Placement(frozenset({0, 1, 3}), caches, predictors, head=True)
    program = lower(case.graph(), replace(options(placement), accelerator=device)).program
    calls = [call for call in program.functions["decode"] if call.device == "accelerator"]
    layers = [LayerBytes(1, 1, 77, 1, 0, 1, 1, LayerLaunches(1, 1, 1, 1), 4, number > 0) for number in range(4)]
    wheres = [PartPlaces(layer in placement.attention, layer in caches, layer in predictors) for layer in range(4)]
    early = [
        number
        for number in range(1, 4)
        if wheres[number - 1].attention_on_accelerator and predicts_early(layers[number], wheres[number])
    ]
    assert early == [1]
    for number in early:
        prediction = next(place for place, call in enumerate(calls) if (call.op, call.layer) == ("predict", number))
        sent = max(place for place, call in enumerate(calls[:prediction]) if call.op == "send")
        assert {call.op for call in calls[sent + 1 : prediction]} <= {"ffn"}
        behind = list(takewhile(lambda call: call.op in (*WAITING_OPS, "ffn"), calls[prediction + 1 :]))
        assert behind[-1].op in WAITING_OPS
        # The next layer computes nothing before that.
        assert all(call.op != "ffn" or call.layer == number - 1 for call in behind)


def test_a_block_with_a_bias_is_waited_for_even_if_no_neuron_fires() -> None:
    """A block that is cold altogether has its bias, too; a part of one has none, and is not waited for in vain."""
    calls = lower(CASES["plain"].graph(), options(Placement.all_of(3))).program.functions["decode"]
    # The embedding, the cold block, and the cold part of another; the last layer is hot.
    assert [call.kernel for call in calls if call.op == "receive"] == [*["receive_66_r1"] * 2, "receive_66_r1_counted"]


def test_a_program_with_nothing_for_the_device() -> None:
    """It is one for the host alone, and the runtime opens no device for it."""
    shape = replace(CASES["plain"].shape, activation="relu")
    graph_module = Case(shape, InsertPredictors("exact"), dict.fromkeys(range(3), ())).graph()
    with_device, alone = (lower(graph_module, options(placement)) for placement in (ON_HOST, None))
    assert with_device.program.to_json() == alone.program.to_json()
    assert not with_device.accelerator_built
    assert (alone.program.accelerator_arena_bytes, alone.program.shared_arena_bytes) == (0, 0)
