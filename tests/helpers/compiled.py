"""Files that compilers made, kept by all that they were made from: a run compiles nothing twice."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

# The folder that test processes share; tests/conftest.py sets it. Without it nothing is kept.
FOLDER_VARIABLE = "PICOMPILE_TEST_COMPILED"


def compile_once(output: Path, parts: Iterable[str | Path], compile: Callable[[Path], None]) -> None:
    """Write `output`: a copy of what `compile(path)` wrote for the same `parts` before, else what it writes now.

    Args:
        output: A copy each time, never a link: a library that is loaded from two paths must be two libraries.
        parts: Everything that decides what is written: texts, and files or folders of sources, which are read.
        compile: Writes the file at the path that it is given, which has the name of `output`.
    """
    shared = os.environ.get(FOLDER_VARIABLE)
    if shared is None:
        compile(output)
        return
    kept = Path(shared) / _key((*parts, output.name))
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / "done").exists():
            compile(kept / output.name)
            (kept / "done").touch()
    shutil.copyfile(kept / output.name, output)


def _key(parts: Iterable[str | Path]) -> str:
    found = hashlib.sha256()
    for part in parts:
        for piece in [part.encode()] if isinstance(part, str) else _contents(part):
            found.update(len(piece).to_bytes(8, "little") + piece)
    return found.hexdigest()


def _contents(path: Path) -> list[bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [piece for file in files for piece in (file.name.encode(), file.read_bytes())]
