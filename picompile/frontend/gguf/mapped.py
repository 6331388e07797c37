"""Files in memory."""

import mmap
from pathlib import Path


def mapped(file: Path) -> mmap.mmap:
    """Return the contents of `file`, which are read when they are looked at."""
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
