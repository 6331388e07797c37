"""Remembers facts, such as that a large file was found whole, in the user's cache folder.

Each is an empty file whose name is a hash of the facts. For a file that was found whole, the facts are its path,
identity, size and times and the hash of the manifest that lists it; changing the file changes one of these.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "picompile" / "verified"


def is_remembered(*facts: object) -> bool:
    """Return whether `remember` was called with these facts, which are compared as texts."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return _stamp(facts).is_file()
    return False


def remember(*facts: object) -> None:
    """Remember the facts. If the cache cannot be written, nothing happens: a check is then repeated."""
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        _stamp(facts).touch()


def is_verified(path: Path, descriptor: int, manifest_sha256: str) -> bool:
    """Return whether the open file was found whole before, and has not changed since."""
    return is_remembered(*_facts(path, descriptor, manifest_sha256))


def mark_verified(path: Path, descriptor: int, manifest_sha256: str) -> None:
    """Remember that the open file is whole."""
    remember(*_facts(path, descriptor, manifest_sha256))


def _facts(path: Path, descriptor: int, manifest_sha256: str) -> tuple[object, ...]:
    status = os.fstat(descriptor)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (path.absolute(), status.st_dev, status.st_ino, status.st_size, *times, manifest_sha256)


def _stamp(facts: tuple[object, ...]) -> Path:
    text = "\0".join(map(str, facts))
    return _folder() / hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
