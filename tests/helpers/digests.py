"""The content of folders, to compare them byte for byte."""

import hashlib
from pathlib import Path


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file in a folder, by its path there."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
