"""Checks of a command's inputs and outputs, made before anything heavy is imported or written."""

import json
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.errors import DoesNotFitError, UsageError
from picompile.output import DISK_FULL, parents_of, writing_file
from picompile.output.files import read_safetensors_header
from picompile.output.place import existing_ancestor, require_folder_or_nothing

if TYPE_CHECKING:
    from picompile_runtime.bench.trace import TracedStep


def require_context(model: Path, context: int | None) -> None:
    """Raise `UsageError` for more tokens than config.json has positions for.

    A config without a number, or with an odd one, passes: it is checked when the model is read, which takes seconds.
    """
    try:
        limit = json.loads((model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, RecursionError, AttributeError):
        return
    if context is not None and type(limit) is int and context > limit > 0:
        raise UsageError(f"a context of {context} tokens is more than the model's {limit} positions")


def require_text_file(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise `UsageError` if there is none."""
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, not a text file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def require_output(output: Path, *, overwrite: bool, marker: str) -> None:
    """Raise `UsageError` if the folder `output` cannot be made, or one is in the way.

    Only a folder that contains `marker` is ever overwritten: `-o ~ --overwrite` must not delete a home folder.
    """
    require_folder_or_nothing(output)
    if output.exists():
        _require_replaceable(output, overwrite=overwrite, marker=marker)
    _require_writable(output)


def _require_replaceable(output: Path, *, overwrite: bool, marker: str) -> None:
    if not any(output.iterdir()):
        return
    if not (output / marker).is_file():
        raise UsageError(f"{output}: exists and has no {marker}, so it is not overwritten; choose another output")
    if not overwrite:
        raise UsageError(f"{output}: exists; give --overwrite to overwrite it, or choose another output")


def require_output_file(path: Path, option: str, require_kind: Callable[[Path], None], *, overwrite: bool) -> None:
    """Raise `UsageError` if the file `path` cannot be made, or one is in the way.

    `require_kind` raises if the file there is of another kind than the one to write: only its own kind is overwritten.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; {option} names the file to write")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path}: a link to nowhere; remove it or choose another file")
    if path.exists():
        if not path.is_file():  # reading from a pipe would wait for a writer
            raise UsageError(f"{path}: not a regular file; choose another")
        require_kind(path)
        if not overwrite:
            raise UsageError(f"{path}: exists; give --overwrite to overwrite it, or choose another file")
    _require_writable(path)


def _require_writable(path: Path) -> None:
    parent = existing_ancestor(path)
    try:
        # Asking the file system is the only test that holds for root, read-only mounts and quotas alike. The file has
        # no name, if the file system supports that.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DoesNotFitError(f"{parent}: {error.strerror}; {path} cannot be written") from error
        raise UsageError(f"{path}: cannot write in {parent}: {error.strerror}") from error


def checkpoint_weights(folder: Path) -> int:
    """Return how many weights the *.safetensors files of `folder` hold, by their headers; unreadable files count zero.

    A lower bound is enough here: what is wrong with a file is reported when the model is read.
    """
    return sum(_weights_in(path) for path in folder.glob("*.safetensors"))


def _weights_in(path: Path) -> int:
    try:
        _, header = read_safetensors_header(path)
        return sum(prod(map(int, entry["shape"])) for entry in header.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


_PAGE_START = b"<!doctype html>"


def require_page(path: Path, option: str, *, overwrite: bool) -> None:
    """Raise `UsageError` if a page cannot be written to `path`: a file that is no page is never overwritten."""
    require_output_file(path, option, _require_page, overwrite=overwrite)


def _require_page(path: Path) -> None:
    if _first_bytes(path, len(_PAGE_START)).lower() != _PAGE_START:
        raise UsageError(f"{path}: exists and is no HTML page, so it is not overwritten; choose another file")


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def write_page(path: Path, html: str, option: str, *, overwrite: bool) -> None:
    """Write the page and make the folders above it. Raise what `require_page` raises if a file appeared meanwhile."""
    write_text(path, html, lambda: require_page(path, option, overwrite=overwrite), overwrite=overwrite)


def write_text(path: Path, text: str, check: Callable[[], None], *, overwrite: bool) -> None:
    """Write a file, whole or not at all, and make the folders above it. A link goes on pointing at the file.

    `check` is called again just before the file takes its place.
    """
    with parents_of(path.resolve()), writing_file(path, overwrite=overwrite, check=check) as file:
        file.write(text.encode("utf-8"))


_TRACE_START = b'{"traceEvents":'


def require_trace_output(path: Path) -> None:
    """Raise `UsageError` if a trace cannot be written to `path`: a file that is no trace is never overwritten."""
    require_output_file(path, "--trace", _require_trace, overwrite=True)


def _require_trace(path: Path) -> None:
    if _first_bytes(path, len(_TRACE_START)) != _TRACE_START:
        raise UsageError(f"{path}: exists and is no trace of bench, so it is not overwritten; choose another file")


def write_trace(path: Path, steps: "Sequence[TracedStep]") -> None:
    """Write the steps as a trace, whole or not at all."""
    from picompile_runtime.bench.trace import chrome_trace

    text = json.dumps(chrome_trace(steps), separators=(",", ":")) + "\n"
    write_text(path, text, lambda: require_trace_output(path), overwrite=True)
