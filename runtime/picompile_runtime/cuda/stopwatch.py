"""When calls on a GPU began and ended: nodes of a graph that record events, and the host's time of the GPU's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ctypes import byref, c_float, c_void_p

from picompile_runtime.cuda.driver import Driver
from picompile_runtime.cuda.graph import BoundLaunch, Node, Record
from picompile_runtime.native import Stamps

# The shortest of so many tries to align the clocks counts.
_TRIES = 5


class Stopwatch:
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
            yield Record(self._events[2 * number])
            yield from launches
            yield Record(self._events[2 * number + 1])

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
