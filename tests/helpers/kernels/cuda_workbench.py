"""Runs CUDA kernels on arrays: their source is compiled for the CPU, with an emulation of blocks, warps and threads.

A kernel runs once for each order in which the emulation can let its threads run, on memory that holds the same every
time; what it computes must be the same to the last bit.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from helpers.kernels.emulator import ORDERS, Emulated
from helpers.kernels.workbench import Guarded, Workbench
from picompile_codegen import cuda
from picompile_codegen.cuda.build import KernelLaunch, cuda_source
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.specs import KernelSpec

_MOST_LIBRARIES = 16

# The fixture `either`, for `sampled(fixtures=EITHER, ...)`: fast tests have each value on the CPU or on a GPU.
EITHER = {"either": ("cpu", "gpu")}


class CudaWorkbench(Workbench):
    """Kernels for the architecture `sm`. Each is compiled when it is first run, into `folder`."""

    threads = (2,)

    def __init__(self, folder: Path, sm: int = 80) -> None:
        self._folder, self._sm = folder, sm
        self._built: dict[str, tuple[Sequence[KernelLaunch], Emulated]] = {}

    def compile(self, kernels: Iterable[CudaKernel]) -> None:
        """Compile `kernels` at once, which is quicker than one by one."""
        kernels = list(kernels)
        source = cuda_source(kernels)
        emulated = Emulated(f"#define PI_SM {self._sm}\n{source.text}", self._folder / f"{kernels[0].name}.so")
        self._built |= {name: (launches, emulated) for name, launches in source.launches.items()}
        # Each library holds up to 2,000 mappings, and a process may have 65,530.
        latest = list(dict.fromkeys(id(library) for _, library in self._built.values()))[-_MOST_LIBRARIES:]
        self._built = {name: each for name, each in self._built.items() if id(each[1]) in latest}

    def written(self, kernel: CudaKernel | KernelSpec) -> CudaKernel:
        return cuda.write_kernel(kernel) if isinstance(kernel, KernelSpec) else kernel

    def call(self, kernel: CudaKernel, arrays: Sequence[Guarded], threads: int) -> None:
        """All launches of `kernel`, in every order; leaves what the first one computed."""
        if kernel.name not in self._built:
            self.compile([kernel])
        launches, emulated = self._built[kernel.name]
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
