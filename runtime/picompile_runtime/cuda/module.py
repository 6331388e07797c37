"""Which of an artifact's images a GPU gets, and the kernels in it.

A cubin runs on GPUs of its major compute capability and a minor one that is no lower; PTX on all that are no older, but
the driver must compile it first, which takes it seconds the first time (it keeps the result). CUDA C++ Programming
Guide, "Binary Compatibility" and "PTX Compatibility".
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass

from picompile_runtime.cuda.driver import Driver
from picompile_runtime.cuda.errors import CudaError, NoGpuError
from picompile_runtime.cuda.images import DeviceImages
from picompile_runtime.errors import ArtifactError

_LOG_BYTES = 8192
_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6  # CUjit_option
_NOT_FOUND = 500
_JIT_COMPILER_NOT_FOUND, _JIT_COMPILATION_DISABLED = 221, 223
# Invalid image, no binary for GPU, invalid PTX, unsupported PTX version, and the two above.
_REFUSALS = frozenset({200, 209, 218, 222, _JIT_COMPILER_NOT_FOUND, _JIT_COMPILATION_DISABLED})


@dataclass(frozen=True)
class Image:
    """Code for the compute capability `sm` / 10, as the driver takes it."""

    data: bytes
    sm: int
    is_ptx: bool

    @property
    def needs(self) -> str:
        """What a driver must know to load it, in words."""
        version = re.search(rb"^\s*\.version\s+(\d+\.\d+)", self.data, re.MULTILINE) if self.is_ptx else None
        ptx = f"PTX {version[1].decode()} and " if version else ""
        return f"{ptx}compute capability {capability(self.sm)}"


def capability(sm: int) -> str:
    """A compute capability as NVIDIA writes it: 8.9 for 89."""
    return f"{sm // 10}.{sm % 10}"


def choose_image(images: DeviceImages, sm: int, name: str) -> Image:
    """What a GPU called `name` of the compute capability `sm` / 10 can run. Raises NoGpuError if it is nothing."""
    if images.sm // 10 == sm // 10 and images.sm <= sm:
        return Image(images.cubin, images.sm, is_ptx=False)
    if images.ptx_sm <= sm:
        return Image(images.ptx, images.ptx_sm, is_ptx=True)
    oldest = capability(min(images.sm, images.ptx_sm))
    raise NoGpuError(
        f"the artifact's code is for GPUs of compute capability {oldest} and newer, and {name} has {capability(sm)}; "
        "compile the model for this GPU (--target)"
    )


class Module:
    """An image that the driver has loaded."""

    def __init__(self, driver: Driver, handle: c_void_p) -> None:
        self._driver, self._handle = driver, handle
        self._functions: dict[str, c_void_p] = {}

    def function(self, symbol: str) -> c_void_p:
        """The kernel of this name; ArtifactError if there is none."""
        if symbol not in self._functions:
            function = c_void_p()
            try:
                self._driver.call("cuModuleGetFunction", byref(function), self._handle, symbol.encode())
            except CudaError as error:
                if error.result != _NOT_FOUND:
                    raise
                text = f"the artifact's GPU code has no kernel called {symbol}; compile the model again"
                raise ArtifactError(text) from error
            self._functions[symbol] = function
        return self._functions[symbol]


@contextmanager
def load_module(driver: Driver, image: Image) -> Iterator[Module]:
    """The image, loaded into the current context. Raises NoGpuError if the driver cannot take it."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES)
    values = (c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    handle = c_void_p()
    try:  # bytes end with a zero for C, as PTX must
        driver.call("cuModuleLoadDataEx", byref(handle), image.data, 2, options, values)
    except CudaError as error:
        if error.result not in _REFUSALS:
            raise
        raise _refused(driver, image, error, log.value) from error
    try:
        yield Module(driver, handle)
    finally:
        driver.call("cuModuleUnload", handle)


def _refused(driver: Driver, image: Image, error: CudaError, log: bytes) -> NoGpuError:
    """The driver is too old for the image, or cannot compile it."""
    first = next(iter(log.decode("utf-8", "replace").splitlines()), "").strip()
    says = f" ({first})" if first else ""
    hint = "install a newer driver, or compile the model for this GPU (--target)"
    if error.result == _JIT_COMPILER_NOT_FOUND:
        hint = "install the driver's libnvidia-ptxjitcompiler.so.1, or compile the model for this GPU (--target)"
    if error.result == _JIT_COMPILATION_DISABLED:
        hint = "unset CUDA_DISABLE_PTX_JIT, or compile the model for this GPU (--target)"
    return NoGpuError(
        f"the NVIDIA driver, of CUDA {driver.version()}, refuses the artifact's code, which needs {image.needs}: "
        f"{driver.error_name(error.result)}{says}; {hint}",
        error.result,
    )
