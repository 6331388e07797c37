"""Runs CUDA kernels on arrays: their source is compiled for the CPU, with an emulation of blocks, warps and threads.

A kernel runs once for each order in which the emulation can let its threads run, on memory that holds the same every
time; what it computes must be the same to the last bit.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from helpers.kernels.emulator import ORDERS, Emulated
from helpers.kernels.workbench import Guarded, Workbench
from picompile_codegen.cuda.build import KernelLaunch, cuda_source
from picompile_codegen.cuda.function import CudaKernel


class CudaWorkbench(Workbench):
    """Kernels: those of `kernels` in one emulated source, any other in its own when it is first run.

    `sm` is the architecture of which the source is to be.
    """

    def __init__(self, path: Path, kernels: Iterable[CudaKernel] = (), sm: int = 80) -> None:
        self.path, self.sm = path, sm
        self._built: dict[str, tuple[Sequence[KernelLaunch], Emulated]] = {}
        self._compile(path, list(kernels))

    def _compile(self, path: Path, kernels: Sequence[CudaKernel]) -> None:
        if kernels:
            source = cuda_source(kernels)
            emulated = Emulated(f"#define PI_SM {self.sm}\n{source.text}", path)
            self._built |= {name: (launches, emulated) for name, launches in source.launches.items()}

    def _compiled(self, kernel: CudaKernel) -> tuple[Sequence[KernelLaunch], Emulated]:
        if kernel.name not in self._built:
            self._compile(self.path.with_name(f"{kernel.name}.so"), [kernel])
        return self._built[kernel.name]

    def call(self, kernel: CudaKernel, arrays: Sequence[Guarded], threads: int) -> None:
        """All launches of `kernel`, in every order; leaves what the first one computed."""
        launches, emulated = self._compiled(kernel)
        before = [guarded.memory.copy() for guarded in arrays]
        found: list[list[np.ndarray]] = []
        for order in ORDERS:
            for guarded, memory in zip(arrays, before, strict=True):
                guarded.memory[:] = memory
            for launch in launches:
                grid = (launch.grid.x, launch.grid.y, 1)
                given = [arrays[index].array for index in launch.args]
                emulated.launch(launch.symbol, grid, (launch.grid.threads, 1, 1), given, order)
            found.append([guarded.memory.copy() for guarded in arrays])
        for other in found[1:]:
            for argument, first, second in zip(kernel.arguments, found[0], other, strict=True):
                assert np.array_equal(first, second), f"{kernel.name}: {argument.name} depends on the order of threads"
        for guarded, memory in zip(arrays, found[0], strict=True):
            guarded.memory[:] = memory
