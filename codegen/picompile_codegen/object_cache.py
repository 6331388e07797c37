"""Objects of kernels that were compiled before, and their CUDA source, in the user's cache folder.

A kernel takes up to seconds to compile, and models have most of theirs in common: those of the same sizes, whatever the
weights, the predictor or the plan. The key is the hash of all that makes the object: the kernel as TVM gets it, the
instruction set, the pipeline, and the versions of TVM and LLVM. PICOMPILE_CACHE names another folder, or is `off`.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

VARIABLE = "PICOMPILE_CACHE"
# Beyond this, objects that were not used for the longest time are deleted.
_MOST_BYTES = 256 * 2**20


def cache_folder() -> Path | None:
    """Where objects are kept; None if they are not to be."""
    if (named := os.environ.get(VARIABLE)) == "off":
        return None
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "picompile" / "objects"


def object_key(*parts: str) -> str:
    """The hash of what makes an object."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cached_text(key: str, make: Callable[[], str]) -> str:
    """The text with this key: the one of the cache, or what `make` returns."""
    with tempfile.TemporaryDirectory(prefix="picompile-text-") as folder:
        path = Path(folder) / "text"
        cached_object(key, path, lambda output: output.write_text(make(), encoding="utf-8"))
        return path.read_text(encoding="utf-8")


def cached_object(key: str, output: Path, compile_to: Callable[[Path], object]) -> None:
    """Writes the object with this key to `output`: the one of the cache, or what `compile_to` writes there.

    A cache that cannot be read or written is done without.
    """
    folder = cache_folder()
    if folder is None:
        compile_to(output)
        return
    kept = folder / f"{key}.o"
    try:
        shutil.copyfile(kept, output)
        with suppress(OSError):
            os.utime(kept)
    except OSError:
        compile_to(output)
        with suppress(OSError):
            _keep(output, kept)


def _keep(output: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".unfinished", delete=False) as file:
        unfinished = Path(file.name)
    try:
        shutil.copyfile(output, unfinished)
        unfinished.replace(kept)
    finally:
        unfinished.unlink(missing_ok=True)
    _prune(kept.parent)


def _prune(folder: Path) -> None:
    """Deletes what was used longest ago until the rest is small enough; others may do so at the same time."""
    found = []
    for path in folder.glob("*.o"):
        with suppress(OSError):
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= _MOST_BYTES:
            return
        with suppress(OSError):
            path.unlink()
        total -= size
