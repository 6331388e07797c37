"""Artifacts of a pack made whole in a folder, by whichever process comes first, and kept for those that come later.

The weights of a large model take 15 to 30 s to write. So the commands have processes of their own write them while
small kernels are checked, and they stay until the second command ends. A lock on the folder says that somebody writes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.gpu import MODULE
from picompile_runtime.artifact.manifest import WEIGHTS

_LOCK, _KEY = "lock", "prepared.sha256"
# The name of a built program in its archive in a pack.
LLAMA_PROGRAM = "llama-bench"
_FOLDER, _SHARED_MEMORY = "picompile-gpu", Path("/dev/shm")
# Bytes that checks and their code take of a folder.
_LEAST_BYTES = 2**28
# Folders in the one for weights: of the small models, of the large one, and of llama.cpp.
SMALL, LARGE, LLAMA, GGUF = "small", "large", "llama", "model.gguf"


@contextmanager
def prepared(archive: Path, folder: Path, **firing: Any) -> Iterator[tuple[Path, float]]:
    """Yield a whole artifact of a pack in `folder` and the seconds that writing it took, 0 if it was there.

    `firing` are the options of `write_artifact`. What was in the folder before is removed, but for the file of weights:
    it is written over, and its memory, which a virtual machine may have got just for this, is not given back meanwhile.
    """
    # Only here: whoever waits for weights, or removes them, needs no PyTorch.
    from benchmarks.gpu.weights import write_artifact

    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / _LOCK):
        key, begin = _key(archive, firing), time.perf_counter()
        if _read(folder / _KEY) == key:
            yield folder, 0.0
            return
        _empty(folder)
        write_artifact(archive, folder, **firing)
        (folder / _KEY).write_text(key)
        yield folder, time.perf_counter() - begin


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, once no other one has it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _empty(folder: Path) -> None:
    """Remove what is in a folder, but for weights and the lock."""
    (folder / _KEY).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in (WEIGHTS, _LOCK):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _key(archive: Path, firing: Any) -> str:
    digest = hashlib.sha256(archive.read_bytes())
    digest.update(json.dumps(firing, sort_keys=True).encode())
    return digest.hexdigest()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def work_folder(given: Path | None, needed_bytes: int) -> Path:
    """Return the folder for weights, in memory if there is room; always the same one in a place."""
    places = [given] if given else [_SHARED_MEMORY, Path(tempfile.gettempdir())]
    place = next((each for each in places if has_room(each, needed_bytes)), places[-1])
    place.mkdir(parents=True, exist_ok=True)
    return place / _FOLDER


def has_room(place: Path, needed_bytes: int) -> bool:
    """Whether so many bytes are free in a folder, or in use by an earlier run, and code that lies there may run."""
    if not place.is_dir() or os.statvfs(place).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(place).free + sum(map(_size, (place / _FOLDER).rglob("*"))) > max(
        needed_bytes, _LEAST_BYTES
    )


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 for what is none, or gone meanwhile."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def enlarge(size: str) -> str | None:
    """Mount /dev/shm with another size, such as `100G`, so that code in it may run; return why that failed."""
    again = ["mount", "-o", f"remount,exec,size={size}", str(_SHARED_MEMORY)]
    anew = ["mount", "-t", "tmpfs", "-o", f"exec,size={size}", "tmpfs", str(_SHARED_MEMORY)]
    try:
        if subprocess.run(again, capture_output=True, check=False).returncode == 0:
            return None
        done = subprocess.run(anew, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"mount: {error.strerror}"
    return done.stderr.strip() or f"mount ended with {done.returncode}" if done.returncode else None


class Writer:
    """The process that prepares large files beside a run. It outlives it, so that a second command finds the files."""

    def __init__(self, options: Namespace) -> None:
        self._options, self._log = options, options.work / "writer.txt"
        self._number = options.work / "writer.pid"
        options.work.mkdir(parents=True, exist_ok=True)

    def start(self, entry: dict[str, Any], active: float, with_gguf: bool) -> None:
        """Write the weights of one variant of a model, and then a file for llama.cpp, unless they are there."""
        work = self._options.work
        made = [work / LARGE / _KEY, *([work / GGUF] if with_gguf else [])]
        if self._is_at_work() or all(path.exists() for path in made):
            return
        asked = ["--model", entry["model"], "--quant", entry["quant"], "--variant", entry["variant"]]
        folders = [str(self._options.pack), "--work", str(work.parent), "--active", str(active)]
        command = [sys.executable, "-m", MODULE, "write", *folders, *asked]
        # Whoever measures meanwhile comes first.
        variables = environment(OMP_NUM_THREADS="4", PYTHONUNBUFFERED="1")
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=variables)
        self._number.write_text(str(process.pid))

    def said(self) -> list[str]:
        """Return what it has printed so far."""
        return (_read(self._log) or "").splitlines()

    def end(self) -> None:
        """End it, if it still runs."""
        if self._is_at_work():
            with suppress(OSError):
                os.kill(int(self._number.read_text()), signal.SIGKILL)

    def _is_at_work(self) -> bool:
        """Whether the process that was noted is there, and is this one."""
        command = _read(Path("/proc", _read(self._number) or "none", "cmdline")) or ""
        return f"{MODULE}\0write" in command


def prepare_gguf(archive: Path, folder: Path) -> Path:
    """Write a file for llama.cpp unless it is there, or wait for another process that does; return its path."""
    from benchmarks.gpu.weights import write_gguf

    output = folder / GGUF
    with _locked(folder / f"{GGUF}.{_LOCK}"):
        if not output.exists():
            write_gguf(archive, output)
    return output
