"""The interface of accelerators: a GPU, or a second partition of the CPU in its place.

An accelerator has its own memory, sees memory that it shares with the host, and runs one list of calls at a time, in
order, while the host does something else. The two meet at flags in shared memory: see `codegen`'s kernels `send`,
`receive`, `wait` and `signal`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.cpu.native import Stamps
from picompile_runtime.devices.memory import Tensor

if TYPE_CHECKING:
    from picompile_runtime.artifact.interfaces import KernelInterface
    from picompile_runtime.artifact.reader import Artifact


@dataclass(frozen=True)
class ArgumentView:
    """An argument of a call: `tensor`, whose offset counts from the start of `memory`, which the accelerator made."""

    memory: Any
    tensor: Tensor


class Accelerator(Protocol):
    """One accelerator. One thread at a time calls its methods; errors are KernelError unless they say otherwise.

    Attributes:
        slow_stamps: whether a step whose calls are stamped takes longer than others.
        pins_memory: whether memory that it adopts must be writable, and no mapped file.
        unpinned_bytes: bytes of the memory that it adopted and that it can only copy by way of buffers, which takes
            longer.
    """

    slow_stamps: bool
    pins_memory: bool
    unpinned_bytes: int

    def graph_bytes(self, kernels: Sequence[str]) -> int:
        """Return an estimate of the bytes that lists of calls of these kernels need, beside their arguments."""

    def free_bytes(self) -> int | None:
        """Return how many bytes of its memory are free now; None if it has no memory of its own."""

    def allocate(self, size_bytes: int, purpose: str) -> Any:
        """Return zeroed memory of the accelerator, aligned to 256 bytes. Raises DoesNotFitError, naming `purpose`."""

    def share(self, size_bytes: int, purpose: str) -> tuple[Any, NDArray[Any]]:
        """Return zeroed memory that accelerator and host both see.

        Returns:
            The memory as `ArgumentView` takes it, and as the host's array uint8 [size_bytes].
        """

    def adopt(self, memory: mmap.mmap) -> Any:
        """Let the accelerator see memory of the host, and return it as `ArgumentView` takes it.

        If it can only copy from that memory, `bind` raises DoesNotFitError where a kernel uses it otherwise. Raises
        DoesNotFitError if it cannot do that either.
        """

    def write(self, memory: Any, offset: int, data: NDArray[Any]) -> None:
        """Copy an array uint8 [n] to the accelerator's memory, and return when `data` may change again."""

    def protect(self, memory: Any) -> None:
        """Make memory that `allocate` returned read-only, if the accelerator can."""

    def read(self, memory: Any, offset: int, data: NDArray[Any]) -> None:
        """Copy from the accelerator's memory to an array uint8 [n], after everything that was started has run."""

    def copy(self, memory: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy inside one memory; each move is (from offset, to offset, bytes), and no two overlap."""

    def bind(self, calls: Sequence[tuple[str, Sequence[ArgumentView]]], breaks: Sequence[int] = ()) -> Any:
        """Prepare a list of calls, each a kernel's name and its arguments, and return the list for `start`.

        `breaks` are the numbers of calls, ascending, before which the accelerator may do something else for a moment.
        Raises ArtifactError, and DoesNotFitError as `adopt` says.
        """

    def tell_failures(self, abandoned: NDArray[np.int32]) -> None:
        """Set abandoned[0], which the host's waits look at, as soon as a list of calls is known to have failed."""

    def start(self, calls: Any, stamps: Stamps | None = None) -> None:
        """Start a list from `bind`, and return without waiting for it.

        When `wait` has returned without an error, `stamps`, int64 [calls, 2], has the times when each call began and
        ended, in ns of the clock of `time.monotonic_ns`.
        """

    def wait(self) -> None:
        """Return when everything that was started has run. Raises KernelError if any of it failed."""

    def after_fork(self) -> str | None:
        """Adapt to being in a forked process, which has its parent's memory and none of the parent's threads.

        Returns:
            Why the accelerator cannot be used here, None if it can.
        """

    def close(self) -> None:
        """Free all memory. Nothing may be called afterwards."""


@dataclass(frozen=True)
class AcceleratorKind:
    """One kind of accelerators, by the name of the back end that makes code for it.

    Attributes:
        name: as manifest.json calls it.
        open: `open(artifact, threads)` opens the accelerator that an artifact is for; one that is part of the CPU runs
            `threads` threads. Raises MachineError if this machine has none, ArtifactError if there is no code for it.
        interfaces: returns what the artifact's code says of its kernels, None where it says nothing.
        verify: raises ArtifactError if the code lacks a kernel that the program calls. It needs no accelerator.
        on_cpu: whether it is part of the CPU, with which it shares threads and memory.
    """

    name: str
    open: Callable[[Artifact, int], Accelerator]
    interfaces: Callable[[Artifact], Mapping[str, KernelInterface] | None]
    verify: Callable[[Artifact], None]
    on_cpu: bool = False
