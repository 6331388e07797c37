"""Cases of a pack's kernels on the stand-in for the driver, whose kernels are translated PTX."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.kernels import run_case
from helpers.kernels.emulator import Emulated
from helpers.ptx.syntax import parse
from helpers.ptx.translate import source_of
from picompile_runtime.devices.cuda import CudaImages, driver
from picompile_runtime.errors import PicompileRuntimeError


def emulate_ptx(ptx: str, path: Path) -> Path:
    """Compile the kernels of a module to the library `path`, which the stand-in takes its kernels from."""
    return Emulated(source_of(parse(ptx)), path).path


def faults_in_orders(images: CudaImages, case: Mapping[str, Any], orders: Sequence[int]) -> list[str]:
    """Run a case in each order of threads, and return where it differs from eager PyTorch in float64."""
    found = []
    for order in orders:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAKE_CUDA_ORDER", str(order))
            found += [f"order {order}: {fault}" for fault in _faults(images, case)]
    return found


def _faults(images: CudaImages, case: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was wrong with each share of firing neurons."""
    try:
        for row in run_case(images, case, "cpu"):
            if row["written_outside"] or not row["is_right"]:
                yield f"error {row['error']:.1e}, written outside: {', '.join(row['written_outside']) or 'nothing'}"
    except PicompileRuntimeError as error:
        library = ctypes.CDLL(driver.LIBRARY)
        library.fake_kernel_error.restype = ctypes.c_char_p
        yield library.fake_kernel_error().decode() or str(error)
        library.fake_reset()
