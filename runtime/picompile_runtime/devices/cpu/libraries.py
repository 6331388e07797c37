"""The shared libraries of artifacts in this process: each is loaded once, and unloaded after its last user.

If dlopen has seen a name before, it returns the library that it loaded then, even when another file has that path now.
So each library is opened through a descriptor that stays open with it: `/proc/self/fd/N` then never names two
libraries, and no other file can get its inode number.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path

from picompile_runtime.errors import ArtifactError


class SharedLibrary:
    """A loaded library. Whoever runs its code holds `turn`; `users` counts those that have not given it back yet."""

    def __init__(self, descriptor: int, key: tuple[int, int], sha256: str) -> None:
        self.code = ctypes.CDLL(_name(descriptor))
        self.turn = threading.RLock()
        self.descriptor, self.key, self.sha256 = descriptor, key, sha256
        self.users = 0


class _LoadedLibraries:
    """All loaded libraries, by device number and inode.

    Engines are garbage-collected anywhere, even by a thread that is just loading a library. So libraries that they give
    back are kept in `returned` until the holder of the lock is done.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loaded: dict[tuple[int, int], SharedLibrary] = {}
        self.returned: list[SharedLibrary] = []
        self.is_loading = False


_table = _LoadedLibraries()


def acquire(path: Path, sha256: str = "") -> SharedLibrary:
    """Return the library at `path`, and load it if it is not loaded yet. Call `give_back` afterwards.

    Args:
        path: the file.
        sha256: its hash, if known.

    Raises:
        ArtifactError: the file was loaded before with other content. It was overwritten in place, and the mapped code
            is neither the old one nor the new one.
        OSError: the file cannot be opened or loaded.
    """
    try:
        with _table.lock:
            _table.is_loading = True
            try:
                library = _load(path, sha256)
                library.users += 1
                return library
            finally:
                _table.is_loading = False
    finally:
        _unload_returned()


def give_back(library: SharedLibrary) -> None:
    """Unload the library unless it has other users."""
    _table.returned.append(library)
    _unload_returned()


def _load(path: Path, sha256: str) -> SharedLibrary:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        if (known := _table.loaded.get(key)) is None:
            library = _table.loaded[key] = SharedLibrary(descriptor, key, sha256)
            return library
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    if known.sha256 != sha256:
        raise ArtifactError(
            "the file was overwritten while an engine uses it; close the engines of the artifact that was there before"
        )
    return known


def _unload_returned() -> None:
    with _table.lock:
        while _table.returned and not _table.is_loading:
            library = _table.returned.pop()
            library.users -= 1
            if library.users == 0:
                _unload(library)


def _unload(library: SharedLibrary) -> None:
    """End the library's threads, which wait in its code, and unmap it. Older libraries cannot do that, and stay."""
    stop = getattr(library.code, "pi_stop", None)
    if stop is None:
        return
    stop()
    del _table.loaded[library.key]
    _ctypes.dlclose(library.code._handle)
    with suppress(OSError):  # a library that something else keeps loaded keeps its name
        ctypes.CDLL(_name(library.descriptor), mode=os.RTLD_NOLOAD)
        return
    os.close(library.descriptor)


def _name(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _after_fork_in_child() -> None:
    """Give libraries new locks: a thread that held one does not exist in the child, and would hold it for ever."""
    _table.lock.release()
    for library in _table.loaded.values():
        library.turn = threading.RLock()


# The lock is held during a fork, so that no library is half loaded in the child.
os.register_at_fork(
    before=_table.lock.acquire, after_in_parent=_table.lock.release, after_in_child=_after_fork_in_child
)
