"""Renaming without overwriting, swapping two names, and removal of files that dead writers left beside their outputs.

Both kinds of renaming are renameat2 on Linux (man 2 renameat2). ext4, XFS, Btrfs, tmpfs and most others support its
flags; NFS and FUSE file systems may not. Each function says what it does there.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from picompile.output.lock import dead_locks, names_in, stem_of

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
# EINVAL: the file system does not know the flag. ENOSYS: the kernel is too old, or a sandbox forbids the call.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


class UnsupportedRenameError(Exception):
    """The file system or the C library does not have this rename."""


def exchange(first: Path, second: Path) -> None:
    """Swap the names of two existing paths in one step. Raise `UnsupportedRenameError` or `OSError`."""
    _renameat2(first, second, _EXCHANGE)


def rename_to_new(source: Path, target: Path) -> None:
    """Rename the file `source` to `target`. Raise `FileExistsError` if `target` exists.

    Without renameat2 a hard link is made, which fails if the name is taken. A file system that has neither
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
    """Sync the names in `folder` to disk, if this user may open it and the file system can.

    Errors are ignored: the rename before has succeeded, and an error would suggest that it had not.
    """
    with suppress(OSError):
        _sync(folder)


def sync_tree(folder: Path) -> None:
    """Sync everything in `folder` to disk, so that it survives a loss of power."""
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


# Writers that die leave hidden files beside their outputs:
#
# | name | is |
# | --- | --- |
# | `.NAME.<16 hex digits>.partial` | what was to become NAME, or served to make it, or was NAME before |
# | `.NAME.<16 hex digits>.old` | what was NAME, moved aside where names cannot be exchanged |
# | `.NAME.picompile-lock` | the lock on NAME |
#
# Only the holder of the lock on NAME has such things, so the next holder removes them; an `.old` goes back to its place
# if nothing is there.


PARTIAL, OLD = "partial", "old"
_DIGITS = 16


def temporary_name(output: Path, kind: str) -> Path:
    """Return a new name beside `output`, for the holder of its lock."""
    return output.with_name(f".{stem_of(output.name)}.{secrets.token_hex(_DIGITS // 2)}.{kind}")


def sweep(output: Path) -> None:
    """Remove leftovers of `output`, whose lock is held, and of other dead writers in its folder."""
    _restore(output)
    remove = [*_leftovers_of(output, PARTIAL), *_leftovers_of(output, OLD)]
    for name, lock in dead_locks(output.parent):
        other = output.with_name(name)
        _restore(other)
        for path in [*_leftovers_of(other, PARTIAL), *_leftovers_of(other, OLD)]:
            # Under a name of ours it is safe without the other lock, on which nobody shall wait for a large removal.
            mine = temporary_name(output, PARTIAL)
            with suppress(OSError):
                path.rename(mine)
                remove.append(mine)
        lock.release()
    for path in remove:
        discard(path)


def discard(path: Path) -> None:
    """Remove a folder or file of ours as far as possible; a keyboard interrupt is raised again afterwards."""
    stopped: KeyboardInterrupt | None = None
    for _ in range(3):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
            break
        except KeyboardInterrupt as error:
            stopped = error
    if stopped is not None:
        raise stopped


def _restore(output: Path) -> None:
    """Put back the old output that a writer moved aside before it died, unless there is a new one at `output`."""
    if os.path.lexists(output):
        return
    for path in _leftovers_of(output, OLD):
        with suppress(OSError, UnsupportedRenameError):
            if path.is_dir() and not path.is_symlink():
                path.rename(output)
            else:
                rename_to_new(path, output)
            return


def _leftovers_of(output: Path, kind: str) -> Iterator[Path]:
    pattern = re.compile(rf"\.{re.escape(stem_of(output.name))}\.[0-9a-f]{{{_DIGITS}}}\.{kind}")
    return (output.with_name(name) for name in names_in(output.parent) if pattern.fullmatch(name))
