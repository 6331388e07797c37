"""Weights in pages of 2 MiB.

A mapped file comes in pages of 4 KiB. Rows here and there then cost a walk through the page tables each, and no
processor reads ahead across the end of a page: of the neurons that fire, two cores of a Zen 4 in a virtual machine read
20 GB/s from such pages and 30 to 40 GB/s from large ones. So weights are copied once, when they are loaded, where there
is memory for that; else they stay mapped, and the system brings in what is used: in large pages, where kernel and file
system keep the blocks of 2 MiB together in which the file was written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from picompile_runtime.memory import Tensor

_PAGE_BYTES = 2**21
_PART_BYTES = 2**25
# What is left to the rest of the system.
_MARGIN_BYTES = 2**29


@dataclass(frozen=True, eq=False)
class Weights:
    """Memory with the content of a weights file from `start` on."""

    memory: mmap.mmap
    start: int


# Engines of one process share what they have in common: by the hash of the content.
_loaded: WeakValueDictionary[str, Weights] = WeakValueDictionary()


def load_weights(
    mapped: mmap.mmap, sha256: str, threads: int, other_bytes: int, wanted: Sequence[Tensor] | None = None
) -> Weights:
    """The content of the mapped file in large pages, or as it is mapped where too little memory is free.

    `other_bytes` will be needed besides. With `wanted` only these tensors are there, and nothing at all in the place of
    the others. PICOMPILE_MMAP=1 leaves weights mapped: processes then share them, and loading takes no time.
    """
    if sha256 in _loaded:
        return _loaded[sha256]
    size_bytes = len(mapped)
    parts = [(0, size_bytes)] if wanted is None else [(each.offset, each.size_bytes) for each in wanted]
    copied_bytes = sum(size for _, size in parts)
    if os.environ.get("PICOMPILE_MMAP") == "1" or _free_bytes() < copied_bytes + other_bytes + _MARGIN_BYTES:
        return Weights(mapped, 0)
    try:
        memory = mmap.mmap(-1, size_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return Weights(mapped, 0)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, np.uint8)
    weights = Weights(memory, -target.ctypes.data % _PAGE_BYTES)
    source = np.frombuffer(mapped, np.uint8)

    def copy(span: tuple[int, int]) -> None:
        first, last = span
        target[weights.start + first : weights.start + last] = source[first:last]
        # Otherwise both would count as this process's memory. What begins before a page is given back with another.
        page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        with suppress(OSError, AttributeError):
            if page < last:
                mapped.madvise(mmap.MADV_DONTNEED, page, last - page)

    spans = [
        (first, min(first + _PART_BYTES, start + size))
        for start, size in parts
        for first in range(start, start + size, _PART_BYTES)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, spans))
    if wanted is None:
        _loaded[sha256] = weights
    return weights


def _free_bytes() -> int:
    """Memory that can be had without swapping, as the system estimates it; 0 where it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 0
