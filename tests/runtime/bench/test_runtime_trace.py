"""Traces of steps, and the overlap of host and accelerator in them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from helpers.gpu_artifacts import fake_cuda, fake_library, gpu, gpu_artifact, gpu_kernels, gpu_model
from helpers.support import BuildOnce, Cli, compile_for_test
from helpers.toys.toy_artifact import make_toy
from picompile_runtime import Engine, load, measure
from picompile_runtime.artifact.program import WAITING_OPS, Argument, Call
from picompile_runtime.bench import measure as rounds
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.bench.trace import Overlap, StepTime, TracedStep, chrome_trace, hybrid_figures, overlap
from picompile_runtime.devices.cuda import CudaAccelerator
from picompile_runtime.devices.memory import Tensor
from picompile_runtime.engine.timing import CallSpan

__all__ = ["fake_cuda", "fake_library", "gpu", "gpu_artifact", "gpu_kernels", "gpu_model"]

Event = dict[str, Any]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading half a gigabyte takes long, and nothing here depends on how fast that is."""
    monkeypatch.setattr(rounds, "MemoryReader", functools.partial(MemoryReader, size_bytes=2**18))


@pytest.fixture(scope="session")
def tiny_hybrid(build_once: BuildOnce, tiny_model: Path) -> Path:
    """Two layers, half of whose neurons are on a second partition of the CPU, with all else that can be there."""
    hot = {0: range(0, 200, 2), 1: range(100)}
    options = {"quant": "f16", "context": 64, "hot": hot, "accelerator": "cpu", "sequences": 2}
    return build_once("tiny-hybrid", lambda folder: compile_for_test(tiny_model, folder, **options))


def traced(engine: Engine, prompt: int, decode: int, **options: int) -> tuple[list[TracedStep], dict[str, Any]]:
    steps: list[TracedStep] = []
    result = measure(engine, prompt, decode, 1, trace=steps.extend, **options)
    return steps, result


def tracks(trace: dict[str, Any]) -> dict[str, list[Event]]:
    """The events of each process by its name, without steps; every event is as the format asks."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] == "ms"
    assert json.loads(json.dumps(trace)) == trace
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    found: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            assert event["name"] == "process_name"
            continue
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0
        if event["cat"] != "step":
            found[names[event["pid"]]].append(event)
    return found


def assert_one_after_the_other(events: Sequence[Event]) -> None:
    """In a track nothing overlaps. Times are float64, in us with three decimals."""
    for first, second in itertools.pairwise(events):
        assert first["ts"] + first["dur"] <= second["ts"] + 1e-6


def test_trace_of_a_model_for_the_host_alone(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(toy=make_toy()), threads=1) as engine:
        steps, result = traced(engine, 20, 10)
        functions = engine.artifact.program.functions
    assert [step.function for step in steps] == ["prefill_last"] + 8 * ["decode"]
    assert result["hybrid"] is None
    trace = chrome_trace(steps)
    found = tracks(trace)
    assert list(found) == ["host"]
    expected = [call.op for step in steps for call in functions[step.function]]
    assert [event["name"] for event in found["host"]] == expected
    assert {event["cat"] for event in found["host"]} == {"compute"}
    assert_one_after_the_other(found["host"])
    enclosing = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    assert [event["name"] for event in enclosing] == [step.function for step in steps]
    assert enclosing[0]["ts"] == 0
    for event in found["host"]:
        outer = enclosing[event["args"]["step"]]
        assert outer["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-6


def test_trace_has_a_prompt_step_and_decoding_steps(make_artifact: Callable[..., Path]) -> None:
    """Tokens are read at the places that they have in a round; a prompt of one token is no step of a prompt."""
    with load(make_artifact(toy=make_toy()), threads=1) as engine:
        engine._executor.run = Mock(wraps=engine._executor.run)  # type: ignore[method-assign]
        for prompt, decode, depth in ((1, 3, None), (8, 1, None), (9, 2, 5), (1, 2, 0)):
            engine._executor.run.reset_mock()
            steps, _ = traced(engine, prompt, decode, **({} if depth is None else {"depth": depth}))
            seen = [(call.args[0], call.args[2], len(call.args[1])) for call in engine._executor.run.call_args_list]
            assert [step.function for step in steps] == (prompt > 1) * ["prefill_last"] + decode * ["decode"]
            assert engine.position == (prompt if depth is None else depth) + decode
            assert prompt == 1 or ("prefill_last", depth or 0, min(prompt, 8)) in seen


def test_parts_of_a_steps_time_add_up() -> None:
    """The step lasts from the accelerator's first call to its last; of the host's calls only cold neurons count."""

    def span(op: str, device: str, begin_ns: int, end_ns: int) -> CallSpan:
        return CallSpan(Call("kernel", (), op, 0, 0, device=device), begin_ns, end_ns)

    spans = [
        span("inputs", "accelerator", 1000, 1001),
        span("linear", "accelerator", 1003, 1010),
        span("send", "accelerator", 1010, 1012),
        span("ffn", "accelerator", 1013, 1033),
        span("ffn", "host", 1012, 1052),
        span("receive", "accelerator", 1034, 1060),
        span("add", "accelerator", 1060, 1065),
        span("head", "host", 1065, 2000),
    ]  # fmt: skip
    found = StepTime.of(TracedStep("decode", 0, 3000, tuple(spans)))
    assert found is not None
    expected = {"gpu_s": 65, "compute_s": 32, "hot_s": 20, "cold_s": 40, "exchange_s": 29, "idle_s": 4}
    assert {name: round(1e9 * value) for name, value in vars(found).items()} == expected
    assert (
        StepTime.of(TracedStep("decode", 0, 3000, tuple(each for each in spans if each.call.device == "host"))) is None
    )


def test_bench_of_a_gpu(gpu_artifact: Path, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Rounds are measured without the GPU's stamps, which take time; only steps of the trace have them."""
    stamped: list[bool] = []
    start = CudaAccelerator.start

    def noted(self: CudaAccelerator, calls: Any, stamps: Any = None) -> None:
        stamped.append(stamps is not None)
        start(self, calls, stamps)

    monkeypatch.setattr(CudaAccelerator, "start", noted)
    with load(gpu_artifact, threads=1) as engine:
        engine.start_timing()
        engine.decode(1)
        assert {span.call.device for span in engine.spans("decode")} == {"host"}
        assert all((seconds > 0) == (call.device == "host") for call, seconds in engine.timing("decode"))
        stamped.clear()
        decode = measure(engine, 5, 3, 1)["decode"]
    # A step of the prompt and three of decoding: twice in rounds, then traced; there the prompt is read once.
    assert stamped == 8 * [False] + 4 * [True]
    assert (decode["floor_tokens_per_s"], decode["bandwidth_share"]) == (None, None)
    for row in decode["kernels"]:
        assert row["s_per_token"] > 0
        assert (row["floor_s_per_token"] is None) == (row["floor_share"] is None) == (row["device"] == "accelerator")
    ended = cli("bench", gpu_artifact, "-p", "5", "-n", "3", "-r", "1", "-t", "1")
    assert (ended.code, ended.err) == (0, "")
    assert "floor        unknown, since the bandwidth of the GPU's memory is not measured" in ended.out


@pytest.mark.slow("compiles an artifact for two devices")
def test_bench_of_host_and_accelerator(tiny_hybrid: Path, tiny_artifact: Path) -> None:
    """Figures are per token, of steps for one sequence and for two. Bytes are those of the host alone: either side
    reads a weight, and only neurons that fire are read.
    """
    with load(tiny_hybrid, threads=2) as engine:
        found = {sequences: traced(engine, 10, 5, sequences=sequences) for sequences in (1, 2)}
        functions = engine.artifact.program.functions
    with load(tiny_artifact, threads=2) as engine:
        alone, decode = measure(engine, 10, 5, 1)["decode"], found[1][1]["decode"]
    assert decode["computed_share"] == pytest.approx(alone["computed_share"], abs=1e-9)
    # What is rounded is the number of bytes.
    assert decode["bytes_per_token"] == pytest.approx(alone["bytes_per_token"], rel=1e-3)
    for sequences, (steps, result) in found.items():
        function = ("decode", "batch")[sequences - 1]
        assert [step.function for step in steps] == ["prefill_last"] + 5 * [function]
        for step in steps:
            assert [span.call for span in step.spans] == list(functions[step.function])
            assert all(step.begin_ns <= span.begin_ns <= span.end_ns <= step.end_ns for span in step.spans)
            # The clocks of the two libraries are the same: no flag is seen before it was set.
            begun = {flag(span): span.begin_ns for span in step.spans if span.call.op in ("send", "signal")}
            assert all(span.end_ns >= begun[flag(span)] for span in step.spans if span.call.op in WAITING_OPS)
        for side, wait in (("host", "wait"), ("accelerator", "receive")):
            events = tracks(chrome_trace(steps))[side]
            assert_one_after_the_other(events)
            assert {event["cat"] for event in events} == {"compute", "wait"}
            assert {event["name"] for event in events if event["cat"] == "wait"} == {wait}
        together, hybrid, decode = overlap(steps[1:]), result["hybrid"], result["decode"]
        assert 0 <= together.both_ns <= min(together.host_ns, together.device_ns)
        times = [hybrid[f"{name}_s_per_token"] for name in ("host", "accelerator", "overlap")]
        assert times == pytest.approx([1e-9 * ns / (5 * sequences) for ns in vars(together).values()], rel=1e-12)
        assert hybrid["overlap_share"] == together.share
        exchanges = sum(call.op in ("send", "signal") for call in functions[function])
        assert hybrid["exchanges_per_token"] == exchanges / sequences
        # Each part predicts for itself; of several sequences nobody counts.
        assert hybrid["skipped_per_token"] == (0, None)[sequences - 1]
        step_times = hybrid["step"]
        assert step_times["gpu_s"] > step_times["compute_s"] > step_times["hot_s"] > 0
        assert step_times["exchange_s"] > 0 and step_times["cold_s"] > 0
        assert {row["device"] for row in decode["kernels"]} == {"host", "accelerator"}
        assert all(row["s_per_token"] > 0 and row["floor_s_per_token"] is not None for row in decode["kernels"])
        for device in ("host", "accelerator"):
            # Calls of a device take no longer than the steps that they are in.
            spent = sum(row["s_per_token"] for row in decode["kernels"] if row["device"] == device)
            assert spent < 1 / decode["tokens_per_s"]


def flag(span: CallSpan) -> int:
    """Return the place of the flag that a call sets or waits for."""
    return next(argument.view.offset for argument in span.call.args if argument.name == "flags")


def test_steps_without_cold_neurons_are_counted() -> None:
    """Where the accelerator has sent a block's mask, and knows how many neurons are in it."""

    def argument(name: str, dtype: str, *shape: int) -> Argument:
        return Argument("buffer", name, Tensor(dtype, shape))

    def block(mask: str, row: int) -> Call:
        statistics = Argument("buffer", "stats", Tensor("int64", (2,), 16 * row))
        return Call("block", (argument(mask, "uint8", 1, 8), statistics), "ffn", 0, 0)

    count = argument("count", "int32", 1)
    send = Call("send", (argument("sent", "uint8", 1, 8), count), "send", 0, 0, device="accelerator")
    receive = Call("receive", (count,), "receive", 0, 0, device="accelerator")
    program: Any = SimpleNamespace(functions={"decode": (send, block("sent", 1), block("own", 2), receive)})
    steps = [TracedStep("decode", 0, 9, (), frozenset(rows)) for rows in ([], [1], [1, 2], [0, 2])]
    assert hybrid_figures(program, steps, 1)["skipped_per_token"] == 0.5


@pytest.mark.slow("compiles an artifact for two devices; of one it is fast", but=("tiny_artifact",))
@pytest.mark.parametrize("artifact", ["tiny_hybrid", "tiny_artifact"])
def test_bench_writes_a_trace(cli: Cli, request: pytest.FixtureRequest, tmp_path: Path, artifact: str) -> None:
    folder, trace = request.getfixturevalue(artifact), tmp_path / "new" / "trace.json"
    options = ["-p", "6", "-n", "4", "-r", "1", "-t", "2", "--trace", trace]
    for _ in range(2):  # a trace is overwritten
        ended = cli("bench", folder, *options)
        assert (ended.code, ended.err) == (0, "")
    is_hybrid = artifact == "tiny_hybrid"
    assert list(tracks(json.loads(trace.read_text()))) == ["host", "accelerator"][: 1 + is_hybrid]
    assert [path.name for path in trace.parent.iterdir()] == ["trace.json"]
    assert ("devices" in ended.out, "a token, host" in ended.out) == (is_hybrid, is_hybrid)


def test_bench_overwrites_only_traces(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text('{"answer": 42}')
    for path, says in ((kept, "exists and is no trace of bench"), (tmp_path, "")):
        ended = cli("bench", tiny_artifact, "-p", "4", "-n", "2", "--trace", path)
        assert (ended.code, ended.err.count("\n")) == (2, 1) and says in ended.err
    assert kept.read_text() == '{"answer": 42}'


# ---- the overlap alone ----


def step_of(intervals: dict[str, Sequence[tuple[str, int, int]]]) -> TracedStep:
    """Return a step of calls (operator, begin, end) on host and accelerator."""
    spans = [
        CallSpan(Call(op, (), op, None, 0, device=device), begin, end)
        for device, calls in intervals.items()
        for op, begin, end in calls
    ]
    return TracedStep("decode", 0, 1000, tuple(spans))


def test_overlap_of_random_calls_is_that_of_every_nanosecond() -> None:
    random = np.random.default_rng(5)

    def calls() -> Iterator[tuple[str, int, int]]:
        ends = np.sort(random.choice(1000, 60, replace=False)).tolist()
        for begin, end in itertools.pairwise(ends):
            yield str(random.choice(["ffn", "wait", "receive", "linear"])), begin, end

    for turn in range(30):
        of_side = {device: list(calls()) for device in ("host", "accelerator")}
        if turn < 2:  # an idle side
            of_side["accelerator"] = [("receive", 0, 1000)] * turn
        busy = np.zeros((2, 1000), bool)
        for row, of_one in zip(busy, of_side.values(), strict=True):
            for op, begin, end in of_one:
                row[begin:end] = op not in ("wait", "receive")
        found = overlap([step_of(of_side)])
        host_ns, device_ns, both_ns = *busy.sum(axis=1).tolist(), int(busy.all(axis=0).sum())
        assert found == Overlap(host_ns=host_ns, device_ns=device_ns, both_ns=both_ns)
        assert found.share == (both_ns / min(host_ns, device_ns) if device_ns else 0)
