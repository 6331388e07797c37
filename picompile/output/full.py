"""A full disk, and others that take nothing: the one line that names the folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from picompile.errors import DoesNotFitError, UsageError

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
