"""Memory that grows: some virtual machines begin with little of it, and get more as it is used.

What the system calls free is too little there, and a process that takes more at once fails. So memory is taken in
parts, and each waits a moment for the machine to grow.
"""

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from picompile_runtime import DoesNotFitError

# Memory is asked for in such parts: of one larger than what a machine has now, its system gives nothing.
_PART_BYTES = 2**30
# Where less than another part is free, a machine has this long to get more, before it is used all the same.
_WAIT_S, _SPARED_BYTES = 0.2, 2**29


def touch(size_bytes: int, limit_s: float) -> dict[str, Any]:
    """Write to so much memory, and give it back.

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


class Growth:
    """Waits now and then while much is written, so that memory can grow: once for each part of what is written."""

    def __init__(self) -> None:
        self._written = 0

    def before(self, size_bytes: int) -> None:
        """Note that so many bytes are written next, and wait if they fill another part."""
        self._written += size_bytes
        if self._written >= _PART_BYTES:
            _wait_for(self._written)
            self._written = 0


def _wait_for(size_bytes: int) -> None:
    """Wait until so much memory is free, but no longer than a machine takes to grow by one part."""
    begin = time.monotonic()
    while _available_bytes() < size_bytes + _SPARED_BYTES and time.monotonic() - begin < _WAIT_S:
        time.sleep(_WAIT_S / 20)


def _touched(size_bytes: int, before: int) -> mmap.mmap:
    """Memory that is there, after so many parts of it."""
    _wait_for(size_bytes)
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
