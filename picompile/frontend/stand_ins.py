"""Files that stand where a file of a checkpoint should be: pointers of Git LFS, and web pages that were downloaded."""

from collections.abc import Callable
from pathlib import Path

from picompile.errors import UnsupportedModelError
from picompile_runtime.stand_ins import START_BYTES, describe_stand_in


def refuse_stand_in(
    file: Path, kind: Callable[[str], Exception] = UnsupportedModelError, content: bytes | None = None
) -> None:
    """Raise `kind` if a file is a pointer of Git LFS or a web page, and not the file itself.

    Args:
        file: the file, which may be missing.
        kind: makes the error.
        content: its first bytes, if they are read already.
    """
    found = describe_stand_in(_start(file) if content is None else content)
    if found is not None:
        raise kind(f"{file}: {found}")


def _start(file: Path) -> bytes:
    if not file.is_file():  # opening a pipe would wait for a writer
        return b""
    try:
        with file.open("rb") as opened:
            return opened.read(START_BYTES)
    except OSError:  # whoever reads the file says so
        return b""
