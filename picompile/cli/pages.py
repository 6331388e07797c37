"""HTML pages as outputs: what they may overwrite, and how they are written."""

import os
from pathlib import Path

from picompile.cli.checks import parents_of, require_output_file
from picompile.errors import UsageError

_START = b"<!doctype html>"


def require_page(path: Path, option: str, *, overwrite: bool) -> None:
    """Raises `UsageError` where `path` cannot become a page: only a page is ever overwritten."""
    require_output_file(path, option, _require_page, overwrite=overwrite)


def _require_page(path: Path) -> None:
    with path.open("rb") as file:
        is_page = file.read(len(_START)).lower() == _START
    if not is_page:
        raise UsageError(f"{path}: exists and is no HTML page, so it is not overwritten; choose another file")


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
