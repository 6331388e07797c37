"""Reads the header of a weights.safetensors file, and loads its tensors into memory.

The format (https://github.com/huggingface/safetensors#format): eight bytes of length, a JSON header, then the tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.devices.memory import (
    ALIGNMENT,
    GROWTH_HINT,
    Tensor,
    anonymous_map,
    growth_bytes,
    in_units,
    protect,
)
from picompile_runtime.errors import ArtifactError, DoesNotFitError

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DTYPES = {"U8": "uint8", "I8": "int8", "I32": "int32", "I64": "int64", "F16": "float16", "F32": "float32"}


def read_header(memory: mmap.mmap, where: str) -> Mapping[str, Tensor]:
    """Return every tensor of a mapped safetensors file by name, with its offset in the file.

    Raises ArtifactError if the header is wrong, or a tensor is not inside the file at a multiple of 64 bytes.
    """
    size = int.from_bytes(memory[:8], "little")
    start = 8 + size
    if len(memory) < 8 or size > _MOST_HEADER_BYTES or start > len(memory):
        raise ArtifactError(f"{where}: is not a safetensors file (header of {size} bytes in {len(memory)})")
    header = parse_object(memory[8:start], where)
    header.data.pop("__metadata__", None)
    return {name: _tensor(entry, start, len(memory)) for name, entry in header.members().items()}


def _tensor(entry: Fields, start: int, end: int) -> Tensor:
    if (dtype := _DTYPES.get(entry.text("dtype"))) is None:
        raise entry.wrong("dtype", f"one of {', '.join(_DTYPES)}")
    span = entry.data.get("data_offsets")
    if not isinstance(span, list) or len(span) != 2 or not all(type(offset) is int and offset >= 0 for offset in span):
        raise entry.wrong("data_offsets", "two offsets")
    tensor = Tensor(dtype, entry.shape("shape"), start + span[0])
    if span[1] - span[0] != tensor.size_bytes or tensor.offset + tensor.size_bytes > end:
        raise entry.wrong("data_offsets", f"the place of {tensor.size_bytes} bytes inside the file")
    if tensor.offset % ALIGNMENT:
        raise ArtifactError(f"{entry.where}: lies at byte {tensor.offset}, which is no multiple of {ALIGNMENT}")
    return tensor


# Weights are copied to pages of 2 MiB when they are loaded, if there is memory for that. A mapped file has pages of
# 4 KiB: each of the scattered rows of firing neurons then costs a walk through the page tables, and no processor
# prefetches across the end of a page. For such rows, two cores of a Zen 4 in a virtual machine read 20 GB/s from small
# pages and 30 to 40 GB/s from large ones. Weights that stay mapped are read from the file when they are used, in large
# pages if the kernel and the file system keep the file's blocks of 2 MiB together.
_PAGE_BYTES = 2**21
_PART_BYTES = 2**25
# What memory that a GPU pins takes of the host besides, for each page of 4 KiB: 8 bytes of this process's page tables
# (for a page of 2 MiB Linux keeps as many in reserve), and in NVIDIA's open kernel modules 8 for the page, 40 for an
# entry of `nvidia_pte_t` with its address, and 8 for the address that the GPU uses. Others are taken to be no larger.
_SMALL_PAGE_BYTES, _PINNED_PAGE_BYTES = 2**12, 64
# Bytes left to the rest of the system.
_MARGIN_BYTES = 2**29


@dataclass(frozen=True, eq=False)
class ResidentWeights:
    """Memory that has the content of a weights file from byte `start` on."""

    memory: mmap.mmap
    start: int


# Engines of one process share equal weights, which are found by the hash of the content.
_loaded: WeakValueDictionary[str, ResidentWeights] = WeakValueDictionary()


def load_weights(mapped: mmap.mmap, sha256: str, threads: int, other_bytes: int) -> ResidentWeights:
    """Return the content of the mapped file in large pages, or the mapped file itself if too little memory is free.

    Args:
        mapped: the mapped file.
        sha256: its hash.
        threads: how many threads copy.
        other_bytes: memory that will be needed for other things.

    PICOMPILE_MMAP=1 leaves weights mapped: processes then share them, and loading takes no time.
    """
    if sha256 in _loaded:
        return _loaded[sha256]
    size_bytes = len(mapped)
    memory = _large_pages(size_bytes, other_bytes)
    if memory is None:
        return ResidentWeights(mapped, 0)
    weights = ResidentWeights(memory, _start(memory))
    parts = range(0, size_bytes, _PART_BYTES)
    _copy(
        mapped,
        memory,
        [(first, weights.start + first, min(_PART_BYTES, size_bytes - first)) for first in parts],
        threads,
    )
    protect(memory)
    _loaded[sha256] = weights
    return weights


def load_tensors(
    mapped: mmap.mmap, tensors: Mapping[str, Tensor], threads: int, other_bytes: int, must_copy: bool = False
) -> tuple[mmap.mmap, Mapping[str, int]]:
    """Return memory that holds only some tensors of the mapped file, and the offset of each tensor there by name.

    As with `load_weights`, tensors stay mapped if too little memory is free, unless they `must_copy`: a GPU cannot see
    a file that is mapped for reading only. Raises DoesNotFitError if there is too little memory for that copy.
    """
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = end
        end += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    pinning_bytes = -(-end // _SMALL_PAGE_BYTES) * _PINNED_PAGE_BYTES if must_copy else 0
    memory = _large_pages(end, other_bytes + pinning_bytes)
    if memory is None and must_copy:
        memory = _needed_pages(end, pinning_bytes)
    if memory is None:
        return mapped, {name: tensor.offset for name, tensor in tensors.items()}
    start = _start(memory)
    parts = [
        (tensor.offset + first, start + places[name] + first, min(_PART_BYTES, tensor.size_bytes - first))
        for name, tensor in tensors.items()
        for first in range(0, tensor.size_bytes, _PART_BYTES)
    ]
    _copy(mapped, memory, parts, threads)
    if not must_copy:  # memory that a GPU pins must be writable
        protect(memory)
    return memory, {name: start + place for name, place in places.items()}


def _large_pages(size_bytes: int, other_bytes: int) -> mmap.mmap | None:
    """Return memory that contains large pages for `size_bytes`; None if weights stay mapped or memory is short."""
    if os.environ.get("PICOMPILE_MMAP") == "1" or _free_bytes() < size_bytes + other_bytes + _MARGIN_BYTES:
        return None
    try:
        memory = mmap.mmap(-1, size_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    _ask_for_large(memory)
    return memory


def _needed_pages(size_bytes: int, pinning_bytes: int) -> mmap.mmap:
    """Return memory that contains large pages for `size_bytes`, which take `pinning_bytes` more when they are pinned.

    Raises DoesNotFitError.
    """
    purpose = "the weights that the GPU reads from the host's memory"
    if size_bytes + pinning_bytes > (free_bytes := _free_bytes()):
        needed, free = in_units(size_bytes + pinning_bytes, free_bytes)
        raise DoesNotFitError(
            f"{purpose} take {needed} of memory when they are pinned, and {free} are free; {GROWTH_HINT}"
        )
    memory = anonymous_map(size_bytes + _PAGE_BYTES, purpose)
    _ask_for_large(memory)
    return memory


def _ask_for_large(memory: mmap.mmap) -> None:
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _start(memory: mmap.mmap) -> int:
    """Return where the first large page of the memory begins."""
    return -np.frombuffer(memory, np.uint8).ctypes.data % _PAGE_BYTES


def _copy(mapped: mmap.mmap, memory: mmap.mmap, parts: Sequence[tuple[int, int, int]], threads: int) -> None:
    """Copy parts, each (from, to, bytes), of the mapped file to memory."""
    source, target = np.frombuffer(mapped, np.uint8), np.frombuffer(memory, np.uint8)

    def copy(part: tuple[int, int, int]) -> None:
        first, place, size = part
        target[place : place + size] = source[first : first + size]
        # Otherwise both would count as this process's memory. A page that begins before this part is
        # freed with another.
        page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        with suppress(OSError, AttributeError):
            if page < first + size:
                mapped.madvise(mmap.MADV_DONTNEED, page, first + size - page)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, parts))


def _free_bytes() -> int:
    """Return the memory in bytes that can be had without swapping, as the system estimates it; 0 if it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024 + growth_bytes()
    return 0
