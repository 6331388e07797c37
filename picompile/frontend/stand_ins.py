"""Files that stand where a file of a checkpoint should be: pointers of Git LFS, and web pages that were downloaded."""

from collections.abc import Callable
from pathlib import Path

from picompile.errors import UnsupportedModelError

_READ = 256  # bytes; a pointer is shorter, and a page begins with its doctype
# The first line of a pointer: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")


def refuse_stand_in(
    file: Path, kind: Callable[[str], Exception] = UnsupportedModelError, content: bytes | None = None
) -> None:
    """Raise `kind` if a file is a pointer of Git LFS or a web page, and not the file itself.

    Args:
        file: the file, which may be missing.
        kind: makes the error.
        content: its first bytes, if they are read already.
    """
    start = _start(file) if content is None else content[:_READ]
    if start.startswith(_POINTER):
        raise kind(
            f"{file}: is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file"
        )
    if start.lstrip().lower().startswith(_PAGES):
        raise kind(f"{file}: is a web page, such as one that asks for a login, not the file itself; download it again")


def _start(file: Path) -> bytes:
    if not file.is_file():  # opening a pipe would wait for a writer
        return b""
    try:
        with file.open("rb") as opened:
            return opened.read(_READ)
    except OSError:  # whoever reads the file says so
        return b""
