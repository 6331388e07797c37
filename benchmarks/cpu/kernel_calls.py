"""Kernels by themselves: their arguments, in so many copies that a call finds its weights in no cache."""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from picompile_codegen.cpu.kernel import Kernel
from picompile_runtime.devices.cpu.native import HostLibrary, seconds_of
from picompile_runtime.devices.memory import aligned_zeros

Arguments = dict[str, NDArray[np.generic]]
Fill = Callable[[str, NDArray[np.generic]], None]
"""Writes the values of an argument, which holds zeros, given its name."""

# Bytes below this make numbers below 1.06 in every format of weights and caches: nothing is infinite.
_BYTES_BELOW = 0x3C


def copied_arguments(kernel: Kernel, fill: Fill, copied: Collection[str], copies: int) -> Iterator[Arguments]:
    """Yield the arguments of `copies` calls; those in `copied` are copies of each other, the rest are the same.

    Where `x.data` is copied, `x.scale` is memory of the copy, too, as scales of weights are.
    """
    shared: Arguments = {}
    for argument in kernel.arguments:
        shared[argument.name] = aligned_zeros(argument.shape, np.dtype(argument.dtype))
        fill(argument.name, shared[argument.name])
    for _ in range(copies):
        arrays = dict(shared)
        for name in copied:
            copy = aligned_zeros(shared[name].shape, shared[name].dtype)
            copy[:] = shared[name]
            arrays[name] = copy
            scale = name.replace(".data", ".scale")
            if scale != name and scale in shared:
                arrays[scale] = copy.view(np.float16)
        yield arrays


def fill_with_bytes(array: NDArray[np.generic], rng: np.random.Generator) -> None:
    """Write random bytes that are small numbers in every format."""
    some = rng.integers(0, _BYTES_BELOW, 2**20, np.uint8)
    array.view(np.uint8).reshape(-1)[:] = np.resize(some, array.nbytes)


class KernelCalls:
    """Calls of one kernel, each with arguments of its own; `shared` has those of the first, and what all share."""

    def __init__(self, library: HostLibrary, kernel: Kernel, arguments: Sequence[Arguments]) -> None:
        self._library, self.shared = library, arguments[0]
        self._calls = self._library.bind(
            [(kernel.name, [arrays[name] for name in kernel.params]) for arrays in arguments]
        )

    def seconds(self, threads: int) -> NDArray[np.float64]:
        """Run all calls, one after another, and return how long each took: float64 [calls]."""
        stamps = np.zeros((len(self._calls), 2), np.int64)
        self._library.run(self._calls, threads, stamps)
        return seconds_of(stamps)
