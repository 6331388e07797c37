"""Measures the machine before anything of a model runs on it: exchanges with the GPU, memory, its speed."""

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from picompile_runtime import DoesNotFitError, MachineError
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import CudaAccelerator, CudaImages
from picompile_runtime.devices.cuda import ping_pong as exchange
from picompile_runtime.devices.memory import Tensor

# Memory is asked for in such parts: of one larger than what a machine has now, its system gives nothing.
_PART_BYTES = 2**30
# Where less than another part is free, a machine has this long to get more, before it is used all the same.
_WAIT_S, _SPARED_BYTES = 0.2, 2**29
_PASSES = 5


def ping_pong(images: CudaImages, library: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of exchanges between host and GPU, where each waits for what the other writes.

    Raises MachineError where one of them does not see the other's writes.
    """
    with closing(CudaAccelerator(images)) as device:
        return asdict(exchange(device, HostLibrary(library), rounds))


def start_seconds(images: CudaImages, library: Path, counts: Sequence[int]) -> dict[str, float | None]:
    """Return how long it takes to start graphs whose first kernel waits for the host, by the launches behind that.

    A GPU takes only so much work at a time. None where it took no more, so that host and GPU waited for each other.
    """
    kernel = next(name for name in images.kernels if name.startswith("copy_words"))
    found: dict[str, float | None] = {}
    with closing(CudaAccelerator(images)) as device:
        memory = device.allocate(2**12, "what is copied")
        views = [ArgumentView(memory, Tensor("int32", (8,), offset)) for offset in (0, 1024, 2048)]
        for count in counts:
            try:
                found[str(count)] = exchange(device, HostLibrary(library), 1, [(kernel, views)] * count).start_s
            except MachineError:
                found[str(count)] = None
    return found


def read_bandwidths(library: Path, threads: Sequence[int]) -> dict[str, float]:
    """Return the bytes per second that kernels' threads read from memory, by their number as text."""
    loaded, found = HostLibrary(library), {}
    for count in threads:
        reader = MemoryReader(loaded, count)
        found[str(count)] = float(np.median([np.median(reader.read()) for _ in range(_PASSES)]))
    return found


def touch(size_bytes: int, limit_s: float) -> dict[str, Any]:
    """Write to so much memory, and give it back.

    The memory of some virtual machines grows when it is used, and what the system calls free before is too little.
    Raises DoesNotFitError where it is not there within `limit_s`.
    """
    begin, before, parts = time.monotonic(), _available_bytes(), list[mmap.mmap]()
    try:
        for start in range(0, size_bytes, _PART_BYTES):
            if time.monotonic() - begin > limit_s:
                done = f"{start / 1e9:.1f} GB of {size_bytes / 1e9:.1f} were there"
                raise DoesNotFitError(f"memory comes too slowly: {done} after {limit_s:.0f} s")
            parts.append(_touched(min(_PART_BYTES, size_bytes - start), len(parts)))
    finally:
        for part in parts:
            part.close()
    seconds, after = time.monotonic() - begin, _available_bytes()
    return {"bytes": size_bytes, "seconds": seconds, "free_bytes_before": before, "free_bytes_after": after}


def _touched(size_bytes: int, before: int) -> mmap.mmap:
    """Memory that is there, after so many parts of it."""
    begin = time.monotonic()
    while _available_bytes() < size_bytes + _SPARED_BYTES and time.monotonic() - begin < _WAIT_S:
        time.sleep(_WAIT_S / 20)
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        had = before * _PART_BYTES / 1e9
        raise DoesNotFitError(f"beside {had:.1f} GB no more memory can be had: {error.strerror}") from error
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return memory


def _available_bytes() -> int:
    """Return what the system estimates that can be had now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
