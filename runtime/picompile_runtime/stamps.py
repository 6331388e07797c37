"""Which large files were found whole before, so that their hash need not be computed again each time they are opened.

A stamp is an empty file in the user's cache folder. Its name is a hash of the file's path, identity, size and times and
of the manifest that vouches for it; whoever changes the file changes one of these.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "picompile" / "verified"


def _key(path: Path, descriptor: int, manifest_sha256: str) -> str:
    status = os.fstat(descriptor)
    facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, manifest_sha256)
    text = "\0".join([str(path.absolute()), *map(str, facts)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def is_stamped(path: Path, descriptor: int, manifest_sha256: str) -> bool:
    """Whether the open file was found whole before, and has not changed since."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return (_folder() / _key(path, descriptor, manifest_sha256)).is_file()
    return False


def stamp(path: Path, descriptor: int, manifest_sha256: str) -> None:
    """Remember that the open file is whole. A cache that cannot be written only costs time."""
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / _key(path, descriptor, manifest_sha256)).touch()
