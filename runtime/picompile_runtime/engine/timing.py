"""Timing of steps: when their calls ran, how many neurons they computed, and why one timed out.

Times of host and accelerator are by one clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import WAITING_OPS, Call, FeedForward, Program
from picompile_runtime.devices.cpu.native import Stamps
from picompile_runtime.errors import RequestError


@dataclass(frozen=True)
class CallSpan:
    """A call and when it ran, in ns of the clock of `time.monotonic_ns`."""

    call: Call
    begin_ns: int
    end_ns: int


class CallTimes:
    """Time stamps of each function's latest step, and the time that its calls took in all steps.

    Only calls on `devices` are measured; others have no span and 0 seconds.
    """

    def __init__(self, program: Program, devices: Sequence[str]) -> None:
        self._program = program
        counts = {
            (function, device): len(program.calls(function, device))
            for function in program.functions
            for device in devices
        }
        self._stamps: dict[tuple[str, str], Stamps] = {key: np.zeros((n, 2), np.int64) for key, n in counts.items()}
        self._sums: dict[tuple[str, str], NDArray[np.int64]] = {key: np.zeros(n, np.int64) for key, n in counts.items()}

    def stamps(self, function: str, device: str) -> Stamps | None:
        """Return the array that a step of `function` writes its stamps to, int64 [calls, 2]; None if not measured."""
        return self._stamps.get((function, device))

    def add(self, function: str) -> None:
        """Add the times of the step of `function` that has just run."""
        for device in ("host", "accelerator"):
            stamps = self._stamps.get((function, device))
            if stamps is not None:
                self._sums[function, device] += stamps[:, 1] - stamps[:, 0]

    def seconds(self, function: str) -> list[tuple[Call, float]]:
        """Return the calls of `function`, each with its seconds in all steps. Raises RequestError for another name."""
        calls = self._calls(function)
        sums = {device: iter(sums.tolist()) for (name, device), sums in self._sums.items() if name == function}
        return [(call, 1e-9 * next(sums[call.device]) if call.device in sums else 0.0) for call in calls]

    def spans(self, function: str) -> list[CallSpan]:
        """Return the calls of the latest step of `function`, in the program's order. Raises RequestError."""
        calls = self._calls(function)
        stamps = {device: iter(stamps.tolist()) for (name, device), stamps in self._stamps.items() if name == function}
        return [CallSpan(call, *next(stamps[call.device])) for call in calls if call.device in stamps]

    def _calls(self, function: str) -> Sequence[Call]:
        if function not in self._program.functions:
            raise RequestError(f"no times were measured for {function!r}, which the program does not have")
        return self._program.functions[function]


@dataclass(frozen=True)
class FiringCounts:
    """The share of one feed-forward part's neurons that steps computed, and the share that fired, each from 0 to 1."""

    part: FeedForward
    computed_share: float
    fired_share: float

    @property
    def read_share(self) -> float:
        """The share of the bytes of the part's rows that steps read, from 0 to 1."""
        kept = self.part.kept_rows / self.part.rows
        return (1 - kept) * self.computed_share + kept * self.fired_share


def firing_counts(parts: Sequence[FeedForward], counts: NDArray[Any] | None, steps: int) -> list[FiringCounts]:
    """Return each part's shares. `counts`, int64 [parts, 2], are the neurons computed and fired in `steps` steps."""
    if counts is None:
        return []
    shares = [(part, counts[part.stats_row] / part.neurons / max(steps, 1)) for part in parts]
    return [FiringCounts(part, float(computed), float(fired)) for part, (computed, fired) in shares]


def mean_shares(rows: Sequence[FiringCounts]) -> tuple[float, float]:
    """Return the computed and the fired share over all neurons; 1.0 each for a model without feed-forward parts."""
    neurons = sum(row.part.neurons for row in rows)
    if not neurons:
        return 1.0, 1.0
    computed = sum(row.computed_share * row.part.neurons for row in rows)
    return computed / neurons, sum(row.fired_share * row.part.neurons for row in rows) / neurons


# The words of `abandoned` where a side that gives up writes the distance in bytes from `abandoned` to the flag that it
# waited for, and the flag's value: see codegen's native/host.c and cuda/prelude.cuh.
_RECORDS = (1, 3)
_FLAG_BYTES = 64
_SETTING_OPS = ("send", "signal")


def step_timeout(
    calls: Sequence[Call],
    step: int,
    flags: NDArray[np.int32],
    abandoned: NDArray[np.int32],
    distance_bytes: int,
) -> str:
    """Return why a step timed out: which side waited in which call for which flag, and which flags were set.

    Args:
        calls: the calls of the step's function.
        step: the step's number.
        flags: int32 [flags, 16], as the step has left them.
        abandoned: int32 [16], as the step has left it.
        distance_bytes: distance from `abandoned` to `flags`.
    """
    of_step = sorted(flag for call in calls if call.op in _SETTING_OPS and (flag := _flag(call)) is not None)
    records = [(int(abandoned[word]), int(abandoned[word + 1])) for word in _RECORDS if abandoned[word]]
    waits = [_wait(calls, (place - distance_bytes) // _FLAG_BYTES, held) for place, held in records]
    first = "; ".join(waits) or "host or accelerator waited too long for the other"
    is_set = [str(flag) for flag in of_step if flags[flag, 0] == step]
    return f"{first}; flags set in step {step}: {', '.join(is_set) or 'none'}, of {len(of_step)}"


def _wait(calls: Sequence[Call], flag: int, held: int) -> str:
    waiting = next((call for call in calls if call.op in WAITING_OPS and _flag(call) == flag), None)
    setting = next((call for call in calls if call.op in _SETTING_OPS and _flag(call) == flag), None)
    if waiting is None or setting is None:
        return f"host or accelerator waited too long for flag {flag}, which held {held}"
    number = [call for call in calls if call.device == waiting.device].index(waiting)
    return (
        f"the {waiting.device} waited too long in its call {number}, "
        f"{waiting.kernel}{_layer(calls, waiting)}, for flag {flag}, which held {held} and is set by {setting.kernel} "
        f"on the {setting.device}"
    )


def _layer(calls: Sequence[Call], waiting: Call) -> str:
    """Return in words which layer a call is in: that of the last call up to it on the same side that has a layer."""
    before: Iterator[Call] = (call for call in calls[: calls.index(waiting) + 1] if call.device == waiting.device)
    layers = [call.layer for call in before if call.layer is not None]
    return f" behind layer {layers[-1]}" if layers else ""


def _flag(call: Call) -> int | None:
    """Return the number of the flag that a call sets or waits for, None if it has none."""
    offsets = [arg.view.offset for arg in call.args if (arg.kind, arg.name) == ("buffer", "flags")]
    return offsets[0] // _FLAG_BYTES if offsets else None
