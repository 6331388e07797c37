"""When calls on a GPU began and ended: nodes of a graph that record events, and the host's time of the GPU's clock."""

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
from picompile_runtime.devices.cuda.graph import BoundLaunch, EventRecord, Node

# The shortest of so many tries to align the clocks counts.
_TRIES = 5


class GpuStopwatch:
    """Timed events for the calls of one step at a time. A step of any list of calls uses the same events.

    The events are nodes of the graph, in front of each call and behind it, so that the GPU never waits for the host to
    launch the next kernel. What remains inexact:

    - A node that records an event takes about as long as the gap between two kernels. A stamped step is longer than one
      that is not, by that for each of its events; the gaps between calls contain it, and the calls a part of it.
    - Events have a resolution of about 0.5 us (cuEventElapsedTime in the driver API's reference).
    - The clocks are aligned by an event in the idle stream: it happens at some time between the host's recording it and
      the host's knowing of it, and is taken to happen in the middle. So all times of a step are wrong against the
      host's by one and the same amount, half of what that took at most: `error_ns`. Times of the GPU's calls are not
      wrong against each other.

    Methods need the context in which the stream was made, and may be called by one thread after another.
    """

    def __init__(self, driver: Driver, stream: c_void_p, stack: ExitStack) -> None:
        """`stack` gets what is to be given back."""
        self._driver, self._stream, self._stack = driver, stream, stack
        self._tries: list[c_void_p] = []
        self._events: list[c_void_p] = []
        self._origin, self._origin_ns = c_void_p(), 0
        self.error_ns = 0

    def nodes(self, calls: Sequence[Sequence[BoundLaunch]], first: int) -> Iterator[Node]:
        """The launches of `calls` between events; the first of them is call number `first` of the step."""
        self._make(self._events, 2 * (first + len(calls)))
        for number, launches in enumerate(calls, first):
            yield EventRecord(self._events[2 * number])
            yield from launches
            yield EventRecord(self._events[2 * number + 1])

    def align(self) -> None:
        """Aligns the clocks, once the stream has done all that it was given."""
        self._make(self._tries, _TRIES)
        self._driver.call("cuStreamSynchronize", self._stream)
        tries = [(*self._try(event), event) for event in self._tries]
        self.error_ns, self._origin_ns, self._origin = min(tries, key=lambda each: each[0])

    def read(self, stamps: Stamps) -> None:
        """Writes to `stamps`, int64 [calls, 2], when the calls ran, which they must have done: ns of monotonic time."""
        elapsed_ms = c_float()
        for index, event in enumerate(self._events[: stamps.size]):
            self._driver.call("cuEventElapsedTime", byref(elapsed_ms), self._origin, event)
            stamps[index // 2, index % 2] = self._origin_ns + round(1e6 * elapsed_ms.value)

    def _make(self, events: list[c_void_p], count: int) -> None:
        while len(events) < count:
            events.append(self._stack.enter_context(self._driver.event(timed=True)))

    def _try(self, event: c_void_p) -> tuple[int, int]:
        """How wrong the time of the event is at most, and that time; both in ns."""
        before = time.monotonic_ns()
        self._driver.call("cuEventRecord", event, self._stream)
        self._driver.call("cuEventSynchronize", event)
        after = time.monotonic_ns()
        return (after - before + 1) // 2, (before + after) // 2


# A look at the GPU now and then while a step takes long: the host waits for flags in it, and asks no driver.


_LOOK_S = 0.25  # steps that answer take less, but for prompts


class FailureWatch:
    """Sets abandoned[0] if the GPU `has_failed` while a step runs. Its thread sleeps while there are no steps.

    A step costs two additions here. It holds no device, so that one that is not closed can be collected.
    """

    def __init__(self, has_failed: Callable[[], bool], abandoned: NDArray[np.int32]) -> None:
        self._has_failed, self._abandoned = has_failed, abandoned
        self._changes = 0  # steps begun and ended: odd while one runs
        self._is_asleep = False
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="picompile-gpu-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A step begins."""
        self._changes += 1
        if self._is_asleep:
            self._wake.set()

    def end(self) -> None:
        """The step is over, or none has begun."""
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
