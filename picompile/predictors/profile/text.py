"""Text that a model is profiled on: files and standard input, read and checked before anything expensive begins."""

import codecs
import hashlib
import os
import platform
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
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


# The text there is without being given any: sources and documents of the running Python's standard library.
#
# About 3 % of the files, chosen by a hash of their names, are kept for measuring: those that examples/train_relu_lm.py
# keeps from training as well.


_HELD_OUT_PERCENT = 3
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
# Tables, not text.
_SKIPPED_FILES = {"html/entities.py", "locale.py"}


# Of one file, so that a long one is not all there is.
_EXCERPT_CHARACTERS = 4096


def library_texts(held_out: bool, seed: int) -> Iterator[CalibrationText]:
    """An excerpt of each file that is held out, or of each of the others, read one by one.

    The seed draws the order and the places.
    """
    root, topics = Path(sysconfig.get_path("stdlib")), _topics()
    names = [name for name in (*_source_names(root), *topics) if is_held_out(name) == held_out]
    draw = random.Random(seed)
    draw.shuffle(names)
    for name in names:
        text = topics[name] if name in topics else (root / name).read_bytes().decode("utf-8", errors="replace")
        if text.strip():
            yield CalibrationText(name, _excerpt(text, draw))


def _excerpt(text: str, draw: random.Random) -> str:
    """Whole lines from a random place on."""
    start = draw.randint(0, max(0, len(text) - _EXCERPT_CHARACTERS))
    start = text.find("\n", start) + 1 if start else 0
    return text[start : start + _EXCERPT_CHARACTERS]


def library_name() -> str:
    """What the library is called where it is spoken of."""
    return f"Python {platform.python_version()}'s standard library"


def is_held_out(name: str) -> bool:
    """Whether a file only measures, by its name alone: the same for every machine and Python version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT


def _source_names(root: Path) -> list[str]:
    """The library's modules, relative to its folder, less tests and generated tables; sorted."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(
        path.as_posix()
        for path in paths
        if _SKIPPED_FOLDERS.isdisjoint(path.parts)
        and path.as_posix() not in _SKIPPED_FILES
        and not path.name.startswith("_sysconfigdata")
    )


def _topics() -> dict[str, str]:
    """The topics of the language reference, which some distributions leave out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {f"topics/{name}": str(text) for name, text in sorted(topics.items())}
