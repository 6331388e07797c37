"""Parallel regions without threads: their tasks run one by one, in any order, or are watched for races.

See region_checker.c for what is proven. Kernels are compiled by LLVM alone, and no sanitizer sees what they do.
"""

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from helpers.kernels.lowered import Runner
from picompile_codegen.backend import forget_kernels
from picompile_codegen.cpu import tensor
from picompile_runtime.devices.cpu.native import HostLibrary

Array = NDArray[Any]

HERE = Path(__file__).parent
TASKS = 512


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


@dataclass(frozen=True)
class Counts:
    """Counts of parallel regions: how many ran, and the most tasks of one region that wrote something."""

    regions: int
    writers: int


class Regions:
    """The compiled region_checker.c."""

    def __init__(self, folder: Path) -> None:
        path = folder / "region_checker.so"
        flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, "-o", str(path), str(HERE / "region_checker.c")], check=True)
        self._checker = ctypes.CDLL(str(path))
        self._checker.checker_ordered.restype = self._checker.checker_check.restype = ctypes.c_void_p
        self._checker.checker_problem.restype = ctypes.c_char_p

    @contextmanager
    def ordered(self, library: Path, tasks: int, seed: int) -> Iterator[None]:
        """Regions of `library` have `tasks` tasks, one after the other: the last first or, with a seed, at random."""
        with _in_charge(library, self._checker.checker_ordered(tasks, ctypes.c_uint(seed))):
            yield

    @contextmanager
    def checked(self, library: Path, arrays: Sequence[Array], where: str) -> Iterator[None]:
        """Regions of `library` are checked for what they do with `arrays`. AssertionError names the first race."""
        spans = _merged(arrays)
        watched = (_Span * len(spans))(*[_Span(start, end - start) for start, end in spans])
        with _in_charge(library, self._checker.checker_check(TASKS, watched, len(spans))):
            yield
        problem = self._checker.checker_problem().decode()
        assert not problem, f"{where}: {problem}; spans have {[end - start for start, end in spans]} bytes"

    def counts(self) -> Counts:
        """Return the counts since the last call."""
        regions, writers = ctypes.c_int(), ctypes.c_int()
        self._checker.checker_counts(ctypes.byref(regions), ctypes.byref(writers))
        return Counts(regions.value, writers.value)


@contextmanager
def every_region() -> Iterator[None]:
    """Kernels that are written meanwhile share their work among threads, however little it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "_WORTH_A_REGION_BYTES", 0)
        forget_kernels()
        try:
            yield
        finally:
            forget_kernels()


def check_step(runner: Runner, function: str, regions: Regions) -> None:
    """Runs `function`, whose step is prepared, in every way; then it is done. AssertionError where tasks meet.

    The program must have been lowered under `every_region`.
    """
    library, memory = HostLibrary(runner.path), runner.written()
    calls, start = library.bind(runner.calls(function)), _copies(memory)
    library.run(calls, 3)
    expected = _copies(memory)
    _put(start, memory)
    _check_each_call(runner, function, regions)
    _assert_same(memory, expected, f"{function}, its tasks apart,")
    for tasks, seed in ((TASKS, 0), (7, 0), (TASKS, 1)):
        _put(start, memory)
        with regions.ordered(runner.path, tasks, seed):
            library.run(calls, 1)
        _assert_same(memory, expected, f"{function} of {tasks} tasks in {'random' if seed else 'reversed'} order")


def _check_each_call(runner: Runner, function: str, regions: Regions) -> None:
    library = HostLibrary(runner.path)
    regions.counts()
    for number, (kernel, arrays) in enumerate(runner.calls(function)):
        calls = library.bind([(kernel, arrays)])
        with regions.checked(runner.path, arrays, f"{function}, call {number}, {kernel}"):
            library.run(calls, 1)
    counts = regions.counts()
    assert counts.regions >= 5, "hardly any regions, hardly anything proven"
    # With more iterations than tasks, more than half of the tasks would have some.
    assert counts.writers < TASKS / 2, "a task ran several iterations; make the model smaller"


def _copies(arrays: Sequence[Array]) -> list[Array]:
    return [array.copy() for array in arrays]


def _put(values: Sequence[Array], arrays: Sequence[Array]) -> None:
    for value, array in zip(values, arrays, strict=True):
        array[...] = value


def _assert_same(memory: Sequence[Array], expected: Sequence[Array], what: str) -> None:
    same = [a.tobytes() == b.tobytes() for a, b in zip(memory, expected, strict=True)]
    assert all(same), f"{what} gives other bytes than 3 threads do"


@contextmanager
def _in_charge(library: Path, launch: int) -> Iterator[None]:
    pointer = ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), "__TVMBackendParallelLaunch")
    pool = pointer.value
    pointer.value = launch
    try:
        yield
    finally:
        pointer.value = pool


def _merged(arrays: Sequence[Array]) -> list[list[int]]:
    """Addresses [first, end) of all bytes of `arrays`, in order and apart."""
    spans: list[list[int]] = []
    for start, end in sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    return spans
