"""Opens, reads and hashes the files in an artifact's folder, with errors that name the cause."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from picompile_runtime.errors import ArtifactError, DoesNotFitError, PicompileRuntimeError, RequestError
from picompile_runtime.request_checks import shown
from picompile_runtime.stand_ins import START_BYTES, describe_stand_in

# Turns the system's errors while an artifact is opened or loaded into the runtime's, which name the cause.


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
    errno.ELOOP: "its symbolic links lead to each other: copy the file itself",
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


# Opens, reads and hashes the files in an artifact's folder.


_MOST_JSON_BYTES = 2**28
_BLOCK_BYTES = 2**22

Progress = Callable[[str, int, int], None]
"""Called with a file's name, how many of its bytes are checked, and its size in bytes."""


@dataclass(frozen=True)
class FileEntry:
    """The size and the hash that the manifest gives for one file."""

    size_bytes: int
    sha256: str


def open_file(folder: Path, name: str, stack: ExitStack) -> int:
    """Return a descriptor of the regular file `name` inside `folder`; `stack` closes it.

    It may be a symbolic link, also to a place outside, as in a Hugging Face cache: what it leads to is opened once, and
    that is what is hashed and used. Raises ArtifactError or DoesNotFitError.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        parts = name.split("/")
        for index, part in enumerate(parts):
            kind = os.O_DIRECTORY if index < len(parts) - 1 else os.O_NONBLOCK  # a pipe must not make us wait
            descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC | kind, dir_fd=descriptor)
            stack.callback(os.close, descriptor)
    except OSError as error:
        raise system_error(folder / name, error) from error
    if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
        raise ArtifactError(f"{folder / name}: is not a regular file")
    return descriptor


def read_small_file(descriptor: int, where: str) -> bytes:
    """Return the whole content of an open file. Raises ArtifactError, naming `where`, above 256 MiB.

    So it does if another file stands there: see `describe_stand_in`.
    """
    size = os.fstat(descriptor).st_size
    if size > _MOST_JSON_BYTES:
        raise ArtifactError(f"{where}: has {size} bytes, and at most {_MOST_JSON_BYTES} are read")
    content = os.pread(descriptor, size, 0)
    _refuse_stand_in(content, where)
    return content


def _refuse_stand_in(start: bytes, where: object) -> None:
    if (found := describe_stand_in(start)) is not None:
        raise ArtifactError(f"{where}: {found}")


def check_size(descriptor: int, entry: FileEntry, path: Path) -> None:
    """Raise ArtifactError unless the open file is as large as the manifest says."""
    size = os.fstat(descriptor).st_size
    if size != entry.size_bytes:
        _refuse_stand_in(os.pread(descriptor, START_BYTES, 0), path)
        raise ArtifactError(f"{path}: has {size} bytes instead of {entry.size_bytes}; copy or compile it again")


def hash_file(descriptor: int, entry: FileEntry, name: str, progress: Progress | None) -> str:
    """Return the SHA-256 of an open file in hexadecimal; `progress` is called after each block of 4 MiB."""
    digest, block, done = hashlib.sha256(), bytearray(_BLOCK_BYTES), 0
    while count := os.preadv(descriptor, [block], done):
        digest.update(memoryview(block)[:count])
        done += count
        if progress:
            progress(name, min(done, entry.size_bytes), entry.size_bytes)
    return digest.hexdigest()


def check_hash(found: str, entry: FileEntry, path: Path) -> None:
    """Raise ArtifactError unless the hash `found` is the manifest's."""
    if found != entry.sha256:
        raise ArtifactError(f"{path}: was changed (its sha256 is not the manifest's); copy or compile it again")


def size_and_time(descriptor: int) -> tuple[int, int]:
    """Return the size in bytes of an open file and the time in ns when it was last written to."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def duplicate_descriptors(descriptors: Mapping[str, int]) -> Mapping[str, int]:
    """Return duplicates of the descriptors by name. Raises OSError, and then leaves none open."""
    found: dict[str, int] = {}
    try:
        for name, descriptor in descriptors.items():
            found[name] = os.dup(descriptor)
    except OSError:
        close_descriptors([*found.values()])
        raise
    return found


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close the descriptors; errors are ignored."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
