"""Cases of a pack's kernels on the stand-in for the driver, whose kernels are translated PTX."""

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.kernels.emulator import Emulated
from helpers.ptx.syntax import parse
from helpers.ptx.translate import source_of
from helpers.support import ROOT
from picompile_runtime.devices.cuda import CudaImages, driver
from picompile_runtime.errors import PicompileRuntimeError

sys.path.insert(0, str(ROOT / "benchmarks"))

from _gpu_kernels import run_case


@dataclass(frozen=True)
class CaseResult:
    """`error` is the largest of all orders and shares, and `faults` say what was wrong in which order."""

    label: str
    error: float
    faults: tuple[str, ...]
    seconds: float


def emulate_ptx(ptx: str, path: Path) -> Path:
    """Compile the kernels of a module to the library `path`, which the stand-in takes its kernels from."""
    return Emulated(source_of(parse(ptx)), path).path


def run_in_orders(images: CudaImages, case: Mapping[str, Any], orders: Sequence[int]) -> CaseResult:
    """Run a case in each order of threads, and compare with eager PyTorch in float64."""
    faults, errors, begin = [], [0.0], time.monotonic()
    for order in orders:
        with _variable("FAKE_CUDA_ORDER", str(order)):
            for fault, error in _rows(images, case):
                errors.append(error)
                faults += [f"order {order}: {fault}"] if fault else []
    return CaseResult(case["label"], max(errors), tuple(faults), time.monotonic() - begin)


def _rows(images: CudaImages, case: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what was wrong, or nothing, and the error for each share of firing neurons."""
    try:
        for row in run_case(images, case, "cpu"):
            outside = f", written outside: {', '.join(row['written_outside'])}" if row["written_outside"] else ""
            yield "" if row["is_right"] else f"error {row['error']:.1e}{outside}", row["error"]
    except PicompileRuntimeError as error:
        library = ctypes.CDLL(driver.LIBRARY)
        library.fake_kernel_error.restype = ctypes.c_char_p
        yield library.fake_kernel_error().decode() or str(error), 0.0
        library.fake_reset()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, which the stand-in reads."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
