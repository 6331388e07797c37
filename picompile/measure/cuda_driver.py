"""The CUDA driver, `libcuda.so.1`, through ctypes: what measuring needs of it, with every result checked.

Signatures are those of the driver API, https://docs.nvidia.com/cuda/cuda-driver-api/, under the names that the library
exports (`_v2` where cuda.h maps a name to it). It has not run on a GPU yet: the tests use a stand-in for the library
(tests/measure/fake_cuda.c), which holds it to the rules about contexts, sizes and streams that are written there.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from picompile.errors import PicompileError

LIBRARY = "libcuda.so.1"

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_STREAM_NON_BLOCKING = 1
_NAME_BYTES = 256

# A device pointer is 64 bits wide, a device is an int; without these, ctypes would pass either as an int.
_ARGUMENTS = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemAllocHost_v2": (POINTER(c_void_p), c_size_t),
    "cuMemFreeHost": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
}


class CudaError(PicompileError):
    """There is no driver, no device, or a call of the driver failed; the text says which."""


class Driver:
    """The loaded and initialized library. Raises `CudaError` where it cannot be had."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"no NVIDIA driver ({library} cannot be loaded)") from error
        for name, arguments in _ARGUMENTS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise CudaError(f"the NVIDIA driver is too old: it has no {name}") from error
            function.argtypes, function.restype = arguments, c_int
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Calls the function `name` and raises `CudaError` unless it returns CUDA_SUCCESS."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise CudaError(f"{name}: {self._error_name(result)}")

    def _error_name(self, result: int) -> str:
        name = c_char_p()
        known = self._library.cuGetErrorName(result, byref(name)) == 0 and name.value
        return name.value.decode("ascii", "replace") if known and name.value else f"CUDA error {result}"

    def version(self) -> str:
        """The newest CUDA version that the driver supports, as `12.4`."""
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def first_device(self) -> int:
        """The device that CUDA programs use by default; CUDA_VISIBLE_DEVICES chooses it."""
        count, device = c_int(), c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value < 1:
            raise CudaError("the NVIDIA driver has no device")
        self.call("cuDeviceGet", byref(device), 0)
        return device.value

    def name(self, device: int) -> str:
        """The name that the device is sold under."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", name, _NAME_BYTES, device)
        return name.value.decode("utf-8", "replace")

    def sm(self, device: int) -> int:
        """Its compute capability times ten."""
        major, minor = c_int(), c_int()
        self.call("cuDeviceGetAttribute", byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        self.call("cuDeviceGetAttribute", byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        return 10 * major.value + minor.value

    def total_bytes(self, device: int) -> int:
        """Its memory, without what the driver keeps."""
        size = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(size), device)
        return size.value

    def free_bytes(self) -> int:
        """What of the memory is free. Needs a context."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Makes the device's primary context current: the one that other libraries in this process use too."""
        context, popped = c_void_p(), c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent_v2", byref(popped))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def device_memory(self, size_bytes: int) -> Iterator[int]:
        """Memory of the device; the value is its address there."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), size_bytes)
        try:
            yield address.value
        finally:
            self.call("cuMemFree_v2", address)

    @contextmanager
    def pinned_memory(self, size_bytes: int) -> Iterator[c_void_p]:
        """Memory of the host that the device reaches by itself, as it does not reach pageable memory."""
        address = c_void_p()
        self.call("cuMemAllocHost_v2", byref(address), size_bytes)
        try:
            yield address
        finally:
            self.call("cuMemFreeHost", address)

    @contextmanager
    def stream(self) -> Iterator[c_void_p]:
        """A queue of copies that waits for no other."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        try:
            yield stream
        finally:
            self.call("cuStreamDestroy_v2", stream)
