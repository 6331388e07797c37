"""Splits the time of a hybrid step: on either side, on both at the same time, and between the two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from picompile_runtime.artifact.program import WAITING_OPS, Call, Program
from picompile_runtime.bench.bandwidth import kind, statistics_rows
from picompile_runtime.engine.engine import Engine
from picompile_runtime.engine.timing import CallSpan

# Kinds of calls that bring values from one side to the other, or wait for them.
_EXCHANGES = ("exchange", "waits")


@dataclass(frozen=True)
class Overlap:
    """How long each side computed, which is all but waiting for the other, and for how long of that both did."""

    host_ns: int
    device_ns: int
    both_ns: int

    @property
    def share(self) -> float:
        """Of the time of the side that computes less; 1 where that is hidden wholly behind the other side."""
        shorter_ns = min(self.host_ns, self.device_ns)
        return self.both_ns / shorter_ns if shorter_ns else 0.0


def overlap(steps: Sequence[TracedStep]) -> Overlap:
    """The overlap over all `steps`."""
    host, device = (list(_computing(steps, side)) for side in ("host", "device"))
    both_ns, of_host, of_device = 0, 0, 0
    while of_host < len(host) and of_device < len(device):
        (begin_ns, end_ns), (other_begin_ns, other_end_ns) = host[of_host], device[of_device]
        both_ns += max(0, min(end_ns, other_end_ns) - max(begin_ns, other_begin_ns))
        # What ends first ends before all that follows on the other side begins.
        if end_ns < other_end_ns:
            of_host += 1
        else:
            of_device += 1
    return Overlap(sum(end - begin for begin, end in host), sum(end - begin for begin, end in device), both_ns)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the hot device, from its first call to its last, and what they consist of.

    `gpu_s` = `compute_s` + `exchange_s` + `idle_s`. `compute_s` are the calls that compute, of which `hot_s` are the
    hot neurons. `exchange_s` are the calls that send to the host and receive from it, with all waiting. `idle_s` are
    the gaps between calls. `cold_s` are the host's feed-forward calls of the same step.

    Every call on a GPU stands between two events, which take time themselves: the step would take less without them.
    """

    gpu_s: float
    compute_s: float
    hot_s: float
    cold_s: float
    exchange_s: float
    idle_s: float

    @classmethod
    def of(cls, step: TracedStep) -> StepTime | None:
        """Return the times of a step, or None where the hot device has no part in it."""
        spans = [span for span in step.spans if span.call.device == "device"]
        if not spans:
            return None
        whole_ns = max(span.end_ns for span in spans) - min(span.begin_ns for span in spans)
        exchange_ns = _total_ns(span for span in spans if kind(span.call) in _EXCHANGES)
        compute_ns = _total_ns(span for span in spans if kind(span.call) not in _EXCHANGES)
        hot_ns = _total_ns(span for span in spans if span.call.op == "ffn")
        cold_ns = _total_ns(span for span in step.spans if (span.call.op, span.call.device) == ("ffn", "host"))
        idle_ns = max(0, whole_ns - exchange_ns - compute_ns)
        return cls(*(1e-9 * ns for ns in (whole_ns, compute_ns, hot_ns, cold_ns, exchange_ns, idle_ns)))


def _total_ns(spans: Iterable[CallSpan]) -> int:
    return sum(span.end_ns - span.begin_ns for span in spans)


def _step_times(steps: Sequence[TracedStep], batch: int) -> dict[str, float] | None:
    """Return the medians of `steps`, each by itself, per token; None where the hot device has no part in them."""
    times = [asdict(found) for found in map(StepTime.of, steps) if found is not None]
    return {name: median(each[name] for each in times) / batch for name in times[0]} if times else None


def hybrid_figures(program: Program, steps: Sequence[TracedStep], batch: int) -> dict[str, Any]:
    """What `bench --json` says of `steps`, which are of one function and of `batch` tokens each."""
    found = overlap(steps)
    tokens = len(steps) * batch
    function = steps[0].function
    skippable = _skippable_rows(program, function)
    return {
        "host_s_per_token": 1e-9 * found.host_ns / tokens,
        "device_s_per_token": 1e-9 * found.device_ns / tokens,
        "overlap_s_per_token": 1e-9 * found.both_ns / tokens,
        "overlap_share": found.share,
        "exchanges_per_token": sum(call.op in ("send", "signal") for call in program.functions[function]) / batch,
        "step": _step_times(steps, batch),
        # Kernels of a batch that compute every neuron do not count them.
        "skipped_per_token": None if batch > 1 else sum(len(skippable & step.idle_rows) for step in steps) / tokens,
    }


def _skippable_rows(program: Program, function: str) -> set[int]:
    """The blocks of the host whose result the device does not ask for where none of their neurons is computed, each by
    its row of the statistics. The device has sent their masks, and counted what is in them.
    """
    calls = program.functions[function]
    counts = {name for call in calls if call.op == "receive" for name in _counts(call)}
    sends = [call for call in calls if call.op == "send" and counts & _counts(call)]
    masks = {name for call in sends for name in _masks(call)}
    blocks = [call for call in calls if (call.op, call.device) == ("ffn", "host") and masks & _masks(call)]
    return {row for call in blocks for row in statistics_rows(call)}


def _counts(call: Call) -> set[str]:
    """Single integers; flags and the like have more."""
    return {
        arg.name for arg in call.args if arg.kind == "buffer" and (arg.view.dtype, arg.view.shape) == ("int32", (1,))
    }


def _masks(call: Call) -> set[str]:
    return {arg.name for arg in call.args if arg.kind == "buffer" and arg.view.dtype == "uint8"}


def _computing(steps: Sequence[TracedStep], device: str) -> Iterator[tuple[int, int]]:
    """When a side computed, in order."""
    for step in steps:
        for span in step.spans:
            if span.call.device == device and span.call.op not in WAITING_OPS:
                yield span.begin_ns, span.end_ns


# Steps, call by call, as a trace that a browser shows: host and hot device above each other, on one axis of time.


_TRACKS = {"host": "host", "device": "hot device"}
_PIDS = {device: pid for pid, device in enumerate(_TRACKS)}


@dataclass(frozen=True)
class TracedStep:
    """A step of a function, when it began and ended (ns of `time.monotonic_ns`), and when its calls did.

    `idle_rows`: the feed-forward parts of which no neuron was computed, by their rows of the statistics; only `decode`
    has them.
    """

    function: str
    begin_ns: int
    end_ns: int
    spans: tuple[CallSpan, ...]
    idle_rows: frozenset[int] = frozenset()


def recorded(engine: Engine, function: str, run: Callable[[], object]) -> TracedStep:
    """What `run` does, which is a step of `function` with times being measured. Counts neurons anew."""
    engine.reset_firing()
    begin_ns = time.monotonic_ns()
    run()
    end_ns = time.monotonic_ns()
    firing = engine.firing() if function == "decode" else []
    idle_rows = frozenset(row.part.stats_row for row in firing if row.computed_share == 0)
    return TracedStep(function, begin_ns, end_ns, tuple(engine.spans(function)), idle_rows)


def chrome_trace(steps: Sequence[TracedStep]) -> dict[str, Any]:
    """Steps in the Trace Event Format, which Perfetto and chrome://tracing show.

    Every call is a complete event of the process `host` or `hot device`, of the category `wait` where it waits for the
    other side and `compute` elsewhere. Steps, of the category `step`, enclose the host's calls. Times are in us from
    the beginning of the first step. The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5O
    OQtYMH4h6I0nSsKchNAySU.
    """
    origin_ns = min((step.begin_ns for step in steps), default=0)
    devices = dict.fromkeys(["host", *(span.call.device for step in steps for span in step.spans)])
    names = [_process(device) for device in devices]
    events = [event for number, step in enumerate(steps) for event in _events(step, number, origin_ns)]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def _process(device: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": _PIDS[device], "tid": 0, "args": {"name": _TRACKS[device]}}


def _events(step: TracedStep, number: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    yield _event(step.function, "step", "host", (step.begin_ns, step.end_ns), origin_ns, {"step": number})
    for span in step.spans:
        call = span.call
        category = "wait" if call.op in WAITING_OPS else "compute"
        arguments = {"kernel": call.kernel, "layer": call.layer, "step": number}
        yield _event(call.op, category, call.device, (span.begin_ns, span.end_ns), origin_ns, arguments)


def _event(
    name: str, category: str, device: str, span_ns: tuple[int, int], origin_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    begin_ns, end_ns = span_ns
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": (begin_ns - origin_ns) / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "pid": _PIDS[device],
        "tid": 0,
        "args": arguments,
    }
