"""Copies to the GPU from memory of the host that the system cannot pin: parts of them go through pinned buffers.

The GPU can access only pinned memory by itself. In a graph each part of such a copy is two nodes: the host copies the
part to a buffer, and the GPU copies it from there. Buffers take turns. While the GPU copies from one, the host fills
the next, and a buffer is filled again when the copy from it is over:

    host:  fill 0 | fill 1 | fill 0 | fill 1 | …
    GPU:            copy 0 | copy 1 | copy 0 | copy 1 | …

All graphs that use the buffers run in one stream, so each begins when the copies of the one before it are over.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass

from picompile_runtime.devices.cuda.driver import Driver

_BUFFERS = 2


class CopyPart(ctypes.Structure):
    """A copy inside the host's memory: the arguments of `pi_copy_part` in native/host.c."""

    _fields_ = (("target", c_void_p), ("source", c_void_p), ("size_bytes", c_uint64))


@dataclass(frozen=True)
class _Buffer:
    """Pinned memory, and two events of a capture: the host has filled it, the GPU has copied from it."""

    address: int
    filled: c_void_p
    copied: c_void_p


class BounceBuffers:
    """Two pinned buffers of `size_bytes`, with the stream and the host function that fill them in captures.

    `function` is the address of `pi_copy_part`. It is C, so that the driver's thread needs nothing of Python, which may
    be busy or about to end; and nothing in it can fail.
    """

    def __init__(self, driver: Driver, function: int, size_bytes: int, stack: ExitStack) -> None:
        """Make the buffers, which `stack` frees. Needs the current context in which graphs will run."""
        self.function, self.size_bytes = function, size_bytes
        self.stream = stack.enter_context(driver.stream())
        self.buffers = [_make_buffer(driver, size_bytes, stack) for _ in range(_BUFFERS)]


class BouncedCopies:
    """The copies of one graph that go through `BounceBuffers`.

    The graph refers to its parts, so it must be kept as long as the graph.
    """

    def __init__(self, driver: Driver, buffers: BounceBuffers, stream: c_void_p, beside: bool) -> None:
        """Prepare to capture copies in `stream`.

        The host fills buffers in a stream `beside` it, which waits for `follow`; else in the same stream, one after the
        other.
        """
        self._driver, self._buffers, self._stream, self._beside = driver, buffers, stream, beside
        self._parts: list[CopyPart] = []

    def follow(self, event: c_void_p) -> None:
        """Let filling begin after `event`, which makes the stream for it a part of the capture."""
        self._wait(self._filling, event)

    def enqueue(self, source: int, target: int, size_bytes: int) -> None:
        """Add a copy from the host's address `source` to the GPU's address `target` to the capture."""
        for start in range(0, size_bytes, self._buffers.size_bytes):
            part_bytes = min(self._buffers.size_bytes, size_bytes - start)
            buffer = self._fill(source + start, part_bytes)
            self._record(buffer.filled, self._filling)
            self._wait(self._stream, buffer.filled)
            self._driver.call("cuMemcpyHtoDAsync_v2", target + start, buffer.address, part_bytes, self._stream)
            self._record(buffer.copied, self._stream)

    @property
    def _filling(self) -> c_void_p:
        return self._buffers.stream if self._beside else self._stream

    def _fill(self, source: int, part_bytes: int) -> _Buffer:
        """Have the host fill the next buffer, and return it."""
        number, buffers = len(self._parts), self._buffers.buffers
        buffer = buffers[number % len(buffers)]
        self._parts.append(CopyPart(buffer.address, source, part_bytes))
        if number >= len(buffers):
            self._wait(self._filling, buffer.copied)
        part = ctypes.addressof(self._parts[-1])
        self._driver.call("cuLaunchHostFunc", self._filling, self._buffers.function, part)
        return buffer

    def _record(self, event: c_void_p, stream: c_void_p) -> None:
        if self._beside:
            self._driver.call("cuEventRecord", event, stream)

    def _wait(self, stream: c_void_p, event: c_void_p) -> None:
        if self._beside:
            self._driver.call("cuStreamWaitEvent", stream, event, 0)


def _make_buffer(driver: Driver, size_bytes: int, stack: ExitStack) -> _Buffer:
    address = stack.enter_context(driver.pinned_memory(size_bytes)).value or 0
    return _Buffer(address, stack.enter_context(driver.event()), stack.enter_context(driver.event()))
