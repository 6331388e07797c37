"""HTML pages as outputs: what they may overwrite, and how they are written."""

from collections.abc import Callable
from pathlib import Path

from picompile.cli.checks import require_output_file
from picompile.errors import UsageError
from picompile.output import parents_of, writing_file

_START = b"<!doctype html>"


def require_page(path: Path, option: str, *, overwrite: bool) -> None:
    """Raises `UsageError` where `path` cannot become a page: only a page is ever overwritten."""
    require_output_file(path, option, _require_page, overwrite=overwrite)


def _require_page(path: Path) -> None:
    with path.open("rb") as file:
        is_page = file.read(len(_START)).lower() == _START
    if not is_page:
        raise UsageError(f"{path}: exists and is no HTML page, so it is not overwritten; choose another file")


def write_page(path: Path, html: str, option: str, *, overwrite: bool) -> None:
    """Writes the page, and the folders above it. Raises what `require_page` does, should that have changed."""
    write_text(path, html, lambda: require_page(path, option, overwrite=overwrite), overwrite=overwrite)


def write_text(path: Path, text: str, check: Callable[[], None], *, overwrite: bool) -> None:
    """Writes a file, and the folders above it: it is there whole or not at all. A link goes on pointing at it.

    `check` is asked again at the moment when the file takes its place.
    """
    with parents_of(path.resolve()), writing_file(path, overwrite=overwrite, check=check) as file:
        file.write(text.encode("utf-8"))
