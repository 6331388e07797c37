"""A list of launches as one CUDA graph: it is started by one call of the driver, however many kernels it has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass

from picompile_runtime.cuda.driver import Driver
from picompile_runtime.cuda.errors import CudaError, GpuCallError
from picompile_runtime.cuda.images import Launch

# CU_STREAM_CAPTURE_MODE_RELAXED: what else happens meanwhile, in this thread too, does not end the capture. Python may
# collect other objects of CUDA at any time.
_CAPTURE_RELAXED = 2


@dataclass(frozen=True)
class BoundLaunch:
    """A launch of `function`, with the addresses of its parameters; errors name the `kernel` that it is part of."""

    kernel: str
    launch: Launch
    function: c_void_p
    addresses: tuple[int, ...]


@contextmanager
def runnable_graph(driver: Driver, launches: Sequence[BoundLaunch], stream: c_void_p) -> Iterator[c_void_p]:
    """The launches, in order, as a graph that is ready to run. It needs `stream` for itself meanwhile."""
    runnable = c_void_p()
    try:
        with _captured(driver, launches, stream) as graph:
            driver.call("cuGraphInstantiateWithFlags", byref(runnable), graph, 0)
        driver.call("cuGraphUpload", runnable, stream)
        yield runnable
    finally:
        if runnable:
            driver.call("cuGraphExecDestroy", runnable)


@contextmanager
def _captured(driver: Driver, launches: Sequence[BoundLaunch], stream: c_void_p) -> Iterator[c_void_p]:
    graph = c_void_p()
    driver.call("cuStreamBeginCapture_v2", stream, _CAPTURE_RELAXED)
    try:
        for launch in launches:
            enqueue(driver, launch, stream)
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


def enqueue(driver: Driver, bound: BoundLaunch, stream: c_void_p) -> None:
    """One launch. The driver copies parameters during the call, so they need not outlive it."""
    count = len(bound.addresses)
    values = (c_uint64 * count)(*bound.addresses)
    start = ctypes.addressof(values)
    parameters = (c_void_p * count)(*(start + 8 * index for index in range(count)))
    try:
        grid, block = bound.launch.grid, bound.launch.block
        driver.call("cuLaunchKernel", bound.function, *grid, *block, 0, stream, parameters, None)
    except GpuCallError as error:
        raise GpuCallError(f"kernel {bound.kernel}: {error}", error.result) from error
