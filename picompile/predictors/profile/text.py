"""Text that a model is profiled on: files, standard input, or the standard library of the running Python.

Without a text from the user, the sources and documents of the standard library are used. About 3 % of its files, chosen
by a hash of their names, are held out for measuring; examples/train_relu_lm.py keeps the same files from training.
"""

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
from picompile.options import Option

CALIBRATION = Option(
    "Text to learn from; repeatable; - reads standard input. Default: the sources and documents of Python's standard "
    "library, and text sampled from the model.",
    metavar="FILE",
)

# Far more than is ever profiled on; bytes after this are not read.
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class CalibrationText:
    """A text, and its name in messages and in the profile."""

    source: str
    text: str = field(repr=False)


def read_calibration(paths: Sequence[Path | CalibrationText]) -> tuple[CalibrationText, ...]:
    """Return the texts of files; `-` is standard input, and an item that is a text already is returned as it is.

    Raises:
        UsageError: A text is empty or not UTF-8; the message names the file and the byte.
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
# These files are tables, not text.
_SKIPPED_FILES = {"html/entities.py", "locale.py"}


# The most characters of one file, so that a long file does not fill the whole text.
_EXCERPT_CHARACTERS = 4096


def library_texts(held_out: bool, seed: int) -> Iterator[CalibrationText]:
    """Yield an excerpt of each held-out file, or of each other file, one by one.

    `seed` draws the order of the files and the positions of the excerpts.
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
    """Return whole lines from a random position on."""
    start = draw.randint(0, max(0, len(text) - _EXCERPT_CHARACTERS))
    start = text.find("\n", start) + 1 if start else 0
    return text[start : start + _EXCERPT_CHARACTERS]


def library_name() -> str:
    """Return the name of the library in messages and in the profile."""
    return f"Python {platform.python_version()}'s standard library"


def is_held_out(name: str) -> bool:
    """Return whether a file is held out. This depends on its name alone, not on the machine or Python version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT


def _source_names(root: Path) -> list[str]:
    """Return the library's modules, relative to its folder, without tests and generated tables; sorted."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(
        path.as_posix()
        for path in paths
        if _SKIPPED_FOLDERS.isdisjoint(path.parts)
        and path.as_posix() not in _SKIPPED_FILES
        and not path.name.startswith("_sysconfigdata")
    )


def _topics() -> dict[str, str]:
    """Return the topics of the language reference; empty if the distribution leaves them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {f"topics/{name}": str(text) for name, text in sorted(topics.items())}
