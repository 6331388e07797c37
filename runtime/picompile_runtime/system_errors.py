"""Turns the system's errors while an artifact is opened or loaded into the runtime's, which name the cause."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from picompile_runtime.errors import ArtifactError, DoesNotFitError, PicompileRuntimeError, RequestError
from picompile_runtime.request_checks import shown

_NO_MEMORY = "there is too little memory, or this process may not have more (ulimit -v, a container's limit)"
_AGAIN = "copy or compile the model again"
_PERMISSIONS = "change its permissions, and those of the folders above it"
# Errors because of this process's limits, whatever the artifact is like.
_LIMITS = {
    errno.EMFILE: "this process may not open more (ulimit -n): close some, or raise the limit",
    errno.ENFILE: "this system cannot open more: close programs, or raise fs.file-max",
    errno.ENOMEM: _NO_MEMORY,
    errno.EAGAIN: "this process may not start more threads (ulimit -u, a container's limit)",
}
_FILES = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EIO: "its disk may be failing: copy the artifact from elsewhere",
    errno.ELOOP: "an artifact has no symbolic links: copy the file itself",
    errno.ENAMETOOLONG: "give the folder that `picompile compile -o` wrote",
}


def system_error(where: object, error: OSError, failed: str = "cannot be opened") -> PicompileRuntimeError:
    """Return the error to raise for `error`, which occurred with the file or folder `where`; `failed` says at what."""
    code = error.errno or _errno_of_text(str(error))
    kind = DoesNotFitError if code in _LIMITS else ArtifactError
    return kind(f"{where}: {failed} ({error.strerror or error}); {_LIMITS.get(code) or _FILES.get(code, _AGAIN)}")


def _errno_of_text(text: str) -> int:
    """Return the number of an error that a loader reports only in words; 0 if it is not in `_LIMITS`."""
    return next((code for code in _LIMITS if os.strerror(code) in text), 0)


@contextmanager
def translate_system_errors(where: object) -> Iterator[None]:
    """Raise the system's errors inside the context as ArtifactError or DoesNotFitError, naming `where`."""
    try:
        yield
    except MemoryError as error:
        raise DoesNotFitError(f"{where}: cannot be loaded: {_NO_MEMORY}") from error
    except OSError as error:
        raise system_error(where, error) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise DoesNotFitError(f"{where}: cannot be loaded: {_LIMITS[errno.EAGAIN]}") from error


def artifact_folder(path: str | os.PathLike[str]) -> Path:
    """Return a caller's path of an artifact as a Path. Raises RequestError if it cannot be a path."""
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise RequestError(f"an artifact is given as the path of its folder, not as {shown(path)}") from error
    if "\0" in text:
        raise RequestError(f"a path has no zero bytes, as {shown(text)} has")
    return Path(text)
