"""The memory's bandwidth, and the least time that decoding can take with it.

The bytes that decoding must move, divided by the bandwidth, are the floor of its time, kernel by kernel.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import STATS_ROW_BYTES, UPLOAD_OP, WAITING_OPS, Call
from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.cpu.native import HostLibrary, seconds_of
from picompile_runtime.devices.memory import aligned_zeros, anonymous_map
from picompile_runtime.engine.timing import FiringCounts

_BUFFER_BYTES = 2**29  # sixteen times a large last-level cache
_SLICE_BYTES = 2**26
_READ_KERNEL = "pi_read"  # native/read.c
_MOST_TASKS = 256
# A neuron's row of 8,192 weights in q4. A thread copies so many rows in one call, into memory that its cache holds.
_ROW_BYTES, _BLOCK_ROWS = 4608, 128
# Of ten neurons about one fires. Each pass reads other rows, or a large cache would have them.
_PASSES = 10


class MemoryReader:
    """A reader of memory with the kernels' threads, slice by slice, so that a disturbance affects only one slice."""

    def __init__(self, library: HostLibrary, threads: int, size_bytes: int = _BUFFER_BYTES) -> None:
        """Allocate the memory; `library` is the code of an artifact.

        Raises ArtifactError if the library lacks the kernel that reads, DoesNotFitError if there is too little memory.
        """
        self._library, self._threads = library, threads
        memory = anonymous_map(size_bytes, "measuring the memory")
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # weights may lie in large pages, too
        numbers = np.frombuffer(memory, np.int64, size_bytes // 8)
        numbers[:] = 1  # until pages are written to, all of them are the same page of zeros
        slices = np.array_split(numbers, max(1, size_bytes // _SLICE_BYTES))
        sums = aligned_zeros((_MOST_TASKS,), np.int64)
        self._bytes = np.array([each.nbytes for each in slices])
        self._calls = library.bind([(_READ_KERNEL, [each, sums]) for each in slices])

    def read(self) -> NDArray[np.float64]:
        """Read all slices once, and return the speed of each in bytes per second, float64 [slices]."""
        stamps = np.zeros((len(self._calls), 2), np.int64)
        self._library.run(self._calls, self._threads, stamps)
        speeds: NDArray[np.float64] = self._bytes / seconds_of(stamps)
        return speeds


def memory_bandwidth(threads: int, size_bytes: int = _BUFFER_BYTES, repeats: int = 5) -> float:
    """Return how many bytes per second `threads` threads read, without the code of an artifact.

    It is the best of `repeats` passes of numpy's sum over int64. The sum is vectorized and runs without Python's lock,
    and with it one core reaches the bandwidth of its memory.

    Args:
        threads: number of threads.
        size_bytes: size of the memory that is read.
        repeats: number of passes.
    """
    parts = np.array_split(np.ones(size_bytes // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return size_bytes / min(seconds)


def scattered_share(threads: int, size_bytes: int = _BUFFER_BYTES) -> float:
    """Return how fast `threads` threads read scattered rows, as a share of reading rows in order; 1 at most.

    Both read rows of 4,608 bytes with the same calls of numpy, which copy them to where a cache holds them: a pass
    reads a tenth of all rows, chosen at random and in ascending order as neurons that fire are, or a tenth that lies
    together. The best of ten passes counts. So the share has what jumping costs, such as pages that are looked up and
    lines that were not prefetched. It has no arithmetic, and nothing of kernels that wait for each other.

    Args:
        threads: number of threads.
        size_bytes: size of the memory that rows are read from.
    """
    matrix = np.ones((max(1, size_bytes // _ROW_BYTES), _ROW_BYTES // 8), np.int64)
    in_order = np.arange(len(matrix))
    shuffled = np.random.default_rng(0).permutation(in_order)
    with ThreadPoolExecutor(threads) as pool:
        together, scattered = (
            max(_rows_per_s(pool, threads, matrix, np.sort(part)) for part in np.array_split(rows, _PASSES))
            for rows in (in_order, shuffled)
        )
    return min(1.0, scattered / together)


def _rows_per_s(pool: ThreadPoolExecutor, threads: int, matrix: NDArray[np.int64], rows: NDArray[np.int64]) -> float:
    parts = np.array_split(rows, threads)
    start = time.perf_counter()
    list(pool.map(_copy_rows, [matrix] * threads, parts))
    return len(rows) / (time.perf_counter() - start)


def _copy_rows(matrix: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Copy rows of `matrix` [rows, columns], block by block to the same memory, without Python's lock."""
    copied = np.empty((_BLOCK_ROWS, matrix.shape[1]), matrix.dtype)
    for begin in range(0, len(rows), _BLOCK_ROWS):
        block = rows[begin : begin + _BLOCK_ROWS]
        # With another mode numpy copies to memory of its own first.
        np.take(matrix, block, axis=0, out=copied[: len(block)], mode="clip")


# How a table of times groups operators. All other operators are small.
_KINDS = {
    "linear": "projections",
    "attention": "attention",
    "predict": "predictor",
    "ffn": "feed-forward",
    **dict.fromkeys(("head", "leading"), "head"),
    # With an accelerator: transfers between host and accelerator, and waits for them. The kernel that waits for values
    # also copies them, or adds them up with others and computes the norm of the sum.
    **dict.fromkeys(("inputs", "send", "signal"), "exchange"),
    **dict.fromkeys(WAITING_OPS, "waits"),
    # Prompts copy weights of the host.
    UPLOAD_OP: "exchange",
}
_STATISTICS = tuple(f"stats{function}{device}" for function in ("", ".batch") for device in ("", ".accelerator"))
REST = "norms and rest"
KINDS = (*dict.fromkeys(_KINDS.values()), REST)


@dataclass(frozen=True)
class KernelTime:
    """Bytes and seconds per token of all kernels of one kind on one device.

    `floor_s` is how long `bytes` take at the bandwidth of the device's memory, None if that is not known.
    """

    kind: str
    device: str
    calls: int
    bytes: float
    seconds: float
    floor_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Bytes that they move per second; 0 if they take no time."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def floor_share(self) -> float | None:
        """Share of the floor in their time; 1 is the best."""
        if self.floor_s is None:
            return None
        return self.floor_s / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the entry for `bench --json`."""
        return {
            "kind": self.kind,
            "device": self.device,
            "calls": self.calls,
            "bytes_per_token": round(self.bytes),
            "s_per_token": self.seconds,
            "bytes_per_s": self.bytes_per_s,
            "floor_s_per_token": self.floor_s,
            "floor_share": self.floor_share,
        }


def kind(call: Call) -> str:
    """Return the kind of a call, one of KINDS."""
    return _KINDS.get(call.op, REST)


def statistics_rows(call: Call) -> list[int]:
    """Return the rows of the statistics, the host's or the accelerator's, where a call counts its neurons or inputs."""
    statistics = (arg for arg in call.args if arg.kind == "buffer" and arg.name in _STATISTICS)
    return [arg.view.offset // STATS_ROW_BYTES for arg in statistics]


def step_bytes(
    artifact: Artifact,
    function: str,
    firing: Sequence[FiringCounts],
    cached: float,
    rows: int = 1,
) -> list[float]:
    """Return the bytes that each call of a step of `function` must move.

    Args:
        artifact: the program that runs, and its weights.
        function: a function of the program.
        firing: the shares of neurons that each feed-forward part computes, and that fire.
        cached: number of positions in the KV cache of each sequence.
        rows: number of sequences.
    """
    counted = {row.part.stats_row: row for row in firing}
    return [
        call.weight_bytes - _idle_bytes(artifact, call, counted) + rows * _state_bytes(artifact, call, cached)
        for call in artifact.program.functions[function]
    ]


def bytes_per_token(
    artifact: Artifact,
    firing: Sequence[FiringCounts],
    cached: float,
) -> float:
    """Return the bytes of weights and KV cache that `decode` must move if `cached` tokens are in the cache."""
    return sum(step_bytes(artifact, "decode", firing, cached))


def _idle_bytes(artifact: Artifact, call: Call, counted: Mapping[int, FiringCounts]) -> float:
    """Return the bytes that a call that counts does not read: the rows of its last matrix that it does not need."""
    rows = statistics_rows(call)
    matrices = [arg.name for arg in call.args if arg.kind == "weight" and len(arg.view.shape) == 2]
    firing = counted.get(rows[0]) if rows else None
    if firing is None or not matrices:
        return 0.0
    last_bytes: float = artifact.tensors[matrices[-1]].size_bytes
    if firing.part.experts:
        # The call's bytes are those of the experts that can be chosen.
        last_bytes *= call.weight_bytes / sum(artifact.tensors[name].size_bytes for name in set(matrices))
    return last_bytes * (1 - firing.read_share)


def _state_bytes(artifact: Artifact, call: Call, cached: float) -> float:
    """Return the bytes that a call reads of one sequence's state: attention of the rows that it sees, others of all."""
    program = artifact.program
    states = [program.state[name] for name in {arg.name for arg in call.args if arg.kind == "state"}]
    whole = sum(each.sequence_bytes for each in states if each.grows is None)
    if call.op != "attention":
        return whole
    rows = sum(each.sequence_bytes for each in states if each.grows is not None)
    return whole + rows * min(cached, call.window or cached) / program.context
