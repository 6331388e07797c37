"""A second partition of the CPU as the accelerator: it has a GPU's schedule, so all of that runs without a GPU.

It has its own library of kernels and its own threads, and its memory is separate from the host's except for what both
share. It waits for everything that a GPU would have to wait for.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.accelerator import AcceleratorKind, ArgumentView
from picompile_runtime.devices.cpu.native import CallList, HostLibrary, Stamps, TensorTable
from picompile_runtime.devices.memory import anonymous_map, array_at, protect

if TYPE_CHECKING:
    from picompile_runtime.artifact.reader import Artifact


class CpuPartition:
    """An `Accelerator` that runs kernels of `library` on `threads` threads; kernels in `waits` wait for the host."""

    slow_stamps = False
    pins_memory = False
    unpinned_bytes = 0

    def __init__(self, library: HostLibrary, threads: int, waits: Collection[str] = ()) -> None:
        self._library, self._threads, self._waits = library, threads, waits
        self._tensors = TensorTable()
        self._protected = list[mmap.mmap]()
        self._queue = _one_thread()
        self._is_started = False  # set before `_running`, since an interrupt may come between
        self._running: Future[None] | None = None
        self._abandoned: NDArray[np.int32] | None = None

    def graph_bytes(self, kernels: Sequence[str]) -> int:
        """Return 0: lists of calls need no more memory."""
        return 0

    def free_bytes(self) -> None:
        """Return None: it uses the host's memory."""
        return None

    def allocate(self, size_bytes: int, purpose: str) -> mmap.mmap:
        """Return zeroed memory that the host does not use."""
        return anonymous_map(size_bytes, purpose)

    def share(self, size_bytes: int, purpose: str) -> tuple[mmap.mmap, NDArray[np.uint8]]:
        """Return zeroed memory, also as an array uint8 [size_bytes]."""
        memory = anonymous_map(size_bytes, purpose)
        return memory, np.frombuffer(memory, np.uint8)

    def adopt(self, memory: mmap.mmap) -> mmap.mmap:
        """Return `memory`: this accelerator sees all of the host's."""
        return memory

    def write(self, memory: mmap.mmap, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy `data` to `memory`."""
        np.frombuffer(memory, np.uint8)[offset : offset + len(data)] = data

    def read(self, memory: mmap.mmap, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy from `memory` to `data`."""
        self.wait()
        data[:] = np.frombuffer(memory, np.uint8)[offset : offset + len(data)]

    def copy(self, memory: mmap.mmap, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy inside `memory`."""
        self.wait()
        flat = np.frombuffer(memory, np.uint8)
        for source, target, size in moves:
            flat[target : target + size] = flat[source : source + size]

    def bind(self, calls: Sequence[tuple[str, Sequence[ArgumentView]]], breaks: Sequence[int] = ()) -> CallList:
        """Prepare a list of calls of the library's kernels; `breaks` are not needed to let others use the CPU."""
        arrays = [(name, [self._array(view) for view in views]) for name, views in calls]
        return self._library.bind(arrays, self._tensors, self._waits)

    def _array(self, view: ArgumentView) -> NDArray[Any]:
        array = array_at(view.memory, view.tensor)
        if any(view.memory is memory for memory in self._protected):
            array.flags.writeable = False
        return array

    def protect(self, memory: mmap.mmap) -> None:
        """Make memory read-only."""
        protect(memory)
        self._protected.append(memory)

    def tell_failures(self, abandoned: NDArray[np.int32]) -> None:
        """Set abandoned[0] as soon as a list of calls has failed."""
        self._abandoned = abandoned

    def start(self, calls: CallList, stamps: Stamps | None = None) -> None:
        """Begin to run `calls` on the accelerator's own thread."""
        if self._is_started:  # two interrupts came, the second while the first was being handled
            self._drain()
        self._is_started = True
        self._running = self._queue.submit(self._run, calls, stamps)

    def _run(self, calls: CallList, stamps: Stamps | None) -> None:
        try:
            self._library.run(calls, self._threads, stamps)
        except BaseException:
            if self._abandoned is not None:
                self._abandoned[0] = 1
            raise

    def wait(self) -> None:
        """Return when all calls have run. Raises the error that they raised."""
        if not self._is_started:
            return
        running, self._running = self._running, None
        try:
            failed = (running or self._queue.submit(lambda: None)).exception()
        except KeyboardInterrupt:
            self._drain()
            raise
        self._is_started = False
        if failed is not None:
            raise failed

    def _drain(self) -> None:
        """Return when the accelerator's thread is idle, as the next step must find it."""
        wait([self._queue.submit(lambda: None)])
        self._is_started = False

    def after_fork(self) -> str | None:
        """Start a new thread: a forked process has the accelerator's memory and none of its threads."""
        self._queue, self._is_started, self._running = _one_thread(), False, None
        return None

    def close(self) -> None:
        """End the accelerator's threads and unload its library."""
        self._queue.shutdown()
        self._running, self._abandoned, self._tensors = None, None, TensorTable()
        self._protected.clear()
        self._library.close()


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="picompile-device")


def _open(artifact: Artifact, threads: int) -> CpuPartition:
    return CpuPartition(artifact.load_accelerator_code(), threads, artifact.program.waiting_kernels)


def _verify(artifact: Artifact) -> None:
    code = artifact.manifest.accelerator
    for variant in () if code is None else code.variants:
        if variant.runs_here:
            artifact.load_accelerator_code(variant)


KIND = AcceleratorKind(
    "cpu", _open, lambda artifact: artifact.load_accelerator_code().interfaces(), _verify, on_cpu=True
)
