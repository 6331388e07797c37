"""Single files inside a folder that this process alone writes to: each appears whole or not at all."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from picompile.errors import DoesNotFitError, UsageError
from picompile.output.leftovers import sync_folder


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


# A full disk, and others that take nothing: the one line that names the folder.


# The disk, the user's quota, and a limit on the size of files.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries written in Rust raise errors of their own, with the number in the text.
_IN_TEXT = ("os error 28)", "os error 122)", "os error 27)")


def is_full(error: BaseException) -> bool:
    """Whether `error` means that a file system took no more."""
    if isinstance(error, OSError):
        return error.errno in DISK_FULL
    return isinstance(error, Exception) and any(text in str(error) for text in _IN_TEXT)


@contextmanager
def write_errors_told(output: Path, temporary: Path) -> Iterator[None]:
    """Turns a full disk inside the block into a `DoesNotFitError`, and another failure to write into a `UsageError`.

    Both name the folder of `output`. Only where the error names no file, or one under `temporary`: what another disk
    refused is told as it is.
    """
    try:
        yield
    except Exception as error:
        named = getattr(error, "filename", None)
        if named is not None and not Path(str(named)).is_relative_to(temporary):
            raise
        if is_full(error):
            raise DoesNotFitError(f"{output.parent}: {_reason(error)}; {output} was not written") from error
        if not _is_of_a_file(error):
            raise
        raise UsageError(f"{output} cannot be written: {_reason(error)}") from error


def _is_of_a_file(error: Exception) -> bool:
    """Whether it can have come from writing: an error of the system, and none of pipes, sockets or processes."""
    others = (ConnectionError, TimeoutError, ChildProcessError, BlockingIOError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, others)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or os.strerror(errno.ENOSPC)


# A folder's content in another folder, without copying it where the file system has hard links.


def link_tree(source: Path, target: Path, skip: Callable[[Path], bool] = lambda path: False) -> None:
    """Has `target` hold all that `source` does, but for paths, relative to `source`, of which `skip` is true.

    Files must be replaced and not changed from then on: both folders have the same ones.
    """
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(map(skip, (relative, *relative.parents))):
            continue
        new = target / relative
        if path.is_dir() and not path.is_symlink():
            new.mkdir(exist_ok=True)
            continue
        try:
            os.link(path, new, follow_symlinks=False)
        except OSError:
            shutil.copy2(path, new, follow_symlinks=False)


# The folders above an output.


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
