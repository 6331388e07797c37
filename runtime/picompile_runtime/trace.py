"""Steps, call by call, as a trace that a browser shows: host and hot device above each other, on one axis of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from picompile_runtime.engine import Engine
from picompile_runtime.program import WAITS
from picompile_runtime.timing import Span

_TRACKS = {"host": "host", "device": "hot device"}
_PIDS = {device: pid for pid, device in enumerate(_TRACKS)}


@dataclass(frozen=True)
class Step:
    """A step of a function, when it began and ended (ns of `time.monotonic_ns`), and when its calls did.

    `idle_rows`: the feed-forward parts of which no neuron was computed, by their rows of the statistics; only `decode`
    has them.
    """

    function: str
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]
    idle_rows: frozenset[int] = frozenset()


def recorded(engine: Engine, function: str, run: Callable[[], object]) -> Step:
    """What `run` does, which is a step of `function` with times being measured. Counts neurons anew."""
    engine.reset_firing()
    begin_ns = time.monotonic_ns()
    run()
    end_ns = time.monotonic_ns()
    firing = engine.firing() if function == "decode" else []
    idle_rows = frozenset(row.part.stats_row for row in firing if row.computed_share == 0)
    return Step(function, begin_ns, end_ns, tuple(engine.spans(function)), idle_rows)


def chrome_trace(steps: Sequence[Step]) -> dict[str, Any]:
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


def _events(step: Step, number: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    yield _event(step.function, "step", "host", (step.begin_ns, step.end_ns), origin_ns, {"step": number})
    for span in step.spans:
        call = span.call
        category = "wait" if call.op in WAITS else "compute"
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
