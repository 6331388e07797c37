"""Folders for temporary files that do not outlive their process by long.

A folder is locked as long as its process lives: the kernel frees the lock of one that was killed, and the next folder
that is made removes what it left. Whoever makes one checks, once it has the lock, that nobody removed it before.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from picompile_codegen.errors import TemporaryFolderError

_PREFIX = "picompile-work-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder under TMPDIR, or where temporary files go, for this user alone; removed in the end.

    Raises `TemporaryFolderError` where there is none that takes files.
    """
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        # It tries TMPDIR, /tmp, /var/tmp and the working folder, and says no more than that.
        raise TemporaryFolderError(
            f"no folder for temporary files is to be had, each is full or not writable: {error.strerror}; TMPDIR names "
            "another"
        ) from error
    _sweep(base)
    folder, handle = _make(base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _make(base: Path) -> tuple[Path, int]:
    while True:
        folder = base / f"{_PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # On a file system without locks nobody can sweep it either.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if _is(folder, handle):
            return folder, handle
        os.close(handle)


def _sweep(base: Path) -> None:
    with suppress(OSError):
        for entry in os.scandir(base):
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_if_dead(Path(entry.path))


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_uid != os.geteuid():
                return
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(folder, handle):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _is(folder: Path, handle: int) -> bool:
    """Whether `folder` is still what `handle` is of."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
