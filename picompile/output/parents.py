"""The folders above an output."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def parents_of(output: Path) -> Iterator[None]:
    """Makes the folders above `output`, and takes those that it made away again if the block fails."""
    made: list[Path] = []
    try:
        for parent in reversed(output.absolute().parents):
            if not parent.exists():
                # Another process may make it at the same time.
                parent.mkdir(exist_ok=True)
                made.append(parent)
        yield
    except BaseException:
        for parent in reversed(made):
            with suppress(OSError):  # something else is in it
                parent.rmdir()
        raise
