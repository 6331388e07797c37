"""What the engine asks of the hot device: a GPU, or a second partition of the CPU in its place.

A device has memory of its own, sees memory that it shares with the host, and runs one list of calls at a time, in
order, while the host does something else. The two meet at flags in shared memory: see `codegen`'s kernels `send`,
`receive`, `wait` and `signal`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.cpu.native import Stamps
from picompile_runtime.devices.memory import Tensor


@dataclass(frozen=True)
class ArgumentView:
    """An argument of a call: `tensor`, whose offset counts from the start of `memory`, as the device made it."""

    memory: Any
    tensor: Tensor


class Accelerator(Protocol):
    """One device. Methods are called by one thread at a time; errors are KernelError unless they say otherwise.

    `slow_stamps`: a step whose calls are stamped takes longer than others. `pins_memory`: what it adopts must be
    memory that may be written to, and no file.
    """

    slow_stamps: bool
    pins_memory: bool

    def graph_bytes(self, kernels: Sequence[str]) -> int:
        """Return an estimate of the memory that is kept for lists of calls of these kernels, beside their arguments."""

    def free_bytes(self) -> int | None:
        """What of its memory is free now; None where it has none of its own."""

    def allocate(self, size_bytes: int, purpose: str) -> Any:
        """Zeroed memory of the device, aligned to 256 bytes. Raises DoesNotFitError, which names `purpose`."""

    def share(self, size_bytes: int, purpose: str) -> tuple[Any, NDArray[Any]]:
        """Zeroed memory that device and host both see: for `ArgumentView`, and as an array uint8 [size_bytes] of the host."""

    def adopt(self, memory: mmap.mmap) -> Any:
        """Memory of the host that the device shall see as well, as `ArgumentView` takes it. Raises DoesNotFitError."""

    def write(self, memory: Any, offset: int, data: NDArray[Any]) -> None:
        """Copies an array uint8 [n] to the device's memory, and returns when `data` may change again."""

    def protect(self, memory: Any) -> None:
        """Make memory that `allocate` gave read-only, where the device can."""

    def read(self, memory: Any, offset: int, data: NDArray[Any]) -> None:
        """Copies from the device's memory into an array uint8 [n], once the device has done all that it was given."""

    def copy(self, memory: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies inside of one memory: (from offset, to offset, bytes) each, no two of which overlap."""

    def bind(self, calls: Sequence[tuple[str, Sequence[ArgumentView]]], breaks: Sequence[int] = ()) -> Any:
        """Make a list of calls, each a kernel's name and its arguments, ready to run. Raises ArtifactError.

        `breaks` are the numbers of calls, ascending, before which the device may do something else for a moment.
        """

    def tell_failures(self, abandoned: NDArray[np.int32]) -> None:
        """Set abandoned[0], which the host's waits look at, as soon as it is known that a list of calls has failed."""

    def start(self, calls: Any, stamps: Stamps | None = None) -> None:
        """Begins to run what `bind` returned, and returns without waiting for it.

        By the time that `wait` returns without an error, `stamps`, int64 [calls, 2], has when each call began and
        ended, in ns of the clock of `time.monotonic_ns`.
        """

    def wait(self) -> None:
        """Returns when the device has done all that it was given. Raises KernelError if any of it failed."""

    def after_fork(self) -> str | None:
        """Take note that this is a forked process, with the memory of its parent and none of the parent's threads.

        Returns:
            Why the device cannot be used here, None where it can.
        """

    def close(self) -> None:
        """Gives all memory back. Nothing may be called after it."""
