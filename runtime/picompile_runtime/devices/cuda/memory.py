"""Memory that a GPU sees, addresses in it, and copies to and from it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cuda.bounce import BounceBuffers
from picompile_runtime.devices.cuda.driver import Driver
from picompile_runtime.errors import ArtifactError, DoesNotFitError


@dataclass(frozen=True)
class GpuMemory:
    """Memory at `address` of the GPU: its own, or the host's that it sees, which is at `host_address` there."""

    address: int
    size_bytes: int
    host_address: int | None = None

    def at(self, offset: int, size_bytes: int) -> int:
        """Return the address of the byte at `offset`. Raises ValueError unless `size_bytes` from there are inside."""
        _check_inside(offset, size_bytes, self.size_bytes)
        return self.address + offset

    def host_at(self, offset: int, size_bytes: int) -> int | None:
        """Return the host's address of the byte at `offset`; None for the GPU's own memory. Raises as `at` does."""
        _check_inside(offset, size_bytes, self.size_bytes)
        return None if self.host_address is None else self.host_address + offset


@dataclass(frozen=True)
class UnpinnedMemory:
    """Memory of the host, at `host_address` there, that the system cannot pin: the GPU has no address for it.

    Copies of it go through `buffers`. `refusal` is the error's text where a kernel would read it.
    """

    host_address: int
    size_bytes: int
    buffers: BounceBuffers
    refusal: str

    def at(self, offset: int, size_bytes: int) -> int:
        """Raise DoesNotFitError: nothing on the GPU can use this memory."""
        raise DoesNotFitError(self.refusal)

    def host_at(self, offset: int, size_bytes: int) -> int:
        """Return the host's address of the byte at `offset`. Raises ValueError as `GpuMemory.at` does."""
        _check_inside(offset, size_bytes, self.size_bytes)
        return self.host_address + offset


def _check_inside(offset: int, size_bytes: int, whole_bytes: int) -> None:
    if not 0 <= offset <= offset + size_bytes <= whole_bytes:
        raise ValueError(f"bytes {offset} to {offset + size_bytes} of a memory of {whole_bytes}")


def data_address(memory: GpuMemory, offset: int, data: NDArray[Any]) -> int:
    """Return the address in `memory` for copying the array uint8 [n]. Raises ValueError."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"bytes to copy must be uint8 [n], not {data.dtype} {list(data.shape)}")
    return memory.at(offset, len(data))


def view_address(kernel: str, view: ArgumentView) -> int:
    """Return the GPU's address of an argument of `kernel`.

    Raises ArtifactError if it is not inside its memory, DoesNotFitError if that memory is not pinned.
    """
    with _named(kernel):
        return int(view.memory.at(view.tensor.offset, view.tensor.size_bytes))


def view_host_address(kernel: str, view: ArgumentView) -> int | None:
    """Return the host's address of an argument of `kernel`; None if it is in the GPU's own memory.

    Raises ArtifactError if it is not inside its memory.
    """
    memory: GpuMemory | UnpinnedMemory = view.memory
    with _named(kernel):
        return memory.host_at(view.tensor.offset, view.tensor.size_bytes)


@contextmanager
def _named(kernel: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ArtifactError(f"kernel {kernel}: an argument lies outside of its memory ({error})") from error


BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class _PinnedBuffer:
    """Pinned memory, and the event after which the GPU no longer reads from it."""

    address: c_void_p
    array: NDArray[np.uint8]
    done: c_void_p


class Staging:
    """Copies between the host's memory and the GPU's, through two pinned buffers.

    The GPU can access only pinned memory by itself. While it copies from one buffer, the host fills the other. Methods
    need the context in which the buffers were made.
    """

    def __init__(self, driver: Driver, buffer_bytes: int, stream: c_void_p, stack: ExitStack) -> None:
        """Make the buffers, which `stack` frees. Writes are copied in `stream`."""
        self._driver, self._bytes, self._stream = driver, buffer_bytes, stream
        self._buffers = [self._buffer(stack) for _ in range(2)]

    def _buffer(self, stack: ExitStack) -> _PinnedBuffer:
        address = stack.enter_context(self._driver.pinned_memory(self._bytes))
        array = host_array(address.value or 0, self._bytes)
        return _PinnedBuffer(address, array, stack.enter_context(self._driver.event()))

    def write(self, address: int, data: NDArray[Any], later: c_void_p) -> None:
        """Copy `data` to the GPU. It may change after this returns; work put into `later` then waits for the copy."""
        used = None
        for part, used in self._parts(data):
            size_bytes = len(part)
            # If the event has never been recorded, the driver does not wait.
            self._driver.call("cuEventSynchronize", used.done)
            used.array[:size_bytes] = part
            self._driver.call("cuMemcpyHtoDAsync_v2", address, used.address, size_bytes, self._stream)
            self._driver.call("cuEventRecord", used.done, self._stream)
            address += size_bytes
        if used is not None:  # one stream copies in order, so the last part is copied after all others
            self._driver.call("cuStreamWaitEvent", later, used.done, 0)

    def read(self, address: int, data: NDArray[Any], stream: c_void_p) -> None:
        """Copy from the GPU to `data`, after the work that is in `stream`.

        `stream` is the `later` of all writes, so they no longer use the buffers.
        """
        for part, buffer in self._parts(data):
            size_bytes = len(part)
            self._driver.call("cuMemcpyDtoHAsync_v2", buffer.address, address, size_bytes, stream)
            self._driver.call("cuStreamSynchronize", stream)
            part[:] = buffer.array[:size_bytes]
            address += size_bytes

    def _parts(self, data: NDArray[Any]) -> Iterator[tuple[NDArray[Any], _PinnedBuffer]]:
        """Yield the data in parts that fit a buffer, each with the buffer whose turn it is."""
        for index, first in enumerate(range(0, len(data), self._bytes)):
            yield data[first : first + self._bytes], self._buffers[index % 2]


def host_array(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Return an array uint8 [size_bytes] over memory at `address`, which it does not keep alive."""
    array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
    return array
