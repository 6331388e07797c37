"""The tensors of a weights.safetensors file: where each lies. The file itself is mapped and never copied.

Only the header is read here (https://github.com/huggingface/safetensors#format): eight bytes of length, then JSON.
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
from picompile_runtime.devices.memory import ALIGNMENT, Tensor, anonymous_map, in_units, protect
from picompile_runtime.errors import ArtifactError, DoesNotFitError

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DTYPES = {"U8": "uint8", "I8": "int8", "I32": "int32", "I64": "int64", "F16": "float16", "F32": "float32"}


def read_header(memory: mmap.mmap, where: str) -> Mapping[str, Tensor]:
    """Every tensor of a mapped safetensors file, by name; its offset is that in the file.

    Raises ArtifactError if a tensor does not lie inside the file, at a multiple of 64 bytes.
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


# Weights in pages of 2 MiB.
#
# A mapped file comes in pages of 4 KiB. Rows here and there then cost a walk through the page tables each, and no
# processor reads ahead across the end of a page: of the neurons that fire, two cores of a Zen 4 in a virtual machine
# read
# 20 GB/s from such pages and 30 to 40 GB/s from large ones. So weights are copied once, when they are loaded, where
# there
# is memory for that; else they stay mapped, and the system brings in what is used: in large pages, where kernel and
# file
# system keep the blocks of 2 MiB together in which the file was written.


_PAGE_BYTES = 2**21
_PART_BYTES = 2**25
# What is left to the rest of the system.
_MARGIN_BYTES = 2**29


@dataclass(frozen=True, eq=False)
class ResidentWeights:
    """Memory with the content of a weights file from `start` on."""

    memory: mmap.mmap
    start: int


# Engines of one process share what they have in common: by the hash of the content.
_loaded: WeakValueDictionary[str, ResidentWeights] = WeakValueDictionary()


def load_weights(mapped: mmap.mmap, sha256: str, threads: int, other_bytes: int) -> ResidentWeights:
    """The content of the mapped file in large pages, or as it is mapped where too little memory is free.

    `other_bytes` will be needed besides. PICOMPILE_MMAP=1 leaves weights mapped: processes then share them, and loading
    takes no time.
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
    """The same of some tensors alone, side by side; and where in the memory each of them is.

    They are not left mapped if they `must` be copied: a GPU cannot see a file that is mapped for reading only. Raises
    DoesNotFitError where there is too little memory for that.
    """
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = end
        end += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    memory = _large_pages(end, other_bytes)
    if memory is None and must_copy:
        memory = _needed_pages(end)
    if memory is None:
        return mapped, {name: tensor.offset for name, tensor in tensors.items()}
    start = _start(memory)
    parts = [
        (tensor.offset + first, start + places[name] + first, min(_PART_BYTES, tensor.size_bytes - first))
        for name, tensor in tensors.items()
        for first in range(0, tensor.size_bytes, _PART_BYTES)
    ]
    _copy(mapped, memory, parts, threads)
    if not must_copy:  # what a GPU pins must be writeable
        protect(memory)
    return memory, {name: start + place for name, place in places.items()}


def _large_pages(size_bytes: int, other_bytes: int) -> mmap.mmap | None:
    """Memory for so much, wherever its first large page begins; None where it shall not or cannot be had."""
    if os.environ.get("PICOMPILE_MMAP") == "1" or _free_bytes() < size_bytes + other_bytes + _MARGIN_BYTES:
        return None
    try:
        memory = mmap.mmap(-1, size_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    _ask_for_large(memory)
    return memory


def _needed_pages(size_bytes: int) -> mmap.mmap:
    """The same where it must be had. Raises DoesNotFitError."""
    purpose = "the weights of the host, from where the GPU reads them,"
    if size_bytes > (free_bytes := _free_bytes()):
        needed, free = in_units(size_bytes, free_bytes)
        raise DoesNotFitError(f"{purpose} take {needed} of memory and {free} are free")
    memory = anonymous_map(size_bytes + _PAGE_BYTES, purpose)
    _ask_for_large(memory)
    return memory


def _ask_for_large(memory: mmap.mmap) -> None:
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _start(memory: mmap.mmap) -> int:
    """Where its first large page begins."""
    return -np.frombuffer(memory, np.uint8).ctypes.data % _PAGE_BYTES


def _copy(mapped: mmap.mmap, memory: mmap.mmap, parts: Sequence[tuple[int, int, int]], threads: int) -> None:
    """Copies (from, to, bytes) each from the mapped file."""
    source, target = np.frombuffer(mapped, np.uint8), np.frombuffer(memory, np.uint8)

    def copy(part: tuple[int, int, int]) -> None:
        first, place, size = part
        target[place : place + size] = source[first : first + size]
        # Otherwise both would count as this process's memory. What begins before a page is given back with another.
        page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        with suppress(OSError, AttributeError):
            if page < first + size:
                mapped.madvise(mmap.MADV_DONTNEED, page, first + size - page)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, parts))


def _free_bytes() -> int:
    """Memory that can be had without swapping, as the system estimates it; 0 where it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 0
