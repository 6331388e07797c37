"""Runs single kernels on arrays, in conditions that show what a kernel must not do.

Everything that it must not read holds NaN or -1: its outputs, its scratch memory, rows past the tokens of a step. Every
array lies between guards that are compared afterwards, so that a write outside is seen as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import DEFAULT_ISA, ISAS, Isa, current
from picompile_codegen.cpu import write_kernel
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import KernelArgument, KernelSpec
from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_runtime.devices.cpu.native import HostLibrary

Array = NDArray[Any]
Inputs = Mapping[str, Array]

_GUARD_BYTES = 128


@dataclass
class Guarded:
    """An array between two guards. All ones in every bit: NaN as a float, -1 as an integer."""

    memory: Array
    array: Array

    @classmethod
    def of(cls, dtype: Any, shape: Sequence[int]) -> "Guarded":
        """An array at an odd multiple of 64, as buffers of a program may be: no kernel runs by luck."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(size + 4 * _GUARD_BYTES, 255, np.uint8)
        start = _GUARD_BYTES + (64 - memory.ctypes.data) % _GUARD_BYTES
        return cls(memory, memory[start : start + size].view(dtype).reshape(shape))

    def is_intact(self) -> bool:
        start = self.array.ctypes.data - self.memory.ctypes.data
        end = start + self.array.nbytes
        return bool((self.memory[:start] == 255).all() and (self.memory[end:] == 255).all())


def _shape(argument: KernelArgument, arguments: Sequence[KernelArgument], given: Inputs) -> Sequence[int]:
    """Return how large an argument is: it may be a part of what there is room for."""
    if argument.counted is None:
        return argument.shape
    most = next(each.below or 0 for each in arguments if each.name == argument.counted) - 1
    return argument.shape[0] * int(given[argument.counted][0]) // most, *argument.shape[1:]


class Workbench:
    """Kernels, all written for `isa`: those of `kernels` in one library, any other in its own when it is first run."""

    # How many threads must give the same bits.
    threads: Sequence[int] = (2, 1, 3)

    def __init__(self, path: Path, kernels: Sequence[Kernel] = (), isa: Isa = ISAS[DEFAULT_ISA]) -> None:
        self.path = path
        self._isa = isa
        self._paths: dict[tuple[str, str], Path] = {}
        self._written: dict[tuple[KernelSpec, str], Kernel] = {}
        if kernels:
            self.compile(kernels)

    def compile(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels into one library, which is quicker than one by one."""
        path = self.path if not self._paths else self._path(kernels[0])
        build_host_library(kernels, path, self._isa)
        self._paths |= {self._key(kernel): path for kernel in kernels}

    def _library(self, kernel: Kernel) -> HostLibrary:
        key = self._key(kernel)
        if key not in self._paths:
            path = self._path(kernel)
            build_host_library([kernel], path, self._isa)
            self._paths[key] = path
        return HostLibrary(self._paths[key])

    def _key(self, kernel: Kernel) -> tuple[str, str]:
        """A kernel is another one where it is compiled in another way."""
        return kernel.name, repr(self._isa.llvm)

    def _path(self, kernel: Kernel) -> Path:
        return self.path.with_name(f"{kernel.name}.{len(self._paths)}.so")

    def written(self, kernel: Kernel | KernelSpec) -> Kernel:
        """Return the kernel of a spec, which is written once for each instruction set."""
        if not isinstance(kernel, KernelSpec):
            return kernel
        key = (kernel, current().name)
        if key not in self._written:
            self._written[key] = write_kernel(kernel)
        return self._written[key]

    def same(self, kernel: Kernel | KernelSpec, inputs: Inputs, **step: int) -> dict[str, Array]:
        """As `run`, whichever number of threads there are."""
        kernel = self.written(kernel)
        found, *others = (self.run(kernel, inputs, threads=threads, **step) for threads in self.threads)
        for name in (argument.name for argument in kernel.arguments if not argument.scratch):
            assert all(other[name].tobytes() == found[name].tobytes() for other in others), f"{name} depends on threads"
        return found

    def run(
        self,
        kernel: Kernel | KernelSpec,
        inputs: Inputs,
        *,
        tokens: int = 1,
        position: int = 0,
        slot: int = -1,
        threads: int = 2,
    ) -> dict[str, Array]:
        """All arguments of a kernel by name, after a call. A packed matrix `w` is given as bytes [rows, row_bytes]."""
        kernel = self.written(kernel)
        step = np.full(8, -1, np.int32)
        step[:3] = tokens, position, slot
        given = {"step": step, **inputs}
        arrays = {each.name: Guarded.of(each.dtype, _shape(each, kernel.arguments, given)) for each in kernel.arguments}
        for argument in kernel.arguments:
            name, _, part = argument.name.partition(".")
            if argument.access == "tickets":
                arrays[name].array[:] = 0
            elif name in given:
                value = given[name].view(argument.dtype) if part else given[name]
                arrays[argument.name].array[: len(value)] = value
        self.call(kernel, [arrays[name] for name in kernel.params], threads)
        damaged = [name for name, guarded in arrays.items() if not guarded.is_intact()]
        assert not damaged, f"{kernel.name} wrote outside of {damaged}"
        for argument in kernel.arguments:
            if argument.access == "tickets":
                assert not arrays[argument.name].array.any(), f"{kernel.name} leaves tickets that are not zero"
        return {name: guarded.array for name, guarded in arrays.items()}

    def call(self, kernel: Kernel, arrays: Sequence[Guarded], threads: int) -> None:
        """Calls `kernel` with `arrays`, in the order of its arguments."""
        library = self._library(kernel)
        library.run(library.bind([(kernel.name, [guarded.array for guarded in arrays])]), threads)


def uniform(rng: np.random.Generator, *shape: int) -> Array:
    """float32 numbers between -1 and 1."""
    return rng.uniform(-1, 1, shape).astype(np.float32)


def packed(rng: np.random.Generator, format_name: str, rows: int, columns: int) -> tuple[Array, Array]:
    """A random matrix: its bytes [rows, row_bytes], and the weights that they stand for, float64 [rows, columns]."""
    data = quantize_rows(torch.from_numpy(uniform(rng, rows, columns)), format_name)
    return data.numpy(), dequantize_rows(data, format_name, columns).numpy().astype(np.float64)


def as_seen(x: Array, format_name: str, activation_bytes: int = 1) -> NDArray[np.float64]:
    """Activations float32 [tokens, columns] as products with a matrix of this format see them.

    f16, fp8 and nf4 see them as they are. All others see bytes: the largest magnitude of 32 columns is 127 of them, or
    16319 of two bytes each.
    """
    most = np.float32({1: 127, 2: 16319}[activation_bytes])
    if format_name in ("f16", "fp8", "nf4"):
        return x.astype(np.float64)
    tokens, columns = x.shape
    groups = np.zeros((tokens, -(-columns // 32) * 32), np.float32)
    groups[:, :columns] = x
    groups = groups.reshape(tokens, -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, most / largest, np.float32(0)).astype(np.float32)
    values = np.rint(groups * inverse).astype(np.float64) * (largest / most)
    return values.reshape(tokens, -1)[:, :columns]


def assert_close(measured: Array, expected: Array, tolerance: float = 2e-5) -> None:
    """Every element within `tolerance` times the largest expected one."""
    assert measured.shape == expected.shape
    assert np.isfinite(measured).all(), "something that must not be read was read, or nothing was written"
    error = np.abs(measured - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"off by {error:.2e} of the largest value"


def assert_rows(found: Array, expected: Array, tolerance: float = 0.0) -> None:
    """Check the first rows, bit by bit if there is no tolerance, and that nothing was written to the others."""
    first = found[: len(expected)]
    if tolerance:
        assert_close(first, expected, tolerance)
    else:
        assert np.array_equal(first, expected)
    assert (found[len(expected) :].view(np.uint8) == 255).all(), "rows that do not count were written"
