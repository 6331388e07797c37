"""The place of an output: checks of its path before any work, and its reservation while it is written."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from picompile.errors import DoesNotFitError, UsageError
from picompile.output.files import explaining_write_errors, is_full, parents_of
from picompile.output.leftovers import (
    OLD,
    PARTIAL,
    UnsupportedRenameError,
    discard,
    exchange,
    rename_to_new,
    sweep,
    sync_folder,
    sync_tree,
    temporary_name,
)
from picompile.output.lock import Lock, acquire, acquire_folder

# Checks of an output path before any work: is the path free, does its folder exist, is the disk large enough.


def holds_something(path: Path) -> bool:
    """Return whether anything is at `path` except an empty folder, which a rename may replace."""
    if not os.path.lexists(path):
        return False
    return path.is_symlink() or not path.is_dir() or any(path.iterdir())


def existing_ancestor(path: Path) -> Path:
    """Return the nearest folder above `path` that exists: its file system is the one that `path` will be on."""
    for parent in path.absolute().parents:
        if parent.exists():
            return parent
    return Path("/")


def require_folder_or_nothing(output: Path) -> None:
    """Raise `UsageError` if `output` is a dangling link, or exists and is not a folder."""
    if output.is_symlink() and not output.exists():
        raise UsageError(f"{output}: a link to nowhere; remove it or choose another output")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: exists and is not a folder; choose another output")


def require_parent_folder(output: Path) -> None:
    """Raise `UsageError` if the folder that `output` goes into does not exist."""
    parent = output.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no folder; create it first")


def require_disk_space(output: Path, needed_bytes: int, message: str) -> None:
    """Raise `DoesNotFitError` if the file system of `output` has fewer than `needed_bytes` free.

    Args:
        output: The path to be written; it and the folders above it need not exist yet.
        needed_bytes: Upper bound of what will be written.
        message: Template of the error, with the fields `{output}`, `{folder}` (the nearest existing folder above
            `output`), `{needed}` and `{free}` (sizes with units).

    Raises:
        DoesNotFitError: The disk is too small.
    """
    from picompile_runtime.devices.memory import in_units

    folder = existing_ancestor(output)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        needed, free = in_units(needed_bytes, free_bytes)
        raise DoesNotFitError(message.format(output=output, folder=folder, needed=needed, free=free))


# A reserved output path: only this process writes to it until it is released.


# A process that only removes leftovers holds the locks in a folder for less than this time.
_SWEEPING_S = 2.0
# For outputs that are written at once, without a long computation.
_SHORT_WAIT_S = 30.0
_MOST_TRIES = 100
_NOT_BESIDE = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class OutputPath:
    """An output path whose lock is held: see `reserve`.

    `check` raises `UsageError` where what is at the path now must not be replaced; it is asked at the moment of each
    renaming too. Without `overwrite` nothing but an empty folder is ever replaced, whatever `check` says.
    """

    path: Path
    overwrite: bool
    check: Callable[[], None]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a new folder that replaces the path when the block succeeds, and is removed if it fails."""
        with self.scratch() as temporary:
            yield temporary
            self.publish(temporary)

    def publish(self, folder: Path) -> None:
        """Have `folder`, which is in a scratch folder or is one, take the path. It is synced to the disk first.

        A reader finds the old folder or the new one, never none, if the file system can swap names: see `leftovers`.
        """
        folder.chmod(_mode_for(self.path))
        sync_tree(folder)
        self._put_folder(folder)

    @contextmanager
    def file(self) -> Iterator[BinaryIO]:
        """Yield a new file that replaces the path when the block succeeds, and is removed if it fails."""
        temporary = temporary_name(self.path, PARTIAL)
        with explaining_write_errors(self.path, temporary):
            try:
                with temporary.open("xb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                self._put_file(temporary)
            finally:
                discard(temporary)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a temporary folder beside the path, which is removed afterwards."""
        temporary = temporary_name(self.path, PARTIAL)
        with explaining_write_errors(self.path, temporary):
            try:
                temporary.mkdir(0o700)
                yield temporary
            finally:
                discard(temporary)

    def _put_folder(self, source: Path) -> None:
        for _ in range(_MOST_TRIES):
            self.check()
            if not holds_something(self.path):
                try:
                    # Replaces nothing but an empty folder.
                    source.rename(self.path)
                    break
                except OSError:
                    if not holds_something(self.path):
                        raise
            elif not self.overwrite:
                raise _appeared(self.path)
            elif self._exchange(source):
                break
        else:
            raise UsageError(f"{self.path}: comes and goes; something else than picompile writes there")
        sync_folder(self.path.parent)

    def _exchange(self, source: Path) -> bool:
        """Put `source` at the path, and the old output in its place or nowhere. Return false if there was none."""
        try:
            exchange(source, self.path)
        except FileNotFoundError:
            if os.path.lexists(self.path):
                raise
            return False
        except UnsupportedRenameError:
            self._move_aside(source)
        return True

    def _move_aside(self, source: Path) -> None:
        """Rename twice. A process that dies in between leaves an `.old`, which the next writer puts back."""
        aside = temporary_name(self.path, OLD)
        try:
            self.path.rename(aside)
            source.rename(self.path)
        except BaseException:
            if os.path.lexists(aside) and not os.path.lexists(self.path):
                aside.rename(self.path)
            raise
        discard(aside)

    def _put_file(self, source: Path) -> None:
        self.check()
        if self.overwrite:
            source.replace(self.path)
        else:
            try:
                rename_to_new(source, self.path)
            except FileExistsError as error:
                raise _appeared(self.path) from error
        sync_folder(self.path.parent)


@contextmanager
def reserve(
    path: Path,
    *,
    overwrite: bool,
    check: Callable[[], None] = lambda: None,
    wait_s: float = _SWEEPING_S,
    parents: bool = False,
) -> Iterator[OutputPath]:
    """Reserve `path` for this process inside the block, after removing leftovers of writers that died.

    Args:
        path: The output path.
        overwrite: Replace what is there.
        check: Raises `UsageError` if what is at the path must not be replaced.
        wait_s: How long to wait for another writer.
        parents: Make the folders above `path`, and remove them again if the block fails.

    Raises:
        UsageError: Another process writes there for longer than `wait_s`, or nothing can be made beside `path`.
    """
    path = path.absolute()
    with parents_of(path) if parents else nullcontext():
        lock, beside = _lock(path, wait_s)
        try:
            if lock.real and beside:
                sweep(path)
            check()
            yield OutputPath(path, overwrite, check)
        finally:
            lock.release()


@contextmanager
def writing_file(path: Path, *, overwrite: bool, check: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Yield a file that appears at `path` whole or not at all, after waiting for other writers. Links stay links."""
    resolved = path.resolve()
    with reserve(resolved, overwrite=overwrite, check=check, wait_s=_SHORT_WAIT_S) as place, place.file() as file:
        yield file


def _lock(path: Path, wait_s: float) -> tuple[Lock, bool]:
    """Return the lock, and whether other files can be made beside `path` too."""
    try:
        return acquire(path, wait_s), True
    except OSError as error:
        if error.errno not in _NOT_BESIDE or not path.is_dir() or path.is_symlink():
            raise _cannot_write(path, error) from error
    # To fill an existing folder, a lock on the folder itself is enough.
    return acquire_folder(path), False


def _cannot_write(path: Path, error: OSError) -> Exception:
    if is_full(error):
        return DoesNotFitError(f"{path.parent}: {error.strerror}; {path} was not written")
    return UsageError(f"{path} cannot be written: {path.parent}: {error.strerror}")


def _appeared(path: Path) -> UsageError:
    return UsageError(f"{path}: exists; it appeared while it was to be written")


def _mode_for(path: Path) -> int:
    """Return the mode of a new folder at `path`: that of the folder it replaces, or the umask's default."""
    with suppress(OSError):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return stat.S_IMODE(status.st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask
