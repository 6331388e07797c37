"""Runs a lowered program step by step, in memory that holds NaN or -1 wherever a step may not look.

A second device is a second library of kernels for the CPU, with a thread of its own. Each has an arena of its own, and
there is one for what they share.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from picompile.testing import GraphShape, build
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.lowering.lower import Lowered
from picompile_codegen.lowering.program import Arg, Device, ProgramTensor, tensor_bytes
from picompile_passes.base import Pass
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros

# What is to be kept from step to step; all else a step must write before it reads it.
_KEPT = ("flags", "abandoned", "stats", "stats.batch", "stats.accelerator", "stats.batch.accelerator")


def quantized(shape: GraphShape, *passes: Pass, form: str = "f16") -> GraphModule:
    """Return the graph of a model after `passes`, with weights in one format."""
    return Pipeline((*passes, Quantize(form)))(build(shape)).graph_module


def relative_error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    assert measured.isfinite().all(), "something was read that this step did not write"
    return float((measured - expected).norm() / expected.norm())


class Runner:
    """A program of `lowered` with its weights. Steps are counted from position 0, and are of the sequence in `slot`."""

    slot = 0

    def __init__(self, path: Path, lowered: Lowered, graph_module: GraphModule, weights: WeightSource) -> None:
        self.path, self.program, self.position, self._number = path, lowered.program, 0, 0
        build_host_library(lowered.kernels, path)
        self._libraries: dict[Device, HostLibrary] = {"host": HostLibrary(path)}
        if lowered.accelerator_built:
            build_host_library(lowered.accelerator_built.values(), path.with_name("hot.so"))
            self._libraries["accelerator"] = HostLibrary(path.with_name("hot.so"))
        sizes = (self.program.arena_bytes, self.program.accelerator_arena_bytes, self.program.shared_arena_bytes)
        arenas = [aligned_zeros((size,), np.uint8) for size in sizes]
        self._arenas = dict(zip(("host", "accelerator", "shared"), arenas, strict=True))
        self._memory = {"buffer": {name: self._place(tensor) for name, tensor in self.program.buffers.items()}}
        self._memory["state"] = {name: _poisoned(tensor) for name, tensor in self.program.state.items()}
        self._begin()
        self._memory["weight"] = {}
        for tensor in lowered.weights.tensors.values():
            value = tensor.produce(lambda node: evaluate_constant(graph_module, node, weights)).numpy()
            self._memory["weight"][tensor.name] = aligned_zeros(value.shape, value.dtype)
            self._memory["weight"][tensor.name][...] = value
        self.bind()

    def bind(self) -> None:
        """Makes lists of the calls of each device."""
        self._calls = {
            (name, device): library.bind(self.calls(name, device))
            for device, library in self._libraries.items()
            for name in self.program.functions
        }

    def run(self, function: str, tokens: list[int], threads: int = 2) -> torch.Tensor | None:
        """The logits of `function` for `tokens`, [rows of its logits, vocabulary]."""
        self.prepare(tokens)
        self._step(function, threads)
        self.position += len(tokens)
        logits = self.program.logits.get(function)
        return None if logits is None else torch.from_numpy(self._memory["buffer"][logits].copy())

    def run_batch(self, tokens: list[int], positions: list[int], slots: list[int], threads: int = 2) -> torch.Tensor:
        """The logits of `batch` for a token each of several sequences, [tokens, vocabulary]."""
        self.prepare_batch(tokens, positions, slots)
        self._step("batch", threads)
        logits = torch.from_numpy(self._memory["buffer"]["logits.batch"].copy())
        assert logits[len(tokens) :].isnan().all(), "rows that do not count were written"
        return logits[: len(tokens)]

    def _step(self, function: str, threads: int) -> None:
        if len(self._libraries) == 1:
            self._libraries["host"].run(self._calls[function, "host"], threads)
            return
        self._number += 1
        self._memory["buffer"]["step"][3] = self._number
        with ThreadPoolExecutor(1) as device:
            running = device.submit(self._libraries["accelerator"].run, self._calls[function, "accelerator"], threads)
            self._libraries["host"].run(self._calls[function, "host"], 1)
            running.result()
        assert self._memory["buffer"]["abandoned"][0] == 0, "one device waited in vain for the other"

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
        self._begin()

    def _begin(self) -> None:
        """Every sequence begins with recurrent state of zeros."""
        for name, tensor in self.program.state.items():
            if tensor.kind == "recurrent":
                self._memory["state"][name][:] = 0

    def _poison(self) -> None:
        buffers = self._memory["buffer"]
        kept = {name: buffers[name].copy() for name in _KEPT if name in buffers}
        for arena in self._arenas.values():
            arena[:] = 255
        if len(self._libraries) > 1:
            # A mask of something else than 0 and 1 would have kernels write anywhere where a side is late.
            for name in (name for name, tensor in self.program.buffers.items() if tensor.dtype == "uint8"):
                buffers[name][:] = 1
        for name, value in kept.items():
            buffers[name][...] = value

    def calls(self, function: str, device: Device = "host") -> list[tuple[str, list[NDArray[np.uint8]]]]:
        """Each call of `function` on a device: its kernel, and the arrays that it is given."""
        calls = (call for call in self.program.functions[function] if call.device == device)
        return [(call.kernel, [self._view(arg) for arg in call.args]) for call in calls]

    def written(self) -> list[NDArray[np.uint8]]:
        """All memory that a step may write: the arenas and the states."""
        return [*self._arenas.values(), *self._memory["state"].values()]

    def decode(self, tokens: list[int], threads: int = 2) -> torch.Tensor:
        """The logits after each of `tokens`, read one at a time from position 0 on: [tokens, vocabulary]."""
        self.position = 0
        rows = [self.run("decode", [token], threads) for token in tokens]
        return torch.cat([row for row in rows if row is not None])

    def score(self, tokens: list[int], chunk: int) -> torch.Tensor:
        """The logits after each of `tokens`, read `chunk` at a time from position 0 on: [tokens, vocabulary]."""
        self.position = 0
        rows = [self.run("score", tokens[start : start + chunk]) for start in range(0, len(tokens), chunk)]
        return torch.cat([row for row in rows if row is not None])[: len(tokens)]

    def check_sequences(self, texts: Sequence[list[int]]) -> list[torch.Tensor]:
        """Decode texts alone, then together: each token must have the same bits. Returns the logits of each text."""
        self.forget()
        alone = []
        for self.slot, text in enumerate(texts):
            alone.append(self.decode(text))
        self.forget()
        for step in range(max(map(len, texts))):
            going = [slot for slot, text in enumerate(texts) if step < len(text)]
            logits = self.run_batch([texts[slot][step] for slot in going], [step] * len(going), going)
            assert torch.equal(logits, torch.stack([alone[slot][step] for slot in going]))
        return alone

    def stats(self, name: str = "stats") -> NDArray[np.int64]:
        """[parts, 2]: computed and fired since the last call, on all devices."""
        buffers = [
            self._memory["buffer"][each] for each in (name, f"{name}.accelerator") if each in self.program.buffers
        ]
        counts: NDArray[np.int64] = sum(buffer.copy() for buffer in buffers)
        for buffer in buffers:
            buffer[:] = 0
        return counts

    def _place(self, tensor: ProgramTensor) -> NDArray[np.uint8]:
        assert tensor.offset is not None
        size = tensor_bytes(tensor.dtype, tensor.shape)
        placed: NDArray[np.uint8] = self._arenas[tensor.memory][tensor.offset : tensor.offset + size]
        return placed.view(tensor.dtype).reshape(tensor.shape)

    def _view(self, arg: Arg) -> NDArray[np.uint8]:
        array = self._memory[arg.space][arg.name]
        dtype, shape = np.dtype(arg.dtype or array.dtype), arg.shape or array.shape
        flat = array.reshape(-1).view(np.uint8)[arg.offset :]
        return flat[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def _poisoned(tensor: ProgramTensor) -> NDArray[np.uint8]:
    array = aligned_zeros(tensor.shape, tensor.dtype)
    array.reshape(-1).view(np.uint8)[:] = 255
    return array
