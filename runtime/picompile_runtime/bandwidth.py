"""How fast this machine's memory is read: what decoding is held to."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.memory import aligned_zeros, anonymous_map
from picompile_runtime.native import HostLibrary, seconds_of

_BUFFER_BYTES = 2**29  # sixteen times a large last-level cache
_SLICE_BYTES = 2**26
_READ_KERNEL = "pi_read"  # native/read.c
_MOST_TASKS = 256


class MemoryReader:
    """Reads memory with the threads that run kernels, slice by slice, so that a disturbance spoils one slice only."""

    def __init__(self, library: HostLibrary, threads: int, size_bytes: int = _BUFFER_BYTES) -> None:
        """`library` is the code of an artifact. ArtifactError if it cannot read, DoesNotFitError without memory."""
        self._library, self._threads = library, threads
        memory = anonymous_map(size_bytes, "measuring the memory")
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # weights may lie in large pages, too
        numbers = np.frombuffer(memory, np.int64, size_bytes // 8)
        numbers[:] = 1  # until they are written to, all pages are one and the same
        slices = np.array_split(numbers, max(1, size_bytes // _SLICE_BYTES))
        sums = aligned_zeros((_MOST_TASKS,), np.int64)
        self._bytes = np.array([each.nbytes for each in slices])
        self._calls = library.bind([(_READ_KERNEL, [each, sums]) for each in slices])

    def read(self) -> NDArray[np.float64]:
        """Bytes per second of each slice, in one pass over them all."""
        stamps = np.zeros((len(self._calls), 2), np.int64)
        self._library.run(self._calls, self._threads, stamps)
        speeds: NDArray[np.float64] = self._bytes / seconds_of(stamps)
        return speeds


def memory_bandwidth(threads: int, size_bytes: int = _BUFFER_BYTES, repeats: int = 5) -> float:
    """Bytes per second that `threads` threads read where there is no artifact: the best of `repeats` passes of numpy's
    sum over int64.

    The sum runs without Python's lock and is vectorized; one core reaches what its memory gives with it.
    """
    parts = np.array_split(np.ones(size_bytes // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return size_bytes / min(seconds)
