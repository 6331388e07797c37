"""An artifact's code for the stand-in driver, and what tests of it share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cuda import CudaAccelerator, CudaImages, GpuLaunch
from picompile_runtime.devices.memory import Tensor

POISON = 0xAB
ELEMENTS = 37  # of the kernel axpy

CUBIN = b"\x7fELF and so on"
PTX = b"//\n.version 8.3\n.target sm_89\n"
# Small, so that a copy of some thousand bytes needs both buffers, more than once.
STAGING_BYTES = 4096

# 37 and 3 · 7 elements, no multiples of a warp.
KERNELS = {
    "axpy": (GpuLaunch("axpy", (37, 1, 1), (1, 1, 1), (0, 1, 2)),),
    "add_two": (GpuLaunch("add_one", (3, 1, 1), (7, 1, 1), (1,)), GpuLaunch("add_one", (1, 3, 1), (7, 1, 1), (1,))),
    "await": (GpuLaunch("await", (1, 1, 1), (1, 1, 1), (0, 1)),),
    "signal": (GpuLaunch("signal", (1, 1, 1), (1, 1, 1), (0,)),),
    "fail": (GpuLaunch("fail", (1, 1, 1), (32, 1, 1), ()),),
    "overrun": (GpuLaunch("overrun", (1, 1, 1), (5, 1, 1), (0,)),),
    "lost": (GpuLaunch("lost", (1, 1, 1), (32, 1, 1), ()),),
}
IMAGES = CudaImages(sm=89, ptx_sm=89, cubin=CUBIN, ptx=PTX, kernels=KERNELS)
# With `upload`, which the copy engine runs.
UPLOADS = replace(IMAGES, copies={"upload": (0, 1)})


def raw(array: Any) -> Any:
    """Its bytes, as they are copied."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def read(device: CudaAccelerator, memory: Any, offset: int, dtype: str, count: int) -> Any:
    found = np.full(count * np.dtype(dtype).itemsize, POISON, np.uint8)
    device.read(memory, offset, found)
    return found.view(dtype)


def view(memory: Any, dtype: str = "int32", count: int = 1, offset: int = 0) -> ArgumentView:
    return ArgumentView(memory, Tensor(dtype, (count,), offset))


def axpy(memory: Any) -> tuple[str, Sequence[ArgumentView]]:
    """A call on one memory: a at 0, x at 256, y at 1024."""
    return "axpy", [view(memory, "float32", count, offset) for count, offset in ((1, 0), (37, 256), (37, 1024))]
