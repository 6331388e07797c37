"""Memory that a GPU sees, and places in it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cuda.driver import Driver
from picompile_runtime.errors import ArtifactError


@dataclass(frozen=True)
class GpuMemory:
    """Memory at `address` of the device: its own, or the host's that it sees."""

    address: int
    size_bytes: int

    def at(self, offset: int, size_bytes: int) -> int:
        """The address of bytes from `offset` on, which must be inside. Raises ValueError if they are not."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of a memory of {self.size_bytes}")
        return self.address + offset


def data_address(memory: GpuMemory, offset: int, data: NDArray[Any]) -> int:
    """Where in `memory` the array uint8 [n] goes to or comes from. Raises ValueError."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"bytes to copy must be uint8 [n], not {data.dtype} {list(data.shape)}")
    return memory.at(offset, len(data))


def view_address(kernel: str, view: ArgumentView) -> int:
    """The address of an argument of `kernel`. Raises ArtifactError where it is not inside of its memory."""
    try:
        return int(view.memory.at(view.tensor.offset, view.tensor.size_bytes))
    except ValueError as error:
        raise ArtifactError(f"kernel {kernel}: an argument lies outside of its memory ({error})") from error


# Copies between memory of the host and that of the GPU, through two pinned buffers.
#
# The GPU reaches only pinned memory by itself. While it copies from one buffer, the host fills the other.


BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class _PinnedBuffer:
    """Pinned memory, and the event after which the GPU no longer reads from it."""

    address: c_void_p
    array: NDArray[np.uint8]
    done: c_void_p


class Staging:
    """The two buffers. Writes are copied in `stream`. Methods need the context in which the buffers were made."""

    def __init__(self, driver: Driver, buffer_bytes: int, stream: c_void_p, stack: ExitStack) -> None:
        """`stack` gets what is to be given back."""
        self._driver, self._bytes, self._stream = driver, buffer_bytes, stream
        self._buffers = [self._buffer(stack) for _ in range(2)]

    def _buffer(self, stack: ExitStack) -> _PinnedBuffer:
        address = stack.enter_context(self._driver.pinned_memory(self._bytes))
        array = host_array(address.value or 0, self._bytes)
        return _PinnedBuffer(address, array, stack.enter_context(self._driver.event()))

    def write(self, address: int, data: NDArray[Any], later: c_void_p) -> None:
        """Copies `data` to the device. It may change when this returns; what is put into `later` then waits for it."""
        used = None
        for part, used in self._parts(data):
            size_bytes = len(part)
            # Nothing to wait for, says the driver, where the event has never been recorded.
            self._driver.call("cuEventSynchronize", used.done)
            used.array[:size_bytes] = part
            self._driver.call("cuMemcpyHtoDAsync_v2", address, used.address, size_bytes, self._stream)
            self._driver.call("cuEventRecord", used.done, self._stream)
            address += size_bytes
        if used is not None:  # one stream copies in order: the last is done after all others
            self._driver.call("cuStreamWaitEvent", later, used.done, 0)

    def read(self, address: int, data: NDArray[Any], stream: c_void_p) -> None:
        """Copies to `data` from the device, after what is in `stream`: the `later` of all writes, whose use of the
        buffers is thus over.
        """
        for part, buffer in self._parts(data):
            size_bytes = len(part)
            self._driver.call("cuMemcpyDtoHAsync_v2", buffer.address, address, size_bytes, stream)
            self._driver.call("cuStreamSynchronize", stream)
            part[:] = buffer.array[:size_bytes]
            address += size_bytes

    def _parts(self, data: NDArray[Any]) -> Iterator[tuple[NDArray[Any], _PinnedBuffer]]:
        """The data in parts that fit a buffer, each with the buffer whose turn it is."""
        for index, first in enumerate(range(0, len(data), self._bytes)):
            yield data[first : first + self._bytes], self._buffers[index % 2]


def host_array(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """An array uint8 [size_bytes] over memory at `address`, which it does not keep alive."""
    array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
    return array
