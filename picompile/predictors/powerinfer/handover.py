"""What the guarded process hands back: a safetensors file, written one tensor at a time."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TENSORS_FILE, REFUSAL_FILE = "tensors.safetensors", "refusal.txt"

# Exit codes of the process. A full disk has one of its own, since there no refusal can be written either.
REFUSED, DISK_FULL = 1, 5


class RefusedError(Exception):
    """A file that is not taken, and why; raised in the guarded process only."""


_DTYPES = {"F16": "<f2", "I64": "<i8"}


@dataclass(frozen=True)
class Part:
    """One tensor to be written as `dtype`, F16 or I64. `load()` gives it, in any dtype; `origin` goes into errors."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], npt.NDArray[Any]]
    origin: str


def write_parts(file: Path, parts: Sequence[Part]) -> None:
    """Writes `parts` to `file`. Raises `RefusedError` for values that f16 cannot hold, or that are no numbers."""
    header: dict[str, Any] = {}
    end = 0
    for part in parts:
        start, end = end, end + prod(part.shape) * np.dtype(_DTYPES[part.dtype]).itemsize
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            opened.write(_converted(part).tobytes())


def _converted(part: Part) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(part.load(), dtype=_DTYPES[part.dtype])
    if values.shape != part.shape:
        raise RefusedError(f"{part.origin} is {list(values.shape)}, not {list(part.shape)} as it says")
    if not np.isfinite(values).all():
        raise RefusedError(f"{part.origin} holds values that are no numbers, or too large for f16")
    return values
