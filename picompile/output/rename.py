"""Renaming that overwrites nothing, and the exchange of two names, where the file system can.

Linux has both as renameat2 (man 2 renameat2). ext4, XFS, Btrfs, tmpfs and most others know its flags; NFS, and what
lies behind FUSE, may not. Each function says what is done there.
"""

import ctypes
import errno
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
# EINVAL: the file system does not know the flag. ENOSYS: the kernel is too old, or a sandbox forbids the call.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


class UnsupportedRenameError(Exception):
    """This file system, or this C library, has no such rename."""


def exchange(first: Path, second: Path) -> None:
    """Gives each of two existing paths the other's name, in one step. Raises `UnsupportedRenameError`, `OSError`."""
    _renameat2(first, second, _EXCHANGE)


def rename_to_new(source: Path, target: Path) -> None:
    """Renames the file `source` to `target`. Raises `FileExistsError` where something is there.

    Without renameat2 a hard link does it: making one fails where the name is taken. A file system that has neither
    (some FUSE ones) leaves a moment between the look and the rename.
    """
    try:
        _renameat2(source, target, _NOREPLACE)
        return
    except UnsupportedRenameError:
        pass
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError as error:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        source.rename(target)
        return
    source.unlink()


def sync_folder(folder: Path) -> None:
    """Has the names in `folder` survive a loss of power, where this user may open it and the file system can.

    What was renamed there is in its place by now, and a failure would say otherwise.
    """
    with suppress(OSError):
        _sync(folder)


def sync_tree(folder: Path) -> None:
    """Has all that is in `folder` survive a loss of power."""
    for path in [*folder.rglob("*"), folder]:
        # Links and pipes have no content of their own.
        if stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode):
            _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _renameat2(source: Path, target: Path, flags: int) -> None:
    call = _function()
    if call is None:
        raise UnsupportedRenameError
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        raise UnsupportedRenameError(os.strerror(number))
    raise OSError(number, os.strerror(number), str(source), None, str(target))


@cache
def _function() -> Any:
    """renameat2 of the C library, or None: glibc has it since 2.28, musl since 1.2.6."""
    try:
        found = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found
