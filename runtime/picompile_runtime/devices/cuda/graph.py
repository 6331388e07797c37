"""Capture of a list of launches and copies as one CUDA graph, which one call of the driver starts.

Launches run one after the other. Copies run in an order of their own beside them: each begins when the launches before
it that use its target are over, and the next launch that does waits for it. A copy from memory that is not pinned is
several nodes: see `bounce`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass

from picompile_runtime.devices.cuda.bounce import BounceBuffers, BouncedCopies
from picompile_runtime.devices.cuda.driver import CudaError, Driver, GpuCallError
from picompile_runtime.devices.cuda.module import GpuLaunch

# CU_STREAM_CAPTURE_MODE_RELAXED: other calls meanwhile, even in this thread, do not end the capture. Python may collect
# other CUDA objects at any time.
_CAPTURE_RELAXED = 2
# CU_EVENT_RECORD_EXTERNAL: in a capture, a node that records the event whenever the graph runs.
_RECORD_EXTERNAL = 1


@dataclass(frozen=True)
class BoundLaunch:
    """A launch of `function` with the addresses of its parameters, and the bytes from each on that it may use.

    Errors name the `kernel` that it is part of.
    """

    kernel: str
    launch: GpuLaunch
    function: c_void_p
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]

    def uses(self, copy: BoundCopy) -> bool:
        """Return whether the launch may use bytes that a copy writes."""
        end = copy.target + copy.size
        spans = zip(self.addresses, self.sizes, strict=True)
        return any(start < end and copy.target < start + size for start, size in spans)


@dataclass(frozen=True)
class BoundCopy:
    """A copy of `size` bytes from the host's address `source` to the GPU's address `target`.

    It goes through `buffers` if the memory at `source` is not pinned.
    """

    kernel: str
    source: int
    target: int
    size: int
    buffers: BounceBuffers | None = None


@dataclass(frozen=True)
class MemoryFill:
    """A node that sets `size` bytes from the GPU's address `target` on to zero; no kernel is needed for it."""

    target: int
    size: int


@dataclass(frozen=True)
class EventRecord:
    """A node that records `event`, which is timed."""

    event: c_void_p


# The nodes of a graph.
Node = BoundLaunch | BoundCopy | MemoryFill | EventRecord


@contextmanager
def runnable_graph(
    driver: Driver, nodes: Sequence[Node], stream: c_void_p, copies: c_void_p | None = None
) -> Iterator[c_void_p]:
    """Make a graph of the nodes, in order, and yield it, ready to run.

    Copies run beside launches, as in the stream `copies`; without one they wait for each other. Nothing else may use
    the streams meanwhile.
    """
    runnable = c_void_p()
    bounced = _bounced(driver, nodes, stream, copies)  # kept until the graph is destroyed, which refers to it
    try:
        with _captured(driver, nodes, (stream, copies), bounced) as graph:
            driver.call("cuGraphInstantiateWithFlags", byref(runnable), graph, 0)
        driver.call("cuGraphUpload", runnable, stream)
        yield runnable
    finally:
        if runnable:
            driver.call("cuGraphExecDestroy", runnable)


def _bounced(driver: Driver, nodes: Sequence[Node], stream: c_void_p, copies: c_void_p | None) -> BouncedCopies | None:
    """Return the object that captures copies from memory that is not pinned; None if there are no such copies."""
    buffers = [node.buffers for node in nodes if isinstance(node, BoundCopy) and node.buffers is not None]
    if not buffers:
        return None
    return BouncedCopies(driver, buffers[0], stream if copies is None else copies, beside=copies is not None)


@contextmanager
def _captured(
    driver: Driver,
    nodes: Sequence[Node],
    streams: tuple[c_void_p, c_void_p | None],
    bounced: BouncedCopies | None,
) -> Iterator[c_void_p]:
    graph = c_void_p()
    stream, copies = streams
    try:
        with ExitStack() as events:
            fork = (
                None
                if copies is None
                else _Fork(driver, nodes, streams=(stream, copies), bounced=bounced, events=events)
            )
            driver.call("cuStreamBeginCapture_v2", stream, _CAPTURE_RELAXED)
            try:
                if fork is not None and fork.has_copies:
                    fork.enqueue()
                else:
                    for node in nodes:
                        _enqueue(driver, node, stream, bounced)
            except BaseException:
                with suppress(CudaError):
                    driver.call("cuStreamEndCapture", stream, byref(graph))
                raise
            driver.call("cuStreamEndCapture", stream, byref(graph))
        yield graph
    finally:
        if graph:
            driver.call("cuGraphDestroy", graph)


class _Fork:
    """Launches in one stream and copies in another, captured together: events become edges of the graph."""

    def __init__(
        self,
        driver: Driver,
        nodes: Sequence[Node],
        streams: tuple[c_void_p, c_void_p],
        bounced: BouncedCopies | None,
        events: ExitStack,
    ) -> None:
        """Prepare to add `nodes` to the capture of the first stream; `events` frees what that takes."""
        self._driver, self._nodes, self._bounced = driver, nodes, bounced
        self._stream, self._copies = streams
        copies = [(number, node) for number, node in enumerate(nodes) if isinstance(node, BoundCopy)]
        # For each copy the last launch before it that uses its target; None for the beginning.
        self._free_after = {number: self._last_user(number, copy) for number, copy in copies}
        marks = [None, *copies, *(after for after in set(self._free_after.values()) if after is not None)]
        # Where a thread captures, nothing can be made.
        self._events = [events.enter_context(driver.event()) for _ in marks if copies]

    @property
    def has_copies(self) -> bool:
        """Whether there is anything for the second stream."""
        return bool(self._free_after)

    def enqueue(self) -> None:
        """Add all nodes, and join the streams at the end."""
        marks: dict[int | None, c_void_p] = {None: self._mark(self._stream)}
        self._wait(self._copies, marks[None])
        if self._bounced is not None:
            self._bounced.follow(marks[None])
        arriving: list[tuple[BoundCopy, c_void_p]] = []
        for number, node in enumerate(self._nodes):
            if isinstance(node, BoundCopy):
                if (after := self._free_after[number]) is not None:
                    self._wait(self._copies, marks[after])
                _enqueue(self._driver, node, self._copies, self._bounced)
                arriving.append((node, self._mark(self._copies)))
                continue
            if isinstance(node, BoundLaunch):
                self._await(node, arriving)
            _enqueue(self._driver, node, self._stream, None)
            if number in self._free_after.values():
                marks[number] = self._mark(self._stream)
        if arriving:
            self._wait(self._stream, arriving[-1][1])

    def _await(self, launch: BoundLaunch, arriving: list[tuple[BoundCopy, c_void_p]]) -> None:
        """Let a launch wait for the copies that it uses. They arrive in order: the last of them stands for the rest."""
        used = [place for place, (copy, _) in enumerate(arriving) if launch.uses(copy)]
        if used:
            self._wait(self._stream, arriving[used[-1]][1])
            del arriving[: used[-1] + 1]

    def _last_user(self, number: int, copy: BoundCopy) -> int | None:
        for before in range(number - 1, -1, -1):
            node = self._nodes[before]
            if isinstance(node, BoundLaunch) and node.uses(copy):
                return before
        return None

    def _mark(self, stream: c_void_p) -> c_void_p:
        event = self._events.pop()
        self._driver.call("cuEventRecord", event, stream)
        return event

    def _wait(self, stream: c_void_p, event: c_void_p) -> None:
        self._driver.call("cuStreamWaitEvent", stream, event, 0)


def _enqueue(driver: Driver, node: Node, stream: c_void_p, bounced: BouncedCopies | None) -> None:
    """Add one node to the capture, or the parts of a copy to `bounced`, which captures in the same stream.

    The driver copies parameters during the call, so they need not outlive it.
    """
    if isinstance(node, EventRecord):
        driver.call("cuEventRecordWithFlags", node.event, stream, _RECORD_EXTERNAL)
        return
    if isinstance(node, BoundCopy) and node.buffers is not None and bounced is not None:
        bounced.enqueue(node.source, node.target, node.size)
        return
    if isinstance(node, MemoryFill):
        driver.call("cuMemsetD8Async", node.target, 0, node.size, stream)
        return
    if isinstance(node, BoundCopy):
        driver.call("cuMemcpyHtoDAsync_v2", node.target, node.source, node.size, stream)
        return
    grid, block, count = node.launch.grid, node.launch.block, len(node.addresses)
    values = (c_uint64 * count)(*node.addresses)
    start = ctypes.addressof(values)
    parameters = (c_void_p * count)(*(start + 8 * index for index in range(count)))
    try:
        driver.call("cuLaunchKernel", node.function, *grid, *block, 0, stream, parameters, None)
    except GpuCallError as error:
        raise GpuCallError(f"kernel {node.kernel}: {error}", error.result) from error
