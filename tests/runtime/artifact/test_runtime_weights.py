"""Weights that are copied to memory when they are loaded, as far as there is memory."""

import mmap

import numpy as np
import pytest

from picompile_runtime import DoesNotFitError
from picompile_runtime.artifact import weights
from picompile_runtime.artifact.weights import load_tensors
from picompile_runtime.devices.memory import Tensor

BYTES = 2**20
# 64 bytes for each page of 4 KiB.
PINNING_BYTES = 2**14


def test_memory_that_pinning_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, tensors = mmap.mmap(-1, BYTES), {"a": Tensor("uint8", (BYTES,))}
    mapped[:4] = b"abcd"
    monkeypatch.setattr(weights, "_free_bytes", lambda: BYTES + PINNING_BYTES - 1)
    assert load_tensors(mapped, tensors, 1, 0)[0] is mapped
    with pytest.raises(
        DoesNotFitError, match=r"take 1.015625 MiB of memory when they are pinned, and 1.015624 MiB are"
    ):
        load_tensors(mapped, tensors, 1, 0, must_copy=True)
    monkeypatch.setattr(weights, "_free_bytes", lambda: BYTES + PINNING_BYTES)
    memory, places = load_tensors(mapped, tensors, 1, 0, must_copy=True)
    assert bytes(np.frombuffer(memory, np.uint8)[places["a"] :][:4]) == b"abcd"
