"""Text that a model is profiled on: files and standard input, read and checked before anything expensive begins."""

import codecs
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from picompile.errors import UsageError

# Far more than is ever profiled on; what comes after it is not read.
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class CalibrationText:
    """A text and what it is called where it is spoken of."""

    source: str
    text: str = field(repr=False)


def read_calibration(paths: Sequence[Path | CalibrationText]) -> tuple[CalibrationText, ...]:
    """The texts of files; `-` is standard input, and what is a text already stays as it is.

    Raises `UsageError`, with the file and the byte, for what is empty or is no UTF-8 text.
    """
    if [path for path in paths if path == Path("-")][1:]:
        raise UsageError("standard input (-) is given twice")
    return tuple(path if isinstance(path, CalibrationText) else _read(path) for path in paths)


def _read(path: Path) -> CalibrationText:
    if path == Path("-"):
        return CalibrationText("standard input", _decoded("standard input", sys.stdin.buffer))
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, not a text file")
    try:
        with path.open("rb") as file:
            return CalibrationText(str(path), _decoded(str(path), file))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or os.strerror(error.errno or 0)}") from error


def _decoded(source: str, file: BinaryIO) -> str:
    data = file.read(_MOST_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # The limit may have cut a character in two.
        text = decoder.decode(data, final=len(data) < _MOST_BYTES)
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise UsageError(f"{source}: not text: byte {data.index(0)} is zero")
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise UsageError(f"{source}: is empty; give a text to profile the model on")
    return text
