"""The parent's side of the guarded process: start it, wait for it for a limited time, and report its failure."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picompile.errors import DoesNotFitError, UsageError
from picompile.predictors.powerinfer.sources import PredictorSource

TENSORS_FILE, REFUSAL_FILE = "tensors.safetensors", "refusal.txt"

# Exit codes of the process. A full disk has a code of its own, because then the reason cannot be written to a file.
REFUSED, DISK_FULL = 1, 5

_MEMORY_BYTES = 256 << 20
# Slow machines and slow disks included.
_WALL_S, _BYTES_PER_S = 70.0, 2.5e6
# Bytes per element of the copies of one tensor at a time: float64, float32, float16, and those of the library.
_COPIES_BYTES = 32
_LONGEST_REFUSAL = 400


@dataclass(frozen=True)
class GuardLimits:
    """Limits of the guarded process beyond what it needs to start; `of` derives them from the size of the files."""

    memory_bytes: int
    wall_s: float

    @classmethod
    def of(cls, source: PredictorSource) -> "GuardLimits":
        """Return the limits for `source`."""
        sizes = [file.stat().st_size for file in (*source.files.values(), *source.activations.values())]
        # The files are mapped, and all tensors are held in f16.
        memory_bytes = _MEMORY_BYTES + 2 * sum(sizes) + 2 * _COPIES_BYTES * max(sizes, default=0)
        return cls(memory_bytes, _WALL_S + sum(sizes) / _BYTES_PER_S)


def read_guarded(source: PredictorSource, folder: Path, limits: GuardLimits | None = None) -> Path:
    """Read the pickled files of `source` in another process, and return the safetensors file that it left in `folder`.

    The file has `layers.N.fc1` [r, D] and `layers.N.fc2` [F, r] as f16, and `layers.N.counts` int64 [F] for layers with
    activation statistics. Raises `UsageError`, in one line, for files that the process refuses or breaks on, and
    `DoesNotFitError` for a full disk.
    """
    limits = limits or GuardLimits.of(source)
    request = json.dumps(_request(source, folder, limits))
    with (folder / "stderr.txt").open("wb") as stderr:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "picompile.predictors.powerinfer.child"],
                input=request.encode(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=_environment(),
                cwd=folder,
                timeout=limits.wall_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"{source.path}: reading it took more than {limits.wall_s:.0f} s; refused") from error
    if done.returncode == 0:
        return folder / TENSORS_FILE
    raise _failure(source.path, folder, done.returncode)


def _request(source: PredictorSource, folder: Path, limits: GuardLimits) -> dict[str, Any]:
    return {
        "parent": os.getpid(),
        "output": str(folder.absolute()),
        "memory_bytes": limits.memory_bytes,
        "files": {str(layer): str(file.absolute()) for layer, file in source.files.items()},
        "activations": {str(layer): str(file.absolute()) for layer, file in source.activations.items()},
    }


def _environment() -> dict[str, str]:
    """Return an environment with the paths of libraries and one thread, and nothing else of this process."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _failure(path: Path, folder: Path, code: int) -> UsageError | DoesNotFitError:
    if code == DISK_FULL:
        return DoesNotFitError(f"{folder.parent}: no space left on the disk for the predictors in {path}")
    if code == REFUSED:
        with contextlib.suppress(OSError):
            return UsageError(f"{path}: {_printable((folder / REFUSAL_FILE).read_text('utf-8', 'replace'))}")
    last = (folder / "stderr.txt").read_bytes()[-_LONGEST_REFUSAL:].decode(errors="replace").strip().splitlines()
    said = f": {_printable(last[-1])}" if last else ""
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return UsageError(f"{path}: the process that read it {ended}{said}; refused")


def _printable(text: str) -> str:
    line = " ".join(text.split())[:_LONGEST_REFUSAL]
    return "".join(character if character.isprintable() else "?" for character in line)
