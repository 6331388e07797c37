"""Runs a lowered program step by step, in memory that holds NaN or -1 wherever a step may not look."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.lowering.lower import Lowered
from picompile_codegen.lowering.program import Arg, ProgramTensor
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros

# What is to be kept from step to step; all else a step must write before it reads it.
_KEPT = ("stats", "stats.batch")


class Runner:
    """A program of `lowered` with its weights. Steps are counted from position 0, and are of the sequence in `slot`."""

    slot = 0

    def __init__(self, path: Path, lowered: Lowered, graph_module: GraphModule, weights: WeightSource) -> None:
        self.path = path
        build_host_library(lowered.kernels, path)
        self.program, self.position = lowered.program, 0
        self._library = HostLibrary(path)
        self._arena = aligned_zeros((self.program.arena_bytes,), np.uint8)
        self._memory = {"buffer": {name: self._place(tensor) for name, tensor in self.program.buffers.items()}}
        self._memory["state"] = {name: _poisoned(tensor) for name, tensor in self.program.state.items()}
        self._memory["weight"] = {
            tensor.name: tensor.produce(lambda node: evaluate_constant(graph_module, node, weights)).numpy()
            for tensor in lowered.weights.tensors.values()
        }
        self._keep_aligned()
        self._calls = {name: self._library.bind(self.calls(name)) for name in self.program.functions}

    def run(self, function: str, tokens: list[int], threads: int = 2) -> torch.Tensor | None:
        """The logits of `function` for `tokens`, [rows of its logits, vocabulary]."""
        self.prepare(tokens)
        self._library.run(self._calls[function], threads)
        self.position += len(tokens)
        logits = self.program.logits.get(function)
        return None if logits is None else torch.from_numpy(self._memory["buffer"][logits].copy())

    def run_batch(self, tokens: list[int], positions: list[int], slots: list[int], threads: int = 2) -> torch.Tensor:
        """The logits of `batch` for a token each of several sequences, [tokens, vocabulary]."""
        self.prepare_batch(tokens, positions, slots)
        self._library.run(self._calls["batch"], threads)
        logits = torch.from_numpy(self._memory["buffer"]["logits.batch"].copy())
        assert logits[len(tokens) :].isnan().all(), "rows that do not count were written"
        return logits[: len(tokens)]

    def prepare(self, tokens: list[int]) -> None:
        """Fill the memory for a step with `tokens`."""
        self._poison()
        buffers = self._memory["buffer"]
        buffers["step"][:3] = len(tokens), self.position, self.slot
        buffers["tokens"][: len(tokens)] = tokens
        buffers["positions"][: len(tokens)] = np.arange(self.position, self.position + len(tokens))

    def prepare_batch(self, tokens: list[int], positions: list[int], slots: list[int]) -> None:
        """Fill the memory for a step of the function `batch`."""
        self._poison()
        buffers, count = self._memory["buffer"], len(tokens)
        buffers["step"][0] = count
        buffers["tokens"][:count], buffers["positions"][:count], buffers["slots"][:count] = tokens, positions, slots

    def forget(self) -> None:
        """No position of any cache was written."""
        for state in self._memory["state"].values():
            state.reshape(-1).view(np.uint8)[:] = 255

    def _poison(self) -> None:
        buffers = self._memory["buffer"]
        kept = {name: buffers[name].copy() for name in _KEPT if name in buffers}
        self._arena[:] = 255
        for name, value in kept.items():
            buffers[name][...] = value

    def calls(self, function: str) -> list[tuple[str, list[NDArray[np.uint8]]]]:
        """Each call of `function`: its kernel, and the arrays that it is given."""
        calls = self.program.functions[function]
        return [(call.kernel, [self._view(arg) for arg in call.args]) for call in calls]

    def written(self) -> list[NDArray[np.uint8]]:
        """All memory that a step may write: the arena and the states."""
        return [self._arena, *self._memory["state"].values()]

    def decode(self, tokens: list[int], threads: int = 2) -> torch.Tensor:
        """The logits after each of `tokens`, read one at a time from position 0 on: [tokens, vocabulary]."""
        self.position = 0
        rows = [self.run("decode", [token], threads) for token in tokens]
        return torch.cat([row for row in rows if row is not None])

    def stats(self) -> NDArray[np.int64]:
        """[parts, 2]: computed and fired since the last call."""
        buffer = self._memory["buffer"]["stats"]
        counts: NDArray[np.int64] = buffer.copy()
        buffer[:] = 0
        return counts

    def _place(self, tensor: ProgramTensor) -> NDArray[np.uint8]:
        assert tensor.offset is not None
        size = int(np.prod(tensor.shape)) * np.dtype(tensor.dtype).itemsize
        placed: NDArray[np.uint8] = self._arena[tensor.offset : tensor.offset + size]
        return placed.view(tensor.dtype).reshape(tensor.shape)

    def _keep_aligned(self) -> None:
        for name, value in self._memory["weight"].items():
            aligned = aligned_zeros(value.shape, value.dtype)
            aligned[...] = value
            self._memory["weight"][name] = aligned

    def _view(self, arg: Arg) -> NDArray[np.uint8]:
        array = self._memory[arg.space][arg.name]
        dtype, shape = np.dtype(arg.dtype or array.dtype), arg.shape or array.shape
        flat = array.reshape(-1).view(np.uint8)[arg.offset :]
        return flat[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def _poisoned(tensor: ProgramTensor) -> NDArray[np.uint8]:
    array = aligned_zeros(tensor.shape, tensor.dtype)
    array.reshape(-1).view(np.uint8)[:] = 255
    return array
