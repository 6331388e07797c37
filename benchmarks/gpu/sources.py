"""Identifies what a pack was made from: `benchmarks.gpu` runs a pack only beside the sources that packed it."""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ROOT

# The version of the files of packs and results.
SCHEMA = 4
_FOLDERS = ("picompile", "passes", "codegen", "runtime", "benchmarks/gpu")
_SHARED = ("benchmarks/__init__.py", "benchmarks/outputs.py", "benchmarks/peers/gguf.py")
_SUFFIXES = frozenset({".py", ".c", ".h", ".cuh"})


def sources_digest() -> str:
    """Return the SHA-256 of the names and contents of all sources that packs and their runs depend on."""
    digest = hashlib.sha256()
    for path in sorted(_files()):
        for part in (path.relative_to(ROOT).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _files() -> Iterator[Path]:
    for name in _FOLDERS:
        yield from (path for path in (ROOT / name).rglob("*") if path.suffix in _SUFFIXES)
    yield from (ROOT / name for name in _SHARED)


def commit() -> str:
    """Return the commit that is checked out, `unknown` without git; `+` says that files were changed since."""
    described = _git("describe", "--always", "--abbrev=12", "--exclude=*")
    return described + ("+" if described != "unknown" and _git("status", "--porcelain", "-uno") else "")


def tracked_bytes() -> int:
    """Return the bytes of all files that git tracks, as they are in the folder."""
    names = _git("ls-files", "-z").split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file())


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
