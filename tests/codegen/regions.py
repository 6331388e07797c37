"""Parallel regions without threads: their tasks run one by one, in any order, or are watched for races.

See region_checker.c for what is proven. A library's pool is left out while one of these functions is in charge.
"""

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

HERE = Path(__file__).parent
TASKS = 512


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


@dataclass(frozen=True)
class Counts:
    """Of regions: how many ran, and how many tasks of one wrote something at most."""

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
    def checked(self, library: Path, arrays: Sequence[Array]) -> Iterator[None]:
        """Regions of `library` are checked for what they do with `arrays`. AssertionError names the first race."""
        spans = _merged(arrays)
        watched = (_Span * len(spans))(*[_Span(start, end - start) for start, end in spans])
        with _in_charge(library, self._checker.checker_check(TASKS, watched, len(spans))):
            yield
        problem = self._checker.checker_problem().decode()
        assert not problem, f"{problem}; spans are {[end - start for start, end in spans]} bytes"

    def counts(self) -> Counts:
        """What ran since the last time that this was asked."""
        regions, writers = ctypes.c_int(), ctypes.c_int()
        self._checker.checker_counts(ctypes.byref(regions), ctypes.byref(writers))
        return Counts(regions.value, writers.value)


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
