"""A GPU as the accelerator, through the CUDA driver alone. It is imported only for artifacts with code for a GPU.

Nothing here has run on a GPU yet: tests use a stand-in for the driver (tests/helpers/fake_cuda), which enforces the
rules of the driver API and runs kernels on the CPU.
"""

from picompile_runtime.devices.cuda.accelerator import CudaAccelerator
from picompile_runtime.devices.cuda.driver import CudaError
from picompile_runtime.devices.cuda.module import CudaImages, GpuLaunch, read_images
from picompile_runtime.devices.cuda.open import RoundTrips, open_cuda_accelerator, ping_pong

__all__ = [
    "CudaAccelerator",
    "CudaError",
    "CudaImages",
    "GpuLaunch",
    "RoundTrips",
    "open_cuda_accelerator",
    "ping_pong",
    "read_images",
]
