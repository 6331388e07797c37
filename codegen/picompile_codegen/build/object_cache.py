"""Folders for temporary files, and the cache of compiled kernels in the user's cache folder.

A temporary folder is locked as long as its process lives. If a process is killed, the operating system frees the lock,
and the next process that makes a folder removes the old one. A process checks, once it has the lock, that its folder
was not removed in between.

A kernel takes up to seconds to compile, and models share most kernels: those of the same sizes, whatever the weights,
the predictor or the plan. The key of an object is the hash of everything that determines it: the kernel as TVM gets it,
the instruction set, the pipeline, and the versions of TVM and LLVM. The compiler keeps structures here too: what
a compilation makes that does not depend on the values of weights. PICOMPILE_CACHE names another folder, or is `off`.

An entry is a file: a mark, the sha256 of its key and its content, the content. An entry that is empty, truncated,
changed, of another key or of an older version counts as missing: it is made again and replaced. In an artifact, it
would be wrong code that nothing would notice.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from picompile_codegen.errors import TemporaryFolderError

_PREFIX = "picompile-work-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder for this user alone, under TMPDIR or the system's default, and remove it in the end.

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
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process has swept it, since nobody held its lock yet
            continue
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
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
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
    """Return whether `handle` is still a handle of `folder`."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


# The cache holds compiled kernels, and their CUDA source and images.


VARIABLE = "PICOMPILE_CACHE"
# Beyond this, objects that were not used for the longest time are deleted.
_MOST_BYTES = 256 * 2**20

_MARK = b"picompile object 1\n"
_DIGEST_BYTES = 32
# Older versions have `.o` files and would link an entry as it is, so the suffix is another.
_SUFFIX = ".object"
# The folder may hold other things: somebody named it. What versions before left unfinished has tempfile's names.
_ENTRY = re.compile(r"[0-9a-f]{64}\.(o|object)")
_UNFINISHED = re.compile(r"([0-9a-f]{64}\.[0-9a-f]{16}|tmp[a-z0-9_]{8})\.unfinished")


def cache_folder() -> Path | None:
    """Return the folder of the cache; None if objects are not to be kept."""
    if (named := os.environ.get(VARIABLE)) == "off":
        return None
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "picompile" / "objects"


def object_key(*parts: str) -> str:
    """Return the key of an object: a hash of everything that determines it."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cached_text(key: str, make: Callable[[], str]) -> str:
    """Return the text with this key from the cache; `make` makes it where it is missing."""
    return cached_object(key, lambda: make().encode()).decode()


def cached_object(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the object with this key from the cache; `make` makes it where it is missing.

    A cache that cannot be read or written is done without.
    """
    content = find_object(key)
    if content is None:
        content = make()
        keep_object(key, content)
    return content


def find_object(key: str) -> bytes | None:
    """Return the object with this key from the cache; None where it is missing or damaged, or cannot be read."""
    folder = cache_folder()
    if folder is None:
        return None
    kept = folder / f"{key}{_SUFFIX}"
    with suppress(OSError):
        content = _content(key, kept.read_bytes())
        if content is not None:
            with suppress(OSError):
                os.utime(kept)
        return content
    return None


def keep_object(key: str, content: bytes) -> None:
    """Put an object into the cache, if there is one that can be written."""
    folder = cache_folder()
    if folder is not None:
        with suppress(OSError):
            _keep(key, content, folder / f"{key}{_SUFFIX}")


def _content(key: str, entry: bytes) -> bytes | None:
    """Return the content of an entry; None where it is damaged or of another key."""
    start = len(_MARK) + _DIGEST_BYTES
    content = entry[start:]
    return content if entry[:start] == _MARK + _digest(key, content) else None


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _keep(key: str, content: bytes, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_name(f"{key}.{secrets.token_hex(8)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            # So that nobody takes it for one that a process left when it died.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(_MARK + _digest(key, content) + content)
            file.flush()
            # A name must not outlive a loss of power without its content.
            os.fsync(file.fileno())
            unfinished.replace(kept)
    finally:
        unfinished.unlink(missing_ok=True)
    _tidy(kept.parent)


def _tidy(folder: Path) -> None:
    """Delete the least recently used entries until the rest is small enough; other processes may do so, too."""
    found = []
    for path in _files(folder, _ENTRY):
        with suppress(OSError):
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= _MOST_BYTES:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
            total -= size
    for path in _files(folder, _UNFINISHED):
        with suppress(OSError):
            _remove_if_unused(path)


def _files(folder: Path, names: re.Pattern[str]) -> Iterator[Path]:
    return (folder / name for name in os.listdir(folder) if names.fullmatch(name))


def _remove_if_unused(path: Path) -> None:
    """Remove the file, unless a live process is writing it: then raise `BlockingIOError`."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
