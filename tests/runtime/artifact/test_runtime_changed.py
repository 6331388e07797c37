"""Weights that change under an engine: what was copied cannot, and what is mapped is found out with the next prompt."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.products import sampled
from helpers.toys.toy_artifact import make_toy, reference_logits, write_artifact
from helpers.toys.toy_two_sides import build_hybrid_library, write_hybrid
from picompile_runtime import ArtifactError, DoesNotFitError, load
from picompile_runtime.artifact import weights
from picompile_runtime.artifact.weights import load_tensors
from picompile_runtime.devices.memory import Tensor

TOY = make_toy()
IDS = list(range(9))


def overwrite(folder: Path) -> None:
    with (folder / "weights.safetensors").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(range(256)) * 16)
    status = os.stat(folder / "weights.safetensors")
    os.utime(folder / "weights.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # clocks can be coarse


def test_overwritten_mapped_weights_raise(make_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICOMPILE_MMAP", "1")
    folder = make_artifact(toy=TOY)
    engine = load(folder)
    engine.prefill(IDS)
    scores = engine.score(IDS)
    overwrite(folder)
    for use in (lambda: engine.prefill(IDS), lambda: engine.read(IDS), lambda: next(scores)):
        with pytest.raises(ArtifactError, match=r"weights.safetensors: was changed while it is in use; load .* again"):
            use()
    assert engine.position == 9
    with pytest.raises(ArtifactError, match="was changed"):
        load(folder)


def test_copied_weights_do_not_change(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(toy=TOY)
    with load(folder) as engine:
        overwrite(folder)
        np.testing.assert_allclose(engine.prefill(IDS), reference_logits(TOY, IDS)[-1], rtol=1e-4, atol=1e-4)
        with pytest.raises(ArtifactError, match="was changed"):
            load(folder)  # what has other bytes shares no memory with what had the right ones


def test_weights_that_change_while_they_are_loaded_raise(
    make_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from picompile_runtime.engine import executor

    folder, load_weights = make_artifact(toy=TOY), executor.load_weights

    def change_and_load(*arguments: object) -> object:
        overwrite(folder)
        return load_weights(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "load_weights", change_and_load)
    with pytest.raises(ArtifactError, match="was changed while it is in use"):
        load(folder)


WRITE = """
import ctypes, sys
import numpy as np
from picompile_runtime import load
engine = load(sys.argv[1], threads=2)
executor = engine._executor
calls = executor._host_calls if sys.argv[2] == "host" else executor._accelerator_calls
arrays = [kept for kept in calls["decode"]._keep[0]._keep if isinstance(kept, np.ndarray)]
weights = [array for array in arrays if not array.flags.writeable]
assert 0 < len(weights) < len(arrays)
engine.decode(1)
for array in arrays:
    if array.flags.writeable:
        ctypes.memset(array.ctypes.data, 0, 4)
print("writes", flush=True)
ctypes.memset(weights[-1].ctypes.data, 1, 4)
print("written")
"""


@sampled(
    side=[("host", "host"), ("hybrid", "host"), ("hybrid", "accelerator")], mapped="01", slow="loads in new processes"
)
def test_a_write_to_a_weight_ends_the_process(
    side: tuple[str, str], mapped: str, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines of a process share it."""
    monkeypatch.setenv("PICOMPILE_MMAP", mapped)
    kind, device = side
    if kind == "host":
        folder = write_artifact(tmp_path / kind, library, TOY)
    else:
        folder = write_hybrid(tmp_path / kind, build_hybrid_library(tmp_path / "host.so"), TOY)
    run = subprocess.run([sys.executable, "-c", WRITE, str(folder), device], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (-signal.SIGSEGV, "writes\n"), run.stderr


def test_memory_that_pinning_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are copied as far as there is memory. Pinning takes 64 bytes for each page of 4 KiB."""
    size_bytes, pinning_bytes = 2**20, 2**14
    mapped, tensors = mmap.mmap(-1, size_bytes), {"a": Tensor("uint8", (size_bytes,))}
    mapped[:4] = b"abcd"
    monkeypatch.setattr(weights, "_free_bytes", lambda: size_bytes + pinning_bytes - 1)
    assert load_tensors(mapped, tensors, 1, 0)[0] is mapped
    says = r"take 1.015625 MiB of memory when they are pinned, and 1.015624 MiB are"
    with pytest.raises(DoesNotFitError, match=says):
        load_tensors(mapped, tensors, 1, 0, must_copy=True)
    monkeypatch.setattr(weights, "_free_bytes", lambda: size_bytes + pinning_bytes)
    memory, places = load_tensors(mapped, tensors, 1, 0, must_copy=True)
    assert bytes(np.frombuffer(memory, np.uint8)[places["a"] :][:4]) == b"abcd"
