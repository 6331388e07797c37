"""The functions of the CUDA driver API that are used, and the types of their parameters.

Signatures are those of https://docs.nvidia.com/cuda/cuda-driver-api/ under the names that the library exports (`_v2`
where cuda.h maps a name to it). All of them exist since CUDA 11.4. A handle is a pointer, an address on the device is
64 bits wide, a device is an int; without these types, ctypes would pass any of them as an int.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from types import MappingProxyType
from typing import Any

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
        # Kernels and graphs.
        "cuModuleLoadDataEx": (_new_handle, c_void_p, c_uint, POINTER(c_int), POINTER(c_void_p)),
        "cuModuleUnload": (_handle,),
        "cuModuleGetFunction": (_new_handle, _handle, c_char_p),
        "cuLaunchKernel": (_handle, *_extent, *_extent, c_uint, _stream, POINTER(c_void_p), POINTER(c_void_p)),
        "cuGraphInstantiateWithFlags": (_new_handle, _handle, c_ulonglong),
        "cuGraphUpload": (_handle, _stream),
        "cuGraphLaunch": (_handle, _stream),
        "cuGraphExecDestroy": (_handle,),
        "cuGraphDestroy": (_handle,),
    }
)
