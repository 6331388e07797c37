"""Stamps: empty files in the user's cache folder, each for something that was found once.

A stamp's name is a hash of facts. Those of a large file that was found whole are its path, identity, size and times and
the manifest that vouches for it; whoever changes the file changes one of these.
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
    """Whether `remember` was called with these facts, whose texts count."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return _stamp(facts).is_file()
    return False


def remember(*facts: object) -> None:
    """Remember the facts. A cache that cannot be written only costs time."""
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        _stamp(facts).touch()


def is_verified(path: Path, descriptor: int, manifest_sha256: str) -> bool:
    """Whether the open file was found whole before, and has not changed since."""
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
