"""The lock on an output path: `flock` on a hidden file beside it, which the kernel frees when its holder dies.

The file exists as long as the writer does, and a writer that dies leaves it: so it also shows where leftovers may be.
It is removed while the lock is held; after locking, a process checks that the name still leads to the locked file.
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from picompile.errors import UsageError

_SUFFIX = ".picompile-lock"
# A name has at most 255 bytes, and what is added to it at most 40.
_LONGEST_NAME_BYTES = 200
_MOST_LOCK_BYTES = 4096
_POLL_S = 0.002
# File systems without locks (some NFS and FUSE mounts). There, nobody is kept out, and nothing is swept.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Lock:
    """A lock that is held. `real` is false where the file system has none. `path` is its file, if it has one."""

    def __init__(self, path: Path | None, handle: int | None) -> None:
        self._path = path
        self._handle = handle

    @property
    def real(self) -> bool:
        """Whether the lock keeps others out."""
        return self._handle is not None

    def release(self) -> None:
        """Release the lock and remove its file: the name first, so that nobody can lock a vanishing file."""
        if self._handle is None:
            return
        with suppress(OSError):
            # The folder itself may have been moved away.
            if self._path is not None and os.path.samestat(
                os.fstat(self._handle), os.stat(self._path, follow_symlinks=False)
            ):
                self._path.unlink()
        self.keep_file()

    def keep_file(self) -> None:
        """Release the lock without removing its file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def note(self, name: str) -> None:
        """Write into the lock's file which process holds it, and for which output."""
        if self._handle is None:
            return
        text = json.dumps({"process": os.getpid(), "output": name}).encode()
        with suppress(OSError):  # on a full disk, or where the file is another user's, it stays as it is
            os.pwrite(self._handle, text.ljust(os.fstat(self._handle).st_size), 0)


def stem_of(name: str) -> str:
    """Return the beginning, after the dot, of all hidden names beside the output `name`."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST_NAME_BYTES else hashlib.sha256(encoded).hexdigest()


def acquire(output: Path, wait_s: float) -> Lock:
    """Return the lock on the absolute path `output`, after waiting for it at most `wait_s`.

    Raises:
        UsageError: Another process holds it longer.
        OSError: No file can be made beside `output`.
    """
    path = _lock_path(output.parent, output.name)
    end = time.monotonic() + wait_s
    while True:
        try:
            lock = _try(path, os.O_CREAT)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise UsageError(f"{output} is being written by another picompile{_holder(path)}") from None
            time.sleep(_POLL_S * random.uniform(0.5, 1.5))
            continue
        lock.note(output.name)
        return lock


def acquire_folder(output: Path) -> Lock:
    """Return a lock on a folder itself, if nothing can be made beside it: a volume on a read-only system, say.

    Raise `UsageError` if another process holds it.
    """
    handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(f"{output} is being written by another picompile") from None
    except OSError as error:
        os.close(handle)
        if error.errno not in _NO_LOCKS:
            raise
        return Lock(None, None)
    return Lock(None, handle)


def dead_locks(folder: Path) -> Iterator[tuple[str, Lock]]:
    """Yield the locks in `folder` whose holders died, and the names of their outputs; this process holds them now."""
    for entry in names_in(folder):
        if not (entry.startswith(".") and entry.endswith(_SUFFIX)):
            continue
        try:
            lock = _try(folder / entry, 0)
        except OSError:
            # Somebody is at work there, or the name is of no file of ours.
            continue
        name = _output_name(folder / entry)
        if lock.real and name is not None and _lock_path(folder, name) == folder / entry:
            yield name, lock
        else:
            # Nothing says whose it is: its own next writer knows.
            lock.keep_file()


def names_in(folder: Path) -> list[str]:
    """Return the names in `folder`; none if this user may not list them."""
    try:
        return os.listdir(folder)
    except PermissionError:
        return []


def _lock_path(folder: Path, name: str) -> Path:
    return folder / f".{stem_of(name)}{_SUFFIX}"


def _try(path: Path, create: int) -> Lock:
    """Raises `BlockingIOError` where another holds the lock, `OSError` where the file cannot be opened."""
    while True:
        handle = _open(path, create)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileExistsError(errno.EEXIST, "is in the way, and no file", str(path))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another may have removed it since it was opened.
            current = os.stat(path, follow_symlinks=False)
            if os.path.samestat(os.fstat(handle), current):
                return Lock(path, handle)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                with suppress(OSError):
                    path.unlink()
                os.close(handle)
                return Lock(path, None)
            os.close(handle)
            raise
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _open(path: Path, create: int) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_RDWR | create, 0o644)
    except PermissionError:
        if not path.exists():
            raise
        # What another user left; a lock needs no right to write.
        return os.open(path, flags | os.O_RDONLY)


def _read(path: Path) -> dict[str, object]:
    try:
        with open(_open(path, 0), "rb") as file:
            content = json.loads(file.read(_MOST_LOCK_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _output_name(path: Path) -> str | None:
    name = _read(path).get("output")
    return name if isinstance(name, str) and name and "/" not in name and "\0" not in name else None


def _holder(path: Path) -> str:
    process = _read(path).get("process")
    return f" (process {process})" if isinstance(process, int) else ""
