"""Measures the machine before anything of a model runs on it: round trips to the GPU, and the speed of memory."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from picompile_runtime import MachineError
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import CudaAccelerator, CudaImages
from picompile_runtime.devices.cuda import ping_pong as round_trips
from picompile_runtime.devices.memory import Tensor

_PASSES = 5


def ping_pong(images: CudaImages, library: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of round trips between host and GPU, where each waits for the other's write.

    Raises MachineError where one of them does not see the other's writes.
    """
    with closing(CudaAccelerator(images)) as device:
        return asdict(round_trips(device, HostLibrary(library), rounds))


def start_seconds(images: CudaImages, library: Path, counts: Sequence[int]) -> dict[str, float | None]:
    """Return how long it takes to start graphs whose first kernel waits for the host, by the launches behind that.

    A GPU takes only so much work at a time. None where it took no more, so that host and GPU waited for each other.
    """
    kernel = next(name for name in images.kernels if name.startswith("copy_words"))
    found: dict[str, float | None] = {}
    with closing(CudaAccelerator(images)) as device:
        memory = device.allocate(2**12, "what is copied")
        views = [ArgumentView(memory, Tensor("int32", (8,), offset)) for offset in (0, 1024, 2048)]
        for count in counts:
            try:
                found[str(count)] = round_trips(device, HostLibrary(library), 1, [(kernel, views)] * count).start_s
            except MachineError:
                found[str(count)] = None
    return found


def read_bandwidths(library: Path, threads: Sequence[int]) -> dict[str, float]:
    """Return the bytes per second that kernels' threads read from memory, by their number as text."""
    loaded, found = HostLibrary(library), {}
    for count in threads:
        reader = MemoryReader(loaded, count)
        found[str(count)] = float(np.median([np.median(reader.read()) for _ in range(_PASSES)]))
    return found
