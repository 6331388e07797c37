"""HTML pages as outputs: what they may overwrite, and how they are written."""

import os
import tempfile
from pathlib import Path

from picompile.cli.checks import existing_ancestor, parents_of
from picompile.errors import UsageError

_START = b"<!doctype html>"


def require_page(path: Path, option: str, *, overwrite: bool) -> None:
    """Raises `UsageError` where `path` cannot become a page: only a page is ever overwritten."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; {option} names the file to write")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path}: a link to nowhere; remove it or choose another file")
    if path.exists():
        _require_replaceable(path, overwrite=overwrite)
    parent = existing_ancestor(path)
    try:
        # Asking the file system is the only test that holds for root, read-only mounts and quotas alike.
        with tempfile.TemporaryDirectory(dir=parent, prefix=".picompile-"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot write in {parent}: {error.strerror}") from error


def _require_replaceable(path: Path, *, overwrite: bool) -> None:
    if not path.is_file():  # reading from a pipe would wait for a writer
        raise UsageError(f"{path}: not a regular file; choose another")
    with path.open("rb") as file:
        is_page = file.read(len(_START)).lower() == _START
    if not is_page:
        raise UsageError(f"{path}: exists and is no HTML page, so it is not overwritten; choose another file")
    if not overwrite:
        raise UsageError(f"{path}: exists; give --force to overwrite it, or choose another file")


def write_page(path: Path, html: str) -> None:
    """Writes the page, and the folders above it: it is there whole or not at all. A link goes on pointing at it."""
    path = path.resolve()
    # Without the page's name, which may be as long as a name can be.
    partial = path.with_name(f".picompile-{os.getpid()}.partial")
    with parents_of(path):
        try:
            partial.write_text(html, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
