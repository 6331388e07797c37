"""Runs CUDA kernels on arrays: their source is compiled for the CPU, with an emulation of blocks, warps and threads.

A kernel runs once for each order in which the emulation can let its threads run, on memory that holds the same every
time; what it computes must be the same to the last bit.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from helpers.kernels.emulator import ORDERS, Emulated
from helpers.kernels.workbench import Guarded, Workbench
from picompile_codegen.cuda.build import cuda_source
from picompile_codegen.cuda.function import CudaKernel


class CudaWorkbench(Workbench):
    """Kernels compiled into one emulated source at `path`."""

    def __init__(self, path: Path, kernels: Iterable[CudaKernel]) -> None:
        source = cuda_source(kernels)
        self._launches = source.launches
        self._emulated = Emulated(source.text, path)

    def call(self, kernel: CudaKernel, arrays: Sequence[Guarded], threads: int) -> None:
        """All launches of `kernel`, in every order; leaves what the first one computed."""
        before = [guarded.memory.copy() for guarded in arrays]
        found: list[list[np.ndarray]] = []
        for order in ORDERS:
            for guarded, memory in zip(arrays, before, strict=True):
                guarded.memory[:] = memory
            for launch in self._launches[kernel.name]:
                grid = (launch.grid.x, launch.grid.y, 1)
                given = [arrays[index].array for index in launch.args]
                self._emulated.launch(launch.symbol, grid, (launch.grid.threads, 1, 1), given, order)
            found.append([guarded.memory.copy() for guarded in arrays])
        for other in found[1:]:
            for argument, first, second in zip(kernel.arguments, found[0], other, strict=True):
                assert np.array_equal(first, second), f"{kernel.name}: {argument.name} depends on the order of threads"
        for guarded, memory in zip(arrays, found[0], strict=True):
            guarded.memory[:] = memory
