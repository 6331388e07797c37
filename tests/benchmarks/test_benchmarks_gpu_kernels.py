"""The kernels of benchmarks/gpu.py, on the stand-in for the GPU: whether they are right, and nothing about speed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gpu_packs import BENCHMARKS, fake_cuda, fake_library, gpu_pack, kernels

sys.path.insert(0, str(BENCHMARKS))

import _gpu_kernels
from _gpu_kernels import Timing, copy_bandwidth, images_of, run_case
from _gpu_memory import Arguments

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]

TIMING = Timing(2**15, 2**24, 0.0, 0.01, 1, 3)


@pytest.mark.slow("runs kernels of a pack in the emulation")
def test_a_wrong_kernel_is_found(gpu_pack: Path, kernels: dict[str, dict[str, Any]]) -> None:
    """As if it had been compiled with other parameters."""
    images, case = images_of(gpu_pack, "small"), kernels["norm"]
    other = case | {"parameters": case["parameters"] | {"eps": 1e-3}}
    ((right,), (wrong,)) = (list(run_case(images, each, "cpu", TIMING)) for each in (case, other))
    assert right["is_right"] and not wrong["is_right"] and "seconds" not in wrong


@pytest.mark.parametrize(("value", "is_right"), [(1.0, True), (1.0 + 5e-4, True), (1.0 + 2e-3, False), (np.nan, False)])
def test_wrong_values_exceed_the_error_limit(value: float, is_right: bool) -> None:
    found = np.full((3, 4), -1, np.int32).view(np.float32)
    found[:2] = 1
    found[1, 3] = value
    assert (_gpu_kernels._error(found, np.ones((2, 4))) <= _gpu_kernels.LIMIT) == is_right
    assert not _gpu_kernels._is_stray(found, np.ones((2, 4)))
    found[2, 0] = 0
    assert _gpu_kernels._is_stray(found, np.ones((2, 4)))


@pytest.mark.parametrize(
    ("dtype", "change", "is_right"),
    [(np.int8, 0, True), (np.int8, 1, True), (np.int8, -2, False), (np.uint8, 1, False), (np.int64, 1, False)],
)
def test_errors_of_integers(dtype: Any, change: int, is_right: bool) -> None:
    expected = np.arange(100, dtype=dtype)
    found = expected.copy()
    found[50] += change
    assert (_gpu_kernels._error(found, expected) <= _gpu_kernels.LIMIT) == is_right


@pytest.mark.slow("runs kernels of a pack in the emulation")
def test_a_measured_row_has_bytes_and_seconds(gpu_pack: Path, kernels: dict[str, dict[str, Any]]) -> None:
    """All that happens around a time; the time itself says nothing here."""
    images = images_of(gpu_pack, "small")
    (row,) = run_case(images, kernels["ffn"], "cpu", TIMING)
    # 30 % of 77 neurons, three rows of 40 float16 in 128 bytes, and the mask.
    assert row["is_right"] and row["moved_bytes"] == 23 * 3 * 128 + 77
    assert row["seconds"] > 0 and copy_bandwidth(images, TIMING) > 0


@pytest.mark.slow("runs kernels of a pack in the emulation")
def test_weights_on_the_host(gpu_pack: Path, kernels: dict[str, dict[str, Any]]) -> None:
    rows = list(run_case(images_of(gpu_pack, "speed"), kernels["timed linear"], "cpu", TIMING))
    assert [row.get("weights") for row in rows] == [None, "host"]
    assert all(row["is_right"] and row["seconds"] > 0 for row in rows)


@pytest.mark.slow("runs kernels of a pack in the emulation")
def test_weights_on_the_host_are_read(
    gpu_pack: Path, kernels: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that is not where the kernel shall read it shows."""
    write = Arguments._write

    def elsewhere(self: Arguments, place: Any, value: Any, copy: int) -> None:
        write(self, place, value * (place.host is None), copy)

    monkeypatch.setattr(Arguments, "_write", elsewhere)
    images = images_of(gpu_pack, "speed")
    on_gpu, on_host = run_case(images, kernels["timed linear"], "cpu")
    assert on_gpu["is_right"] and not on_host["is_right"]
