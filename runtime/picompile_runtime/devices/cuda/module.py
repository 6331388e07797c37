"""The GPU code of an artifact: a cubin, PTX, and `kernels/device.json`, which says how to launch the kernels.

{"sm": 89, "ptx_sm": 89, "kernels": {"add": [{"symbol": "add_kernel", "grid": [8, 1, 1], "block": [256, 1, 1],
                                              "args": [0, 2], "registers": 40, …}]}}
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass, field

from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.artifact.interfaces import KernelInterface, parse_interfaces
from picompile_runtime.devices.cuda.driver import CudaError, Driver, NoGpuError
from picompile_runtime.errors import ArtifactError

# Limits of every compute capability since 3.0: CUDA C++ Programming Guide, "Technical Specifications".
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_MOST_THREADS = (1024, 1024, 64)
_MOST_THREADS_OF_BLOCK = 1024
_MOST_ARGS = 4096 // 8  # 4 KiB of parameters, each an address
_LEAST_SM, _MOST_SM = 50, 999


@dataclass(frozen=True)
class GpuLaunch:
    """A launch of `symbol`. `args` are the numbers of the call's arguments that are its parameters, in order."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[int, ...]


@dataclass(frozen=True)
class CudaImages:
    """An artifact's GPU code.

    `cubin` is for compute capability `sm` / 10, `ptx` for `ptx_sm` / 10. `kernels` has the launches of each kernel,
    `interfaces` what the kernels declare, None if the file does not say. `copies` has the kernels that the copy engine
    runs: the numbers of the argument that it copies, and of the one to which it does.
    """

    sm: int
    ptx_sm: int
    cubin: bytes
    ptx: bytes
    kernels: Mapping[str, tuple[GpuLaunch, ...]]
    interfaces: Mapping[str, KernelInterface] | None = None
    copies: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def read_images(text: bytes, cubin: bytes, ptx: bytes, where: str) -> CudaImages:
    """Return the images, described by `text`, a device.json. Raises ArtifactError, naming `where`."""
    root = parse_object(text, where)
    kernels = root.object("kernels")
    copies = root.object("copies") if "copies" in root.data else None
    return CudaImages(
        sm=root.integer("sm", _LEAST_SM, _MOST_SM),
        ptx_sm=root.integer("ptx_sm", _LEAST_SM, _MOST_SM),
        cubin=cubin,
        ptx=ptx,
        kernels={name: _launches(kernels, name) for name in kernels.data},
        interfaces=parse_interfaces(root.object("interfaces")) if "interfaces" in root.data else None,
        copies={} if copies is None else {name: _pair(copies, name) for name in copies.data},
    )


def _launches(kernels: Fields, name: str) -> tuple[GpuLaunch, ...]:
    launches = tuple(_launch(fields) for fields in kernels.objects(name))
    if not launches:
        raise kernels.wrong(name, "a list of one launch or more")
    return launches


def _pair(copies: Fields, name: str) -> tuple[int, int]:
    value = copies.data[name]
    if isinstance(value, list) and len(value) == 2 and all(type(i) is int and 0 <= i < _MOST_ARGS for i in value):
        return value[0], value[1]
    raise copies.wrong(name, "the numbers of two arguments")


def _launch(fields: Fields) -> GpuLaunch:
    symbol = fields.text("symbol")
    if not symbol.isascii() or not symbol.isidentifier():
        raise fields.wrong("symbol", "the name of a function")
    block = _extents(fields, "block", _MOST_THREADS)
    if math.prod(block) > _MOST_THREADS_OF_BLOCK:
        raise fields.wrong("block", f"of {_MOST_THREADS_OF_BLOCK} threads or fewer")
    return GpuLaunch(symbol, _extents(fields, "grid", _MOST_BLOCKS), block, _args(fields))


def _extents(fields: Fields, key: str, most: tuple[int, int, int]) -> tuple[int, int, int]:
    value = fields.data.get(key)
    if isinstance(value, list) and len(value) == 3:
        x, y, z = value
        if all(type(item) is int and 1 <= item <= limit for item, limit in zip(value, most, strict=True)):
            return x, y, z
    raise fields.wrong(key, f"three integers from 1 to {', '.join(map(str, most))}")


def _args(fields: Fields) -> tuple[int, ...]:
    value = fields.data.get("args")
    if not isinstance(value, list) or len(value) > _MOST_ARGS or not all(type(i) is int and i >= 0 for i in value):
        raise fields.wrong("args", f"a list of at most {_MOST_ARGS} integers of 0 or more")
    return tuple(value)


def check_arguments(launch: GpuLaunch, count: int, kernel: str) -> None:
    """Raise ArtifactError if a launch needs more than the `count` arguments that `kernel` is called with."""
    if launch.args and max(launch.args) >= count:
        raise ArtifactError(
            f"kernel {kernel}: {launch.symbol} wants argument {max(launch.args)} and the call has {count}; "
            "compile the model again"
        )


_LOG_BYTES = 8192
_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6  # CUjit_option
_NOT_FOUND = 500
_JIT_COMPILER_NOT_FOUND, _JIT_COMPILATION_DISABLED = 221, 223
# Invalid image, no binary for GPU, invalid PTX, unsupported PTX version, and the two above.
_REFUSALS = frozenset({200, 209, 218, 222, _JIT_COMPILER_NOT_FOUND, _JIT_COMPILATION_DISABLED})


@dataclass(frozen=True)
class CudaImage:
    """Code for compute capability `sm` / 10, as the driver takes it."""

    data: bytes
    sm: int
    is_ptx: bool

    @property
    def needs(self) -> str:
        """The PTX version and compute capability that a driver must know to load it, in words."""
        version = re.search(rb"^\s*\.version\s+(\d+\.\d+)", self.data, re.MULTILINE) if self.is_ptx else None
        ptx = f"PTX {version[1].decode()} and " if version else ""
        return f"{ptx}compute capability {capability(self.sm)}"


def capability(sm: int) -> str:
    """Return a compute capability as NVIDIA writes it: 8.9 for 89."""
    return f"{sm // 10}.{sm % 10}"


def choose_image(images: CudaImages, sm: int, name: str) -> CudaImage:
    """Return the image for a GPU called `name` of compute capability `sm` / 10. Raises NoGpuError if it can run none.

    A cubin runs on GPUs with its major compute capability and the same minor one or a higher one. PTX runs on all that
    are not older, but the driver must compile it first, which takes seconds the first time (the driver keeps the
    result): CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    if images.sm // 10 == sm // 10 and images.sm <= sm:
        return CudaImage(images.cubin, images.sm, is_ptx=False)
    if images.ptx_sm <= sm:
        return CudaImage(images.ptx, images.ptx_sm, is_ptx=True)
    oldest = capability(min(images.sm, images.ptx_sm))
    raise NoGpuError(
        f"the artifact's code is for GPUs of compute capability {oldest} and newer, and {name} has {capability(sm)}; "
        "compile the model for this GPU (--target)"
    )


class CudaModule:
    """An image that the driver has loaded."""

    def __init__(self, driver: Driver, handle: c_void_p) -> None:
        self._driver, self._handle = driver, handle
        self._functions: dict[str, c_void_p] = {}

    def function(self, symbol: str) -> c_void_p:
        """Return the kernel called `symbol`. Raises ArtifactError if there is none."""
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
def load_module(driver: Driver, image: CudaImage) -> Iterator[CudaModule]:
    """Load the image into the current context, and yield it. Raises NoGpuError if the driver cannot load it."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES)
    values = (c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    handle = c_void_p()
    try:  # PTX must end with a zero. A file of it has none; Python adds one to all bytes that it gives to C.
        driver.call("cuModuleLoadDataEx", byref(handle), image.data, 2, options, values)
    except CudaError as error:
        if error.result not in _REFUSALS:
            raise
        raise _refused(driver, image, error, log.value) from error
    try:
        yield CudaModule(driver, handle)
    finally:
        driver.call("cuModuleUnload", handle)


def _refused(driver: Driver, image: CudaImage, error: CudaError, log: bytes) -> NoGpuError:
    """Return the error for an image that the driver is too old for, or that it cannot compile."""
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
