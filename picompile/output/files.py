"""Single files inside a folder that this process alone writes to: each appears whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from picompile.output.full import write_errors_told
from picompile.output.rename import sync_folder


@contextmanager
def appearing_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when the block ends well: synced, then renamed. Until then the old one stays.

    Only for a folder whose output path is reserved: a second writer would use the same temporary name.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with write_errors_told(path, temporary):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
