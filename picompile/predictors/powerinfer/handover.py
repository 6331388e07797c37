"""The interface to the guarded process: its file names and exit codes, and the safetensors file that it writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from picompile.output.files import safetensors_header

TENSORS_FILE, REFUSAL_FILE = "tensors.safetensors", "refusal.txt"

# Exit codes of the process. A full disk has a code of its own, because then the reason cannot be written to a file.
REFUSED, DISK_FULL = 1, 5


class RefusedError(Exception):
    """A file is rejected, and why. Raised only in the guarded process."""


_DTYPES = {"F16": "<f2", "I64": "<i8"}


@dataclass(frozen=True)
class Part:
    """A tensor to be written as `dtype`, F16 or I64. `load()` returns it in any dtype; `origin` names it in errors."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], npt.NDArray[Any]]
    origin: str


def write_parts(file: Path, parts: Sequence[Part]) -> None:
    """Write `parts` to `file`. Raise `RefusedError` for values that are not finite or too large for f16."""
    records = [
        (part.name, part.dtype, part.shape, prod(part.shape) * np.dtype(_DTYPES[part.dtype]).itemsize) for part in parts
    ]
    with file.open("wb") as opened:
        opened.write(safetensors_header(records))
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
