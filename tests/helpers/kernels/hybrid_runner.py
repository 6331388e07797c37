"""Runs a lowered program for two devices step by step, in memory that holds NaN or -1 wherever a step may not look.

The hot device is a second library of kernels for the CPU, with a thread of its own. Each has an arena of its own, and
there is one for what they share.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.fx import GraphModule

from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.lowering.lower import Lowered
from picompile_codegen.lowering.program import Arg, Device, tensor_bytes
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros

Array = NDArray[np.generic]

# What is to be kept from step to step; all else a step must write before it reads it.
_KEPT = ("flags", "abandoned", "stats", "stats.batch", "stats.device", "stats.batch.device")


class HybridRunner:
    """A program of `lowered` with its weights, like `lowered.Runner`."""

    def __init__(self, folder: Path, lowered: Lowered, graph_module: GraphModule, weights: WeightSource) -> None:
        self.program, self.slot, self.position, self._number = lowered.program, 0, 0, 0
        build_host_library(lowered.kernels, folder / "host.so")
        build_host_library(lowered.accelerator_built.values(), folder / "hot.so")
        self._libraries = {"host": HostLibrary(folder / "host.so"), "device": HostLibrary(folder / "hot.so")}
        sizes = (self.program.arena_bytes, self.program.device_arena_bytes, self.program.shared_arena_bytes)
        self._arenas = {
            memory: aligned_zeros((size,), np.uint8)
            for memory, size in zip(("host", "device", "shared"), sizes, strict=True)
        }
        self._memory = {("weight", name): array for name, array in _weights(lowered, graph_module, weights).items()}
        for name, tensor in self.program.buffers.items():
            size = tensor_bytes(tensor.dtype, tensor.shape)
            place = self._arenas[tensor.memory][tensor.offset or 0 :][:size]
            self._memory["buffer", name] = place.view(tensor.dtype).reshape(tensor.shape)
        for name, tensor in self.program.state.items():
            self._memory["state", name] = aligned_zeros(tensor.shape, tensor.dtype)
            self._memory["state", name].reshape(-1).view(np.uint8)[:] = 255
        self.bind()

    def bind(self) -> None:
        """Makes lists of the calls of both devices."""
        self._calls = {
            (function, device): self._libraries[device].bind(self._calls_of(function, device))
            for function in self.program.functions
            for device in ("host", "device")
        }

    def run(self, function: str, tokens: Sequence[int]) -> Array | None:
        """The logits of `function` for `tokens`, [rows of its logits, vocabulary]."""
        self._poison()
        count = len(tokens)
        self._buffer("step")[:3] = count, self.position, self.slot
        self._buffer("tokens")[:count] = tokens
        self._buffer("positions")[:count] = np.arange(self.position, self.position + count)
        self._step(function)
        self.position += count
        logits = self.program.logits.get(function)
        return None if logits is None else self._buffer(logits).copy()

    def run_batch(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Array:
        """The logits of `batch` for a token each of several sequences, [tokens, vocabulary]."""
        self._poison()
        count = len(tokens)
        self._buffer("step")[0] = count
        for name, values in (("tokens", tokens), ("positions", positions), ("slots", slots)):
            self._buffer(name)[:count] = values
        self._step("batch")
        assert np.isnan(self._buffer("logits.batch")[count:]).all(), "rows that do not count were written"
        return self._buffer("logits.batch")[:count].copy()

    def stats(self, name: str = "stats") -> dict[tuple[int, str], list[int]]:
        """By layer and part: computed and fired since the last call."""
        found = {}
        for part in self.program.ffn:
            rows = [self._buffer(each)[part.stats_row] for each in (name, f"{name}.device")]
            found[part.layer, part.part] = (rows[0] + rows[1]).tolist()
            for row in rows:
                row[:] = 0
        return found

    def _step(self, function: str) -> None:
        self._number += 1
        self._buffer("step")[3] = self._number
        with ThreadPoolExecutor(1) as device:
            running = device.submit(self._libraries["device"].run, self._calls[function, "device"], 2)
            self._libraries["host"].run(self._calls[function, "host"], 1)
            running.result()
        assert self._buffer("abandoned")[0] == 0, "one device waited in vain for the other"

    def _buffer(self, name: str) -> Array:
        return self._memory["buffer", name]

    def _poison(self) -> None:
        kept = {name: self._buffer(name).copy() for name in _KEPT if name in self.program.buffers}
        for arena in self._arenas.values():
            arena[:] = 255
        # A mask of something else than 0 and 1 would have kernels write anywhere.
        for name in (name for name, tensor in self.program.buffers.items() if tensor.dtype == "uint8"):
            self._buffer(name)[:] = 1
        for name, value in kept.items():
            self._buffer(name)[...] = value

    def _calls_of(self, function: str, device: Device) -> list[tuple[str, list[Array]]]:
        calls = (call for call in self.program.functions[function] if call.device == device)
        return [(call.kernel, [self._view(arg) for arg in call.args]) for call in calls]

    def _view(self, arg: Arg) -> Array:
        array = self._memory[arg.space, arg.name]
        dtype, shape = np.dtype(arg.dtype or array.dtype), arg.shape or array.shape
        flat = array.reshape(-1).view(np.uint8)[arg.offset :]
        return flat[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def _weights(lowered: Lowered, graph_module: GraphModule, weights: WeightSource) -> dict[str, Array]:
    found = {}
    for tensor in lowered.weights.tensors.values():
        value = tensor.produce(lambda node: evaluate_constant(graph_module, node, weights)).numpy()
        found[tensor.name] = aligned_zeros(value.shape, value.dtype)
        found[tensor.name][...] = value
    return found
