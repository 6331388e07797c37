"""A path that this process alone writes to, until it is done with it."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from picompile.errors import DoesNotFitError, UsageError
from picompile.output.checks import holds_something
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

# Whoever only sweeps a folder holds locks in it for so short a time that it is no writer.
_SWEEPING_S = 2.0
# For what takes no longer than to be written.
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
        """A new folder that takes the path when the block ends well, and is removed when it does not.

        A reader finds what was there before or the new one, where the file system can exchange names: see `rename`.
        """
        with self.scratch() as temporary:
            yield temporary
            temporary.chmod(_mode_for(self.path))
            sync_tree(temporary)
            self._put_folder(temporary)

    @contextmanager
    def file(self) -> Iterator[BinaryIO]:
        """A new file that takes the path when the block ends well, and is removed when it does not."""
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
        """A folder beside the path, for work on what will be there; removed in the end."""
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
        """Gives `source` the path, and what was there the name of `source`, or none; false where nothing was there."""
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
        """Two renamings. Whoever dies between them leaves an `.old`, which the next writer puts back."""
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
    """Has this process alone write to `path` inside the block; leftovers of writers that died are removed first.

    `parents` has the folders above it made, and removed again if the block fails.

    Raises `UsageError` where another process writes there for longer than `wait_s`, or where `check` does, and where
    nothing can be made beside `path`.
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
def replacing(path: Path) -> Iterator[Path]:
    """A folder that takes `path`, whatever is there; it waits for another writer. For what is made in no time."""
    with reserve(path, overwrite=True, wait_s=_SHORT_WAIT_S) as place, place.folder() as folder:
        yield folder


@contextmanager
def writing_file(path: Path, *, overwrite: bool, check: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """A file at `path`, where a link goes on pointing at it: whole or not at all. It waits for another writer."""
    resolved = path.resolve()
    with reserve(resolved, overwrite=overwrite, check=check, wait_s=_SHORT_WAIT_S) as place, place.file() as file:
        yield file


def _lock(path: Path, wait_s: float) -> tuple[Lock, bool]:
    """The lock, and whether other things can be made beside `path` too."""
    try:
        return acquire(path, wait_s), True
    except OSError as error:
        if error.errno not in _NOT_BESIDE or not path.is_dir() or path.is_symlink():
            raise _cannot_write(path, error) from error
    # Whoever fills a folder that is there needs no more.
    return acquire_folder(path), False


def _cannot_write(path: Path, error: OSError) -> Exception:
    if is_full(error):
        return DoesNotFitError(f"{path.parent}: {error.strerror}; {path} was not written")
    return UsageError(f"{path} cannot be written: {path.parent}: {error.strerror}")


def _appeared(path: Path) -> UsageError:
    return UsageError(f"{path}: exists; it appeared while it was to be written")


def _mode_for(path: Path) -> int:
    """The mode of a new folder at `path`: of the one that it replaces, or what the umask leaves."""
    with suppress(OSError):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return stat.S_IMODE(status.st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask
