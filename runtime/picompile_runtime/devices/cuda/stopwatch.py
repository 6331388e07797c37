"""Measurement of the times of calls on a GPU, and a watch for failures of the GPU while a step runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from ctypes import byref, c_float, c_void_p

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.cpu.native import Stamps
from picompile_runtime.devices.cuda.driver import Driver
from picompile_runtime.devices.cuda.graph import BoundCopy, BoundLaunch, EventRecord, Node

# The clocks are aligned this many times, and the shortest try counts.
_TRIES = 5


class GpuStopwatch:
    """Timed events for the calls of one step at a time. Steps of all lists of calls use the same events.

    The events are nodes of the graph, before and after each call, so the GPU never waits for the host to launch the
    next kernel. The times are not exact:

    - A node that records an event takes about as long as the gap between two kernels. A stamped step is longer by that
      much for each of its events; the gaps between calls contain it, and calls contain a part of it.
    - Events have a resolution of about 0.5 us (cuEventElapsedTime in the driver API's reference).
    - The clocks are aligned by an event in the idle stream. The event happens at some time between the host recording
      it and the host knowing of it, and is assumed to happen in the middle. So all times of a step differ from the
      host's clock by one and the same amount, at most half of that interval: `error_ns`. Times of the GPU's calls
      relative to each other do not have this error.

    Methods need the context in which the stream was made, and may be called by one thread after another.
    """

    def __init__(self, driver: Driver, stream: c_void_p, stack: ExitStack) -> None:
        """Prepare to time work in `stream`; `stack` frees the events."""
        self._driver, self._stream, self._stack = driver, stream, stack
        self._tries: list[c_void_p] = []
        self._events: list[c_void_p] = []
        self._origin, self._origin_ns = c_void_p(), 0
        self.error_ns = 0

    def nodes(self, calls: Sequence[Sequence[BoundLaunch | BoundCopy]], first: int) -> Iterator[Node]:
        """Yield the launches of `calls` between events; the first of them is call number `first` of the step."""
        self._make(self._events, 2 * (first + len(calls)))
        for number, launches in enumerate(calls, first):
            yield EventRecord(self._events[2 * number])
            yield from launches
            yield EventRecord(self._events[2 * number + 1])

    def align(self) -> None:
        """Align the clocks, after everything in the stream has run."""
        self._make(self._tries, _TRIES)
        self._driver.call("cuStreamSynchronize", self._stream)
        tries = [(*self._try(event), event) for event in self._tries]
        self.error_ns, self._origin_ns, self._origin = min(tries, key=lambda each: each[0])

    def read(self, stamps: Stamps) -> None:
        """Write to `stamps`, int64 [calls, 2], when the calls ran, in ns of monotonic time. They must have ended."""
        elapsed_ms = c_float()
        for index, event in enumerate(self._events[: stamps.size]):
            self._driver.call("cuEventElapsedTime", byref(elapsed_ms), self._origin, event)
            stamps[index // 2, index % 2] = self._origin_ns + round(1e6 * elapsed_ms.value)

    def _make(self, events: list[c_void_p], count: int) -> None:
        while len(events) < count:
            events.append(self._stack.enter_context(self._driver.event(timed=True)))

    def _try(self, event: c_void_p) -> tuple[int, int]:
        """Return the largest possible error of an event's time, and that time, both in ns."""
        before = time.monotonic_ns()
        self._driver.call("cuEventRecord", event, self._stream)
        self._driver.call("cuEventSynchronize", event)
        after = time.monotonic_ns()
        return (after - before + 1) // 2, (before + after) // 2


# Time between two looks at the GPU. Steps are shorter, except those that read prompts.
_LOOK_S = 0.25


class FailureWatch:
    """Sets abandoned[0] if the GPU `has_failed` while a step runs: the host waits for flags then, not for the driver.

    Its thread sleeps while there are no steps; a step costs two additions. It does not refer to the accelerator, so
    one that was not closed can be garbage-collected.
    """

    def __init__(self, has_failed: Callable[[], bool], abandoned: NDArray[np.int32]) -> None:
        self._has_failed, self._abandoned = has_failed, abandoned
        self._changes = 0  # steps begun and ended: odd while one runs
        self._is_asleep = False
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="picompile-gpu-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Note that a step begins, and that the one before is over, whose wait may have been interrupted."""
        self._changes += 1 + self._changes % 2
        if self._is_asleep:
            self._wake.set()

    def end(self) -> None:
        """Note that the step is over, if one has begun."""
        self._changes += self._changes % 2

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._wake.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.is_set():
            before = self._changes
            self._end.wait(_LOOK_S)
            if self._changes != before:
                continue
            if before % 2 == 0:
                self._sleep()
            elif self._has_failed():
                self._abandoned[0] = 1

    def _sleep(self) -> None:
        self._wake.clear()
        self._is_asleep = True
        if self._changes % 2 == 0 and not self._end.is_set():  # a step may have begun before it could see this
            self._wake.wait()
        self._is_asleep = False
