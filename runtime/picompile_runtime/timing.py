"""When the calls of steps began and ended, on the host and on the hot device, by one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError
from picompile_runtime.native import Stamps
from picompile_runtime.program import Call, Program


@dataclass(frozen=True)
class Span:
    """A call, and when it ran: ns of the clock of `time.monotonic_ns`."""

    call: Call
    begin_ns: int
    end_ns: int


class CallTimes:
    """Stamps of the last step of each function, and how long its calls took in all steps.

    Of `devices` alone; a call of another has no span, and takes 0 seconds.
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
        """Where a step of `function` writes them, int64 [calls, 2]; None where `device` is not timed."""
        return self._stamps.get((function, device))

    def add(self, function: str) -> None:
        """Counts the step that has just been made."""
        for device in ("host", "device"):
            stamps = self._stamps.get((function, device))
            if stamps is not None:
                self._sums[function, device] += stamps[:, 1] - stamps[:, 0]

    def seconds(self, function: str) -> list[tuple[Call, float]]:
        """The calls of `function`, each with its seconds in all steps. Raises RequestError for an unknown function."""
        calls = self._calls(function)
        sums = {device: iter(sums.tolist()) for (name, device), sums in self._sums.items() if name == function}
        return [(call, 1e-9 * next(sums[call.device]) if call.device in sums else 0.0) for call in calls]

    def spans(self, function: str) -> list[Span]:
        """The calls of the last step of `function`, in the order of the program. Raises RequestError."""
        calls = self._calls(function)
        stamps = {device: iter(stamps.tolist()) for (name, device), stamps in self._stamps.items() if name == function}
        return [Span(call, *next(stamps[call.device])) for call in calls if call.device in stamps]

    def _calls(self, function: str) -> Sequence[Call]:
        if function not in self._program.functions:
            raise RequestError(f"no times were measured for {function!r}, which the program does not have")
        return self._program.functions[function]
