"""The GPU of this machine: its name, the bandwidths of memory and slot, and the times of a transfer and a launch."""

import statistics
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass
from time import perf_counter

from picompile_runtime.devices.cuda import driver as cuda_driver
from picompile_runtime.devices.cuda.driver import Driver, GpuMemoryError
from picompile_runtime.devices.cuda.graph import MemoryFill, runnable_graph

# What a node of a graph writes that stands for a launch.
_FILL_BYTES = 4


@dataclass(frozen=True)
class GpuName:
    """The GPU and its driver; a measurement is valid as long as these are the same."""

    name: str
    driver: str
    sm: int
    total_bytes: int


@dataclass(frozen=True)
class GpuSpeed:
    """The speeds measured on a GPU.

    `free_bytes` of its memory were free at that time. `copy_bytes_per_s` counts bytes read and bytes written. `down` is
    from host to GPU and `up` the other way, in pinned memory. `exchange_s` is the time of a transfer: a vector down and
    up again, with the wait for it. `launch_gap_s` is the time of a node in a CUDA graph that does next to nothing and
    waits for the one before it.
    """

    free_bytes: int
    copy_bytes_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    exchange_s: float
    launch_gap_s: float


@dataclass(frozen=True)
class Effort:
    """The amount of copying for a measurement. Large buffers make caches and the launch of a copy negligible.

    A round makes `copies` copies. There are at least `rounds` rounds, and they take at least `least_s`: an idle GPU
    clocks down its memory and its slot, and needs some tenths of a second to come back. `transfer_bytes` are 4,096
    numbers of 4 bytes, the width of a layer. `launches` are the nodes of two graphs that are compared; a decoded token
    of a large model is about as many. Each runs `graph_runs` times.
    """

    copy_bytes: int = 256 << 20
    link_bytes: int = 64 << 20
    transfer_bytes: int = 16 << 10
    copies: int = 4
    rounds: int = 5
    least_s: float = 0.3
    transfers: int = 1000
    launches: tuple[int, int] = (1000, 2000)
    graph_runs: int = 20


def find_gpu() -> GpuName:
    """Return the GPU that CUDA programs use by default. Raise `CudaError` if there is none."""
    driver = Driver(cuda_driver.LIBRARY)
    device = driver.first_device()
    return GpuName(driver.name(device), driver.version(), driver.sm(device), driver.total_bytes(device))


def measure_gpu(effort: Effort | None = None) -> GpuSpeed:
    """Measure the GPU that `find_gpu` finds, which takes a second or two. Raise `CudaError`."""
    effort = effort or Effort()
    driver = Driver(cuda_driver.LIBRARY)
    with driver.context(driver.first_device()):
        free_bytes = driver.free_bytes()
        # Two buffers of this size take a quarter; the rest is left to other users of the GPU.
        copy_bytes = min(effort.copy_bytes, free_bytes // 8)
        link_bytes = min(effort.link_bytes, copy_bytes)
        if link_bytes < effort.transfer_bytes:
            raise GpuMemoryError(f"only {free_bytes} bytes of GPU memory are free, too few to measure with")
        with driver.stream() as stream:
            copy = _copy_bytes_per_s(driver, stream, copy_bytes, effort)
            down, up = _link_bytes_per_s(driver, stream, link_bytes, effort)
            # Measured last, when the clocks of the GPU are up.
            exchange_s = _transfer_s(driver, stream, effort)
            launch_gap_s = _launch_gap_s(driver, stream, effort)
    return GpuSpeed(
        free_bytes,
        copy_bytes_per_s=copy,
        down_bytes_per_s=down,
        up_bytes_per_s=up,
        exchange_s=exchange_s,
        launch_gap_s=launch_gap_s,
    )


def _copy_bytes_per_s(driver: Driver, stream: c_void_p, size_bytes: int, effort: Effort) -> float:
    with driver.device_memory(size_bytes) as source, driver.device_memory(size_bytes) as target:

        def copy() -> None:
            driver.call("cuMemcpyDtoDAsync_v2", target, source, size_bytes, stream)

        # Each byte is read once and written once.
        return 2 * size_bytes / _copy_s(driver, stream, copy, effort)


def _link_bytes_per_s(driver: Driver, stream: c_void_p, size_bytes: int, effort: Effort) -> tuple[float, float]:
    with driver.device_memory(size_bytes) as device, driver.pinned_memory(size_bytes) as host:

        def down() -> None:
            driver.call("cuMemcpyHtoDAsync_v2", device, host, size_bytes, stream)

        def up() -> None:
            driver.call("cuMemcpyDtoHAsync_v2", host, device, size_bytes, stream)

        down_s, up_s = (_copy_s(driver, stream, copy, effort) for copy in (down, up))
    return size_bytes / down_s, size_bytes / up_s


def _copy_s(driver: Driver, stream: c_void_p, copy: Callable[[], None], effort: Effort) -> float:
    """Return the seconds of one copy, in the best round."""
    seconds: list[float] = []
    begin = perf_counter()
    while len(seconds) < effort.rounds or perf_counter() - begin < effort.least_s:
        start = perf_counter()
        for _ in range(effort.copies):
            copy()
        driver.call("cuStreamSynchronize", stream)
        seconds.append((perf_counter() - start) / effort.copies)
    return max(min(seconds), 1e-9)


def _transfer_s(driver: Driver, stream: c_void_p, effort: Effort) -> float:
    """Return the median seconds of a transfer to the GPU and back."""
    size, seconds = effort.transfer_bytes, []
    with driver.device_memory(size) as device, driver.pinned_memory(size) as host:
        for _ in range(effort.transfers):
            start = perf_counter()
            driver.call("cuMemcpyHtoDAsync_v2", device, host, size, stream)
            driver.call("cuMemcpyDtoHAsync_v2", host, device, size, stream)
            driver.call("cuStreamSynchronize", stream)
            seconds.append(perf_counter() - start)
    return max(statistics.median(seconds), 1e-9)


def _launch_gap_s(driver: Driver, stream: c_void_p, effort: Effort) -> float:
    """Return the seconds of one node of a CUDA graph, without those of starting the graph and of waiting for it.

    Each node sets the same 4 bytes, and waits for the node before it. The driver does that without a kernel of ours, so
    no compiler is needed. It is a lower bound of what a kernel costs beside the bytes that it reads: a node has one
    short write, and neither reads that it waits for nor blocks that end at different times.
    """
    short, long = (_graph_s(driver, stream, count, effort) for count in effort.launches)
    return max((long - short) / (effort.launches[1] - effort.launches[0]), 1e-9)


def _graph_s(driver: Driver, stream: c_void_p, count: int, effort: Effort) -> float:
    """Return the seconds of a graph of `count` nodes, in the best of several runs."""
    seconds = []
    with driver.device_memory(_FILL_BYTES) as target:
        nodes = [MemoryFill(target, _FILL_BYTES)] * count
        with runnable_graph(driver, nodes, stream) as graph:
            for _ in range(effort.graph_runs):
                start = perf_counter()
                driver.call("cuGraphLaunch", graph, stream)
                driver.call("cuStreamSynchronize", stream)
                seconds.append(perf_counter() - start)
    return min(seconds)
