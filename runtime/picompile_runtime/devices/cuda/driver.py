"""The CUDA driver, `libcuda.so.1`, through ctypes, with every result checked.

Every error is also one of the runtime's errors, which sets its exit code:

| exit code | meaning | raised as |
| --- | --- | --- |
| 1 | a call of the driver failed, or a kernel did | `GpuCallError`, a `KernelError` |
| 5 | the GPU's memory is full | `GpuMemoryError`, a `DoesNotFitError` |
| 6 | no driver, no GPU, too old, or another GPU than the code is for | `NoGpuError`, a `MachineError` |
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from types import MappingProxyType
from typing import Any

from picompile_runtime.errors import DoesNotFitError, KernelError, MachineError, PicompileRuntimeError

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of cuda.h, as all codes here
# Stub library, device unavailable, no device, invalid device, system not ready, driver mismatch, no compatibility.
_LACKS_GPU = frozenset({34, 46, 100, 101, 802, 803, 804})


class CudaError(PicompileRuntimeError):
    """There is no driver or no GPU, or a call of the driver failed; the text says which.

    `result` is the CUresult of the call, or 0 if no call failed.
    """

    def __init__(self, text: str, result: int = 0) -> None:
        super().__init__(text)
        self.result = result

    @property
    def call(self) -> str:
        """The call of the driver and its result: the text without the advice."""
        return str(self).partition(";")[0]


class NoGpuError(CudaError, MachineError):
    """This machine has no usable GPU, or none that can run the artifact's code."""


class GpuCallError(CudaError, KernelError):
    """A call of the driver failed, or something that ran on the GPU before it did."""


class GpuMemoryError(CudaError, DoesNotFitError):
    """The GPU has too little free memory."""


def call_error(text: str, result: int) -> CudaError:
    """Return the error for a call that returned `result`; `text` begins with the call's name."""
    if result == OUT_OF_MEMORY and "Host" in text.partition(":")[0]:
        return GpuMemoryError(f"{text}; close other programs: memory of this machine cannot be pinned", result)
    if result == OUT_OF_MEMORY:
        return GpuMemoryError(f"{text}; free memory of the GPU, or compile with a smaller --vram-budget", result)
    return (NoGpuError if result in _LACKS_GPU else GpuCallError)(text, result)


# The functions of the CUDA driver API that are used here, and the types of their parameters. Signatures are those of
# https://docs.nvidia.com/cuda/cuda-driver-api/ under the names that the library exports (`_v2` where cuda.h maps a name
# to it). All of them exist since CUDA 11.4. A handle is a pointer, an address on the GPU has 64 bits, a device is an
# int; without these types, ctypes would pass any of them as an int.
_handle = c_void_p
_new_handle = POINTER(c_void_p)
_address = c_uint64
_stream = c_void_p
_extent = (c_uint, c_uint, c_uint)

PARAMETERS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "cuInit": (c_uint,),
        "cuDriverGetVersion": (POINTER(c_int),),
        "cuGetErrorName": (c_int, POINTER(c_char_p)),
        # Devices and contexts.
        "cuDeviceGetCount": (POINTER(c_int),),
        "cuDeviceGet": (POINTER(c_int), c_int),
        "cuDeviceGetName": (c_char_p, c_int, c_int),
        "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
        "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
        "cuDevicePrimaryCtxRetain": (_new_handle, c_int),
        "cuDevicePrimaryCtxRelease_v2": (c_int,),
        "cuCtxPushCurrent_v2": (_handle,),
        "cuCtxPopCurrent_v2": (_new_handle,),
        # Memory.
        "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
        "cuMemAlloc_v2": (POINTER(_address), c_size_t),
        "cuMemFree_v2": (_address,),
        "cuMemAllocHost_v2": (_new_handle, c_size_t),
        "cuMemHostAlloc": (_new_handle, c_size_t, c_uint),
        "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
        "cuMemHostUnregister": (c_void_p,),
        "cuMemHostGetDevicePointer_v2": (POINTER(_address), c_void_p, c_uint),
        "cuMemFreeHost": (c_void_p,),
        "cuMemsetD8Async": (_address, c_ubyte, c_size_t, _stream),
        "cuMemcpyDtoDAsync_v2": (_address, _address, c_size_t, _stream),
        "cuMemcpyHtoDAsync_v2": (_address, c_void_p, c_size_t, _stream),
        "cuMemcpyDtoHAsync_v2": (c_void_p, _address, c_size_t, _stream),
        # Streams and events.
        "cuStreamCreate": (_new_handle, c_uint),
        "cuStreamDestroy_v2": (_stream,),
        "cuStreamQuery": (_stream,),
        "cuStreamSynchronize": (_stream,),
        "cuStreamWaitEvent": (_stream, _handle, c_uint),
        "cuStreamBeginCapture_v2": (_stream, c_int),
        "cuStreamEndCapture": (_stream, _new_handle),
        "cuEventCreate": (_new_handle, c_uint),
        "cuEventDestroy_v2": (_handle,),
        "cuEventRecord": (_handle, _stream),
        "cuEventRecordWithFlags": (_handle, _stream, c_uint),
        "cuEventSynchronize": (_handle,),
        "cuEventElapsedTime": (POINTER(c_float), _handle, _handle),
        # Kernels, functions of the host, and graphs.
        "cuModuleLoadDataEx": (_new_handle, c_void_p, c_uint, POINTER(c_int), POINTER(c_void_p)),
        "cuModuleUnload": (_handle,),
        "cuModuleGetFunction": (_new_handle, _handle, c_char_p),
        "cuLaunchHostFunc": (_stream, c_void_p, c_void_p),
        "cuLaunchKernel": (_handle, *_extent, *_extent, c_uint, _stream, POINTER(c_void_p), POINTER(c_void_p)),
        "cuGraphInstantiateWithFlags": (_new_handle, _handle, c_ulonglong),
        "cuGraphUpload": (_handle, _stream),
        "cuGraphLaunch": (_handle, _stream),
        "cuGraphExecDestroy": (_handle,),
        "cuGraphDestroy": (_handle,),
    }
)


LIBRARY = "libcuda.so.1"

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_PORTABLE, _HOST_DEVICEMAP = 1, 2
_NAME_BYTES = 256
_NOT_INITIALIZED, _NOT_READY = 3, 600  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_READY
_MODULE_LOADING = "CUDA_MODULE_LOADING"


class Driver:
    """The loaded and initialized library. Raises `NoGpuError` if it cannot be loaded or initialized.

    Methods whose result must be given back are context managers: use `with`, or an ExitStack to keep it longer.
    """

    def __init__(self, library: str) -> None:
        try:
            self._library: Any = ctypes.CDLL(library)
        except OSError as error:
            raise NoGpuError(f"no NVIDIA driver ({library} cannot be loaded)") from error
        for name, parameters in PARAMETERS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise NoGpuError(f"the NVIDIA driver is too old: it has no {name}; install a newer one") from error
            function.argtypes, function.restype = parameters, c_int
        with _eager_modules():
            result = self._library.cuInit(0)
        if result:
            text = f"cuInit: {self.error_name(result)}"
            if result == _NOT_INITIALIZED:  # the result in a forked process
                text += "; a process that was forked from one that uses the GPU cannot use it: start one anew (spawn)"
            raise NoGpuError(text, result)

    def call(self, name: str, *arguments: object) -> None:
        """Call the function `name`, and raise `CudaError` unless it returns CUDA_SUCCESS."""
        if result := getattr(self._library, name)(*arguments):
            raise call_error(f"{name}: {self.error_name(result)}", result)

    def disown(self) -> None:
        """Never call the driver again, in a forked process: everything that would be freed belongs to the parent."""
        self._library = _Disowned()

    def error_name(self, result: int) -> str:
        """Return cuda.h's name of a result."""
        name = c_char_p()
        self._library.cuGetErrorName(result, byref(name))
        return name.value.decode("ascii", "replace") if name.value else f"CUDA error {result}"

    def version(self) -> str:
        """Return the newest CUDA version that the driver supports, as `12.4`."""
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def first_device(self) -> int:
        """Return the GPU that CUDA programs use by default, which CUDA_VISIBLE_DEVICES can choose."""
        count, device = c_int(), c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value < 1:
            raise NoGpuError("the NVIDIA driver has no device")
        self.call("cuDeviceGet", byref(device), 0)
        return device.value

    def name(self, device: int) -> str:
        """Return the name under which the GPU is sold."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", name, _NAME_BYTES, device)
        return name.value.decode("utf-8", "replace")

    def sm(self, device: int) -> int:
        """Return the GPU's compute capability times ten."""
        major, minor = c_int(), c_int()
        self.call("cuDeviceGetAttribute", byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        self.call("cuDeviceGetAttribute", byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        return 10 * major.value + minor.value

    def total_bytes(self, device: int) -> int:
        """Return the size of the GPU's memory in bytes, without the driver's part."""
        size = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(size), device)
        return size.value

    def free_bytes(self) -> int:
        """Return how many bytes of the GPU's memory are free. Needs a current context."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    @contextmanager
    def primary_context(self, device: int) -> Iterator[c_void_p]:
        """Yield the GPU's primary context, which other libraries in this process use too; it is not current yet."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        try:
            yield context
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def current(self, context: c_void_p) -> Iterator[None]:
        """Make a context current in the calling thread."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the GPU's primary context current in the calling thread."""
        with self.primary_context(device) as context, self.current(context):
            yield

    @contextmanager
    def device_memory(self, size_bytes: int) -> Iterator[int]:
        """Allocate memory of the GPU, and yield its address there, a multiple of 256."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), size_bytes)
        try:
            yield address.value
        finally:
            self.call("cuMemFree_v2", address)

    @contextmanager
    def pinned_memory(self, size_bytes: int) -> Iterator[c_void_p]:
        """Allocate pinned memory of the host, which the GPU can access by itself, and yield its address."""
        address = c_void_p()
        self.call("cuMemAllocHost_v2", byref(address), size_bytes)
        try:
            yield address
        finally:
            self.call("cuMemFreeHost", address)

    @contextmanager
    def shared_memory(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Allocate pinned memory that kernels see too, and yield its addresses on the host and on the GPU."""
        address, device_address = c_void_p(), c_uint64()
        self.call("cuMemHostAlloc", byref(address), size_bytes, _HOST_PORTABLE | _HOST_DEVICEMAP)
        try:
            self.call("cuMemHostGetDevicePointer_v2", byref(device_address), address, 0)
            yield address.value or 0, device_address.value
        finally:
            self.call("cuMemFreeHost", address)

    @contextmanager
    def registered_memory(self, address: int, size_bytes: int) -> Iterator[int]:
        """Pin existing memory of the host so that kernels see it, and yield its address on the GPU."""
        device_address = c_uint64()
        self.call("cuMemHostRegister_v2", address, size_bytes, _HOST_PORTABLE | _HOST_DEVICEMAP)
        try:
            self.call("cuMemHostGetDevicePointer_v2", byref(device_address), address, 0)
            yield device_address.value
        finally:
            self.call("cuMemHostUnregister", address)

    def submit(self, stream: c_void_p) -> None:
        """Make the driver begin the stream's work: Windows and WSL2 hold launches back until asked.

        The result is not needed: it is an error while work is left, and a wait will report failures.
        """
        self._library.cuStreamQuery(stream)

    def is_well(self, stream: c_void_p) -> bool:
        """Return whether nothing in the stream has failed so far, without waiting. Needs the stream's context."""
        return self._library.cuStreamQuery(stream) in (0, _NOT_READY)

    @contextmanager
    def stream(self) -> Iterator[c_void_p]:
        """Make a stream, a queue of work that waits for no other, and yield it."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        try:
            yield stream
        finally:
            self.call("cuStreamDestroy_v2", stream)

    @contextmanager
    def event(self, timed: bool = False) -> Iterator[c_void_p]:
        """Make an event, a point in a stream that others can wait for, and yield it.

        With `timed` it has the time when it was reached.
        """
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 0 if timed else _EVENT_DISABLE_TIMING)
        try:
            yield event
        finally:
            self.call("cuEventDestroy_v2", event)


class _Disowned:
    """A driver whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0


@contextmanager
def _eager_modules() -> Iterator[None]:
    """Make the driver load kernels with their module, unless the environment says otherwise; `cuInit` reads that.

    To load a kernel later, the driver may wait until the GPU is idle, which it never is if the running kernel waits for
    the host. Processes that are started later do not inherit the variable.
    """
    if _MODULE_LOADING in os.environ:
        yield
        return
    os.environ[_MODULE_LOADING] = "EAGER"
    try:
        yield
    finally:
        del os.environ[_MODULE_LOADING]
