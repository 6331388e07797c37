"""Memory for tensors: aligned arrays, anonymous maps that take no memory until they are touched, and mapped files."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import DoesNotFitError, RequestError
from picompile_runtime.request_checks import shown

_mprotect = ctypes.CDLL(None).mprotect
ALIGNMENT = 64  # bytes; one cache line, and what kernels assume
_GROWTH_VARIABLE = "PICOMPILE_MEMORY_GIB"
# What errors about memory end with.
GROWTH_HINT = f"if this machine's memory grows when it is used, {_GROWTH_VARIABLE} says how far"


@dataclass(frozen=True)
class Tensor:
    """A tensor's numpy dtype, its shape, and its offset in bytes from the start of the memory that holds it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@cache
def item_bytes(dtype: str) -> int:
    """Return the size in bytes of an element, by numpy's name of its type."""
    return int(np.dtype(dtype).itemsize)


def aligned_zeros(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Return a zeroed array of `shape` that starts at a multiple of 64 bytes."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    aligned: NDArray[Any] = memory[start : start + size_bytes].view(dtype).reshape(shape)
    return aligned


def anonymous_map(size_bytes: int, purpose: str) -> mmap.mmap:
    """Return zeroed memory that the system commits page by page, when it is first touched.

    So a cache for a long context takes only the memory that its tokens so far fill. Raises DoesNotFitError, naming
    `purpose`, if the machine could not hold all of it.
    """
    check_total(size_bytes, purpose)
    try:
        return mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DoesNotFitError(
            f"{_needs(size_bytes, purpose)}, of which not enough is free ({error.strerror})"
        ) from error


def check_total(size_bytes: int, purpose: str) -> None:
    """Raise DoesNotFitError, naming `purpose`, if `size_bytes` are more than the whole memory of this machine."""
    if size_bytes > _machine_bytes():
        hint = "compile the model for a smaller context (--context) or fewer sequences (--sequences)"
        raise DoesNotFitError(f"{_needs(size_bytes, purpose)}; {hint}; {GROWTH_HINT}")


def growth_bytes() -> int:
    """Return by how many bytes this machine's memory may grow: to PICOMPILE_MEMORY_GIB, not at all if it is not set.

    Some virtual machines are given more memory when they use what they have. Nothing in the system says so, and to try
    it would take from other programs what they need. Raises RequestError for a wrong PICOMPILE_MEMORY_GIB.
    """
    if not (asked := os.environ.get(_GROWTH_VARIABLE)):
        return 0
    if not re.fullmatch("0*[0-9]{1,6}", asked):
        raise RequestError(f"{_GROWTH_VARIABLE} must be a whole number of GiB, not {shown(asked)}")
    return max(0, int(asked[-6:]) * 2**30 - _physical_bytes())


def in_units(*sizes_bytes: int) -> tuple[str, ...]:
    """Return sizes in words, as `1.50 GiB` or `37.0 MiB`, with as many digits as tell different ones apart."""
    unit, name = (2**30, "GiB") if max(sizes_bytes) >= 2**30 else (2**20, "MiB")
    least = 2 if name == "GiB" else 1
    for digits in range(least, 12):
        texts = tuple(f"{size / unit:.{digits}f} {name}" for size in sizes_bytes)
        if len(set(texts)) == len(set(sizes_bytes)):
            break
    return texts


def _needs(size_bytes: int, purpose: str) -> str:
    needed, has = in_units(size_bytes, _machine_bytes())
    return f"{purpose} needs {needed} and this machine has {has}"


def _machine_bytes() -> int:
    return _physical_bytes() + growth_bytes()


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def protect(memory: mmap.mmap) -> None:
    """Make an anonymous map read-only: a write to it from now on ends the process by a signal.

    If the system does not allow that, the map stays writable; nothing here relies on it.
    """
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), mmap.PROT_READ)


def map_file(descriptor: int) -> mmap.mmap:
    """Map the whole of an open, non-empty file read-only; pages are read when first touched and shared by processes."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with suppress(OSError, AttributeError):  # pages not in memory yet are read as pages of 2 MiB, if the system can
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def array_at(memory: mmap.mmap, tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array over the map, which stays alive as long as the array does."""
    flat = np.frombuffer(memory, dtype=tensor.dtype, count=math.prod(tensor.shape), offset=tensor.offset)
    return flat.reshape(tensor.shape)
