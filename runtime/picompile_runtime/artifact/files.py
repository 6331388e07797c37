"""Opens, reads and hashes the files in an artifact's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from picompile_runtime.errors import ArtifactError
from picompile_runtime.system_errors import system_error

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

    Symbolic links are not followed, so the file cannot lie outside the folder. Raises ArtifactError or DoesNotFitError.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        parts = name.split("/")
        for index, part in enumerate(parts):
            kind = os.O_DIRECTORY if index < len(parts) - 1 else os.O_NONBLOCK  # a pipe must not make us wait
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=descriptor)
            stack.callback(os.close, descriptor)
    except OSError as error:
        raise system_error(folder / name, error) from error
    if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
        raise ArtifactError(f"{folder / name}: is not a regular file")
    return descriptor


def read_small_file(descriptor: int, where: str) -> bytes:
    """Return the whole content of an open file. Raises ArtifactError, naming `where`, above 256 MiB."""
    size = os.fstat(descriptor).st_size
    if size > _MOST_JSON_BYTES:
        raise ArtifactError(f"{where}: has {size} bytes, and at most {_MOST_JSON_BYTES} are read")
    return os.pread(descriptor, size, 0)


def check_size(descriptor: int, entry: FileEntry, path: Path) -> None:
    """Raise ArtifactError unless the open file is as large as the manifest says."""
    size = os.fstat(descriptor).st_size
    if size != entry.size_bytes:
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
