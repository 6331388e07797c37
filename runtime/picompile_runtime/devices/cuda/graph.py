"""Makes one CUDA graph of a list of launches; one call of the driver starts it, however many kernels it has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass

from picompile_runtime.devices.cuda.driver import CudaError, Driver, GpuCallError
from picompile_runtime.devices.cuda.module import GpuLaunch

# CU_STREAM_CAPTURE_MODE_RELAXED: other calls meanwhile, even in this thread, do not end the capture. Python may collect
# other CUDA objects at any time.
_CAPTURE_RELAXED = 2
# CU_EVENT_RECORD_EXTERNAL: in a capture, a node that records the event whenever the graph runs.
_RECORD_EXTERNAL = 1


@dataclass(frozen=True)
class BoundLaunch:
    """A launch of `function` with the addresses of its parameters. Errors name the `kernel` that it is part of."""

    kernel: str
    launch: GpuLaunch
    function: c_void_p
    addresses: tuple[int, ...]


@dataclass(frozen=True)
class EventRecord:
    """A node that records `event`, which is timed."""

    event: c_void_p


# The nodes of a graph.
Node = BoundLaunch | EventRecord


@contextmanager
def runnable_graph(driver: Driver, nodes: Sequence[Node], stream: c_void_p) -> Iterator[c_void_p]:
    """Make a graph of the nodes, in order, and yield it, ready to run. Nothing else may use `stream` meanwhile."""
    runnable = c_void_p()
    try:
        with _captured(driver, nodes, stream) as graph:
            driver.call("cuGraphInstantiateWithFlags", byref(runnable), graph, 0)
        driver.call("cuGraphUpload", runnable, stream)
        yield runnable
    finally:
        if runnable:
            driver.call("cuGraphExecDestroy", runnable)


@contextmanager
def _captured(driver: Driver, nodes: Sequence[Node], stream: c_void_p) -> Iterator[c_void_p]:
    graph = c_void_p()
    driver.call("cuStreamBeginCapture_v2", stream, _CAPTURE_RELAXED)
    try:
        for node in nodes:
            _enqueue(driver, node, stream)
    except BaseException:
        with suppress(CudaError):
            driver.call("cuStreamEndCapture", stream, byref(graph))
        if graph:
            with suppress(CudaError):
                driver.call("cuGraphDestroy", graph)
        raise
    driver.call("cuStreamEndCapture", stream, byref(graph))
    try:
        yield graph
    finally:
        driver.call("cuGraphDestroy", graph)


def _enqueue(driver: Driver, node: Node, stream: c_void_p) -> None:
    """Add one node to the capture. The driver copies parameters during the call, so they need not outlive it."""
    if isinstance(node, EventRecord):
        driver.call("cuEventRecordWithFlags", node.event, stream, _RECORD_EXTERNAL)
        return
    grid, block, count = node.launch.grid, node.launch.block, len(node.addresses)
    values = (c_uint64 * count)(*node.addresses)
    start = ctypes.addressof(values)
    parameters = (c_void_p * count)(*(start + 8 * index for index in range(count)))
    try:
        driver.call("cuLaunchKernel", node.function, *grid, *block, 0, stream, parameters, None)
    except GpuCallError as error:
        raise GpuCallError(f"kernel {node.kernel}: {error}", error.result) from error
