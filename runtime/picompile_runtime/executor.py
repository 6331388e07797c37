"""A program in memory: its buffers, its caches, its weights, and each of its functions as a list of calls."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact import WEIGHTS, Artifact
from picompile_runtime.errors import RequestError
from picompile_runtime.memory import anonymous_map, array_at, check_total
from picompile_runtime.native import CallList, TensorTable
from picompile_runtime.program import BATCH, Argument, Call, Program
from picompile_runtime.resident import Weights, load_weights

Ids = NDArray[np.int32]
Logits = NDArray[np.float32]


class Executor:
    """Runs steps of a program. It knows neither which tokens make sense nor where sequences are: see `Engine`."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        """Raises DoesNotFitError where this machine has no memory for the caches, ArtifactError for lacking kernels."""
        self._program, self._threads = artifact.program, threads
        self.library = artifact.load_code()
        _check_memory(self._program)
        arena = anonymous_map(self._program.arena_bytes, "the model's workspace")
        self.buffers = {name: array_at(arena, tensor) for name, tensor in self._program.buffers.items()}
        state = {
            name: anonymous_map(tensor.size_bytes, f"the cache {name}") for name, tensor in self._program.state.items()
        }
        self._state = {name: array_at(state[name], tensor) for name, tensor in self._program.state.items()}
        other_bytes = self._program.arena_bytes + sum(tensor.size_bytes for tensor in self._program.state.values())
        sha256 = artifact.manifest.files[WEIGHTS].sha256
        self._weights: Weights | None = load_weights(artifact.weights, sha256, threads, other_bytes)
        self._functions = self._bind(artifact, self._weights, arena, state)
        self._seconds: dict[str, NDArray[np.float64]] = {}
        self._step, self._tokens = self.buffers["step"], self.buffers["tokens"]
        self._positions, self._slots = self.buffers["positions"], self.buffers["slots"]

    def _bind(
        self, artifact: Artifact, weights: Weights, arena: mmap.mmap, state: Mapping[str, mmap.mmap]
    ) -> dict[str, CallList]:
        places = {("buffer", name): (arena, tensor.offset) for name, tensor in self._program.buffers.items()}
        places |= {("state", name): (memory, 0) for name, memory in state.items()}
        for name, tensor in artifact.tensors.items():
            places["weight", name] = (weights.memory, weights.start + tensor.offset)

        def array(argument: Argument) -> NDArray[Any]:
            place, offset = places[argument.kind, argument.name]
            return array_at(place, replace(argument.view, offset=offset + argument.view.offset))

        tensors = TensorTable()
        return {
            name: self.library.bind([(call.kernel, [array(arg) for arg in call.args]) for call in calls], tensors)
            for name, calls in self._program.functions.items()
        }

    def run(self, function: str, tokens: Ids, position: int, slot: int) -> None:
        """One step with consecutive tokens of the sequence in `slot`, the first of them at `position`."""
        count = len(tokens)
        self._step[:3] = count, position, slot
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(position, position + count)
        self._call(function)

    def run_one(self, token: int, position: int, slot: int) -> None:
        """A step of `decode`, which is the same with less to do before it."""
        step = self._step
        step[0], step[1], step[2] = 1, position, slot
        self._tokens[0], self._positions[0] = token, position
        self._call("decode")

    def run_batch(self, tokens: Ids, positions: Sequence[int], slots: Sequence[int]) -> None:
        """A step of `batch`: the next token of several sequences, each in a slot and at a position of its own."""
        count = len(tokens)
        self._step[:3] = count, 0, 0
        self._tokens[:count], self._positions[:count], self._slots[:count] = tokens, positions, slots
        self._call(BATCH)

    def logits(self, function: str, rows: int, copy: bool = True) -> Logits:
        """What the last step of `function` left, [rows, vocab]: a copy, or the memory that the next step writes to."""
        logits: Logits = self.buffers[self._program.logits[function]][:rows]
        return logits.copy() if copy else logits

    def copy_cache(self, source: int, target: int, count: int) -> None:
        """The first `count` positions of the cache in slot `target` become those in slot `source`."""
        for state in self._state.values():
            state[target, :, :count] = state[source, :, :count]

    def start_timing(self) -> None:
        """Measure every call from now on."""
        self._seconds = {name: np.zeros(len(calls)) for name, calls in self._functions.items()}

    def stop_timing(self) -> None:
        """Forget the times, and measure no more."""
        self._seconds = {}

    def timing(self, function: str) -> list[tuple[Call, float]]:
        """The calls of a function, each with its seconds since `start_timing`."""
        if function not in self._seconds:
            raise RequestError(f"no times were measured for {function!r}; call start_timing() first")
        return list(zip(self._program.functions[function], self._seconds[function].tolist(), strict=True))

    def close(self) -> None:
        """Give the memory back."""
        self._functions, self.buffers, self._state, self._weights = {}, {}, {}, None
        self._step = self._tokens = self._positions = self._slots = np.empty(0, np.int32)

    def _call(self, function: str) -> None:
        self.library.run(self._functions[function], self._threads, self._seconds.get(function))


def _check_memory(program: Program) -> None:
    """It must be possible to fill all caches at the same time."""
    cache_bytes = sum(tensor.size_bytes for tensor in program.state.values())
    sequences = "" if program.sequences == 1 else f"{program.sequences} sequences of "
    check_total(cache_bytes + program.arena_bytes, f"a cache for {sequences}{program.context} tokens")
