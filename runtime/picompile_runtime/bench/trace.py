"""Traces of steps: how host and accelerator share a step's time, and a trace file that browsers show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from picompile_runtime.artifact.program import DEVICES, WAITING_OPS, Call, Program
from picompile_runtime.bench.bandwidth import kind, statistics_rows
from picompile_runtime.engine.engine import Engine
from picompile_runtime.engine.timing import CallSpan

# Kinds of calls that transfer values between host and accelerator, or wait for them.
_TRANSFERS = ("exchange", "waits")


@dataclass(frozen=True)
class Overlap:
    """The times that host and accelerator computed without waiting for each other, and both at once."""

    host_ns: int
    device_ns: int
    both_ns: int

    @property
    def share(self) -> float:
        """Share of `both_ns` in the time of the side that computes less; 1 if the other side hides all of it."""
        shorter_ns = min(self.host_ns, self.device_ns)
        return self.both_ns / shorter_ns if shorter_ns else 0.0


def overlap(steps: Sequence[TracedStep]) -> Overlap:
    """Return the overlap of host and accelerator over all `steps`."""
    host, device = (list(_computing(steps, side)) for side in ("host", "accelerator"))
    both_ns, of_host, of_device = 0, 0, 0
    while of_host < len(host) and of_device < len(device):
        (begin_ns, end_ns), (other_begin_ns, other_end_ns) = host[of_host], device[of_device]
        both_ns += max(0, min(end_ns, other_end_ns) - max(begin_ns, other_begin_ns))
        # The span that ends first cannot overlap the later ones of the other side.
        if end_ns < other_end_ns:
            of_host += 1
        else:
            of_device += 1
    return Overlap(sum(end - begin for begin, end in host), sum(end - begin for begin, end in device), both_ns)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the accelerator, from its first call to its last, and the parts that they consist of.

    Attributes:
        gpu_s: the whole step: `compute_s` + `exchange_s` + `idle_s`.
        compute_s: calls that compute.
        hot_s: calls for hot neurons, a part of `compute_s`.
        cold_s: the host's feed-forward calls in the same step.
        exchange_s: calls that send to the host and receive from it, with all waiting.
        idle_s: gaps between calls.

    On a GPU every call is between two events, which take time themselves: without them the step would be shorter.
    """

    gpu_s: float
    compute_s: float
    hot_s: float
    cold_s: float
    exchange_s: float
    idle_s: float

    @classmethod
    def of(cls, step: TracedStep) -> StepTime | None:
        """Return the times of a step, or None if the accelerator has no part in it."""
        spans = [span for span in step.spans if span.call.device == "accelerator"]
        if not spans:
            return None
        whole_ns = max(span.end_ns for span in spans) - min(span.begin_ns for span in spans)
        transfer_ns = _total_ns(span for span in spans if kind(span.call) in _TRANSFERS)
        compute_ns = _total_ns(span for span in spans if kind(span.call) not in _TRANSFERS)
        hot_ns = _total_ns(span for span in spans if span.call.op == "ffn")
        cold_ns = _total_ns(span for span in step.spans if (span.call.op, span.call.device) == ("ffn", "host"))
        idle_ns = max(0, whole_ns - transfer_ns - compute_ns)
        return cls(*(1e-9 * ns for ns in (whole_ns, compute_ns, hot_ns, cold_ns, transfer_ns, idle_ns)))


def _total_ns(spans: Iterable[CallSpan]) -> int:
    return sum(span.end_ns - span.begin_ns for span in spans)


def _step_times(steps: Sequence[TracedStep], sequences: int) -> dict[str, float] | None:
    """Return the median of each time of `steps`, per token; None if the accelerator has no part in them."""
    times = [asdict(found) for found in map(StepTime.of, steps) if found is not None]
    return {name: median(each[name] for each in times) / sequences for name in times[0]} if times else None


def hybrid_figures(program: Program, steps: Sequence[TracedStep], sequences: int) -> dict[str, Any]:
    """Return the figures of `bench --json` for `steps` of one function, each for a token of `sequences` sequences."""
    found = overlap(steps)
    tokens = len(steps) * sequences
    function = steps[0].function
    skippable = _skippable_rows(program, function)
    return {
        "host_s_per_token": 1e-9 * found.host_ns / tokens,
        "accelerator_s_per_token": 1e-9 * found.device_ns / tokens,
        "overlap_s_per_token": 1e-9 * found.both_ns / tokens,
        "overlap_share": found.share,
        "exchanges_per_token": sum(call.op in ("send", "signal") for call in program.functions[function]) / sequences,
        "step": _step_times(steps, sequences),
        # In steps for several sequences, kernels that compute every neuron do not count them.
        "skipped_per_token": None if sequences > 1 else sum(len(skippable & step.idle_rows) for step in steps) / tokens,
    }


def _skippable_rows(program: Program, function: str) -> set[int]:
    """Return the rows of the statistics of the host's blocks whose result the accelerator can do without.

    It does not wait for the result if none of a block's neurons is computed: it has sent the block's mask, and counted
    the neurons in it.
    """
    calls = program.functions[function]
    counts = {name for call in calls if call.op == "receive" for name in _counts(call)}
    sends = [call for call in calls if call.op == "send" and counts & _counts(call)]
    masks = {name for call in sends for name in _masks(call)}
    blocks = [call for call in calls if (call.op, call.device) == ("ffn", "host") and masks & _masks(call)]
    return {row for call in blocks for row in statistics_rows(call)}


def _counts(call: Call) -> set[str]:
    """Return the buffers of a call that hold a count: a single integer, while flags and others have more."""
    return {
        arg.name for arg in call.args if arg.kind == "buffer" and (arg.view.dtype, arg.view.shape) == ("int32", (1,))
    }


def _masks(call: Call) -> set[str]:
    return {arg.name for arg in call.args if arg.kind == "buffer" and arg.view.dtype == "uint8"}


def _computing(steps: Sequence[TracedStep], device: str) -> Iterator[tuple[int, int]]:
    """Yield when `device` computed, in order."""
    for step in steps:
        for span in step.spans:
            if span.call.device == device and span.call.op not in WAITING_OPS:
                yield span.begin_ns, span.end_ns


# Names of the processes in a trace file. A browser shows them above each other, on one axis of time.
_PIDS = {device: pid for pid, device in enumerate(DEVICES)}


@dataclass(frozen=True)
class TracedStep:
    """A step of a function: when it and its calls began and ended, in ns of `time.monotonic_ns`.

    `idle_rows` are the rows of the statistics of feed-forward parts of which no neuron was computed; only steps of
    `decode` have them.
    """

    function: str
    begin_ns: int
    end_ns: int
    spans: tuple[CallSpan, ...]
    idle_rows: frozenset[int] = frozenset()


def recorded(engine: Engine, function: str, run: Callable[[], object]) -> TracedStep:
    """Call `run`, which runs a step of `function` while times are measured, and return the step.

    The engine's counts of neurons start anew.
    """
    engine.reset_firing()
    begin_ns = time.monotonic_ns()
    run()
    end_ns = time.monotonic_ns()
    firing = engine.firing() if function == "decode" else []
    idle_rows = frozenset(row.part.stats_row for row in firing if row.computed_share == 0)
    return TracedStep(function, begin_ns, end_ns, spans=tuple(engine.spans(function)), idle_rows=idle_rows)


def chrome_trace(steps: Sequence[TracedStep]) -> dict[str, Any]:
    """Return steps in the Trace Event Format, which Perfetto and chrome://tracing show.

    Every call is a complete event of the process `host` or `accelerator`, of the category `wait` if it waits for the
    other side and `compute` otherwise. Steps, of the category `step`, enclose the host's calls. Times are in us from
    the beginning of the first step. The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5O
    OQtYMH4h6I0nSsKchNAySU.
    """
    origin_ns = min((step.begin_ns for step in steps), default=0)
    devices = dict.fromkeys(["host", *(span.call.device for step in steps for span in step.spans)])
    names = [_process(device) for device in devices]
    events = [event for number, step in enumerate(steps) for event in _events(step, number, origin_ns)]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def _process(device: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": _PIDS[device], "tid": 0, "args": {"name": device}}


def _events(step: TracedStep, number: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    yield _event(
        step.function,
        category="step",
        device="host",
        span_ns=(step.begin_ns, step.end_ns),
        origin_ns=origin_ns,
        arguments={"step": number},
    )
    for span in step.spans:
        call = span.call
        category = "wait" if call.op in WAITING_OPS else "compute"
        arguments = {"kernel": call.kernel, "layer": call.layer, "step": number}
        yield _event(
            call.op,
            category,
            call.device,
            span_ns=(span.begin_ns, span.end_ns),
            origin_ns=origin_ns,
            arguments=arguments,
        )


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
