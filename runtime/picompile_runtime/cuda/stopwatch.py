"""When calls on a GPU began and ended: events around each, by the GPU's clock, and where that is on the host's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import byref, c_float, c_void_p

from picompile_runtime.cuda.driver import Driver
from picompile_runtime.cuda.graph import BoundLaunch, enqueue
from picompile_runtime.native import Stamps

# Of so many tries to align the clocks the shortest counts.
_TRIES = 5


class Stopwatch:
    """Runs calls in `stream` one by one, since a graph does not tell the times of its kernels.

    Times are not exact, in three ways. The clocks are aligned by an event in the idle stream: it happens at some time
    between the host's recording it and the host's knowing of it, and is taken to happen in the middle. So all times of
    a step are wrong by one and the same amount, half of what that took at most: `error_ns`. Events have a resolution
    of about 0.5 us (cuEventElapsedTime in the driver API's reference). And a GPU that has nothing left to do passes the
    event in front of a call before the host has launched its kernel: then the call seems to begin too early, by the
    time that a launch takes.

    Methods need the context in which the stream was made, and may be called by one thread after another.
    """

    def __init__(self, driver: Driver, stream: c_void_p, stack: ExitStack) -> None:
        """`stack` gets what is to be given back."""
        self._driver, self._stream, self._stack = driver, stream, stack
        self._tries: list[c_void_p] = []
        self._events: list[c_void_p] = []
        self._origin, self._origin_ns = c_void_p(), 0
        self.error_ns = 0

    def align(self, count: int) -> None:
        """Makes events for `count` calls and aligns the clocks, once the stream has done all that it was given."""
        self._make(self._tries, _TRIES)
        self._make(self._events, 2 * count)
        self._driver.call("cuStreamSynchronize", self._stream)
        tries = [(*self._try(event), event) for event in self._tries]
        self.error_ns, self._origin_ns, self._origin = min(tries, key=lambda each: each[0])

    def run(self, calls: Sequence[Sequence[BoundLaunch]]) -> None:
        """Enqueues calls, each of one launch or more. May wait for the GPU, whose queue is not without an end."""
        for index, launches in enumerate(calls):
            self._record(self._events[2 * index])
            for launch in launches:
                enqueue(self._driver, launch, self._stream)
            self._record(self._events[2 * index + 1])

    def read(self, stamps: Stamps) -> None:
        """Writes to `stamps`, int64 [calls, 2], when the calls ran, which they must have done: ns of monotonic time."""
        elapsed_ms = c_float()
        for index, event in enumerate(self._events[: stamps.size]):
            self._driver.call("cuEventElapsedTime", byref(elapsed_ms), self._origin, event)
            stamps[index // 2, index % 2] = self._origin_ns + round(1e6 * elapsed_ms.value)

    def _make(self, events: list[c_void_p], count: int) -> None:
        while len(events) < count:
            events.append(self._stack.enter_context(self._driver.event(timed=True)))

    def _record(self, event: c_void_p) -> None:
        self._driver.call("cuEventRecord", event, self._stream)

    def _try(self, event: c_void_p) -> tuple[int, int]:
        """How wrong the time of the event is at most, and that time; both in ns."""
        before = time.monotonic_ns()
        self._record(event)
        self._driver.call("cuEventSynchronize", event)
        after = time.monotonic_ns()
        return (after - before + 1) // 2, (before + after) // 2
