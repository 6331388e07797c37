"""The engine: an artifact in memory, its KV cache, and the position in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact import Artifact, open_artifact
from picompile_runtime.errors import RequestError
from picompile_runtime.machine import check_threads, default_threads
from picompile_runtime.memory import anonymous_map, array_at
from picompile_runtime.native import CallList, TensorTable
from picompile_runtime.program import FUNCTIONS, Argument, Call, FeedForward

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Firing:
    """Of the neurons of one feed-forward part, the share that decode steps computed and the share that fired."""

    part: FeedForward
    computed_share: float
    fired_share: float


def load(path: str | os.PathLike[str], threads: int | None = None) -> Engine:
    """Open, check and load the artifact in the folder `path`. Raises ArtifactError, MachineError or DoesNotFitError."""
    artifact = open_artifact(path)
    try:
        return Engine(artifact, threads)
    except BaseException:
        artifact.close()
        raise


class Engine:
    """Runs one sequence of tokens. Every method returns arrays of its own.

    An engine is not made for several threads: each call takes a lock and waits for its turn, but which token lands at
    which position is then a matter of luck. For several sequences at a time, load several engines; they share weights.
    """

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        """Take over an opened artifact; it is closed with the engine. `threads`: see `machine.default_threads`."""
        self.artifact = artifact
        self.threads = check_threads(threads) if threads is not None else default_threads()
        self._program = artifact.program
        self._library = artifact.load_code()
        self._lock = threading.RLock()
        arena = anonymous_map(self._program.arena_bytes, "the model's workspace")
        self._buffers = {name: array_at(arena, tensor) for name, tensor in self._program.buffers.items()}
        self._functions = self._bind(arena)
        self._seconds: dict[str, NDArray[np.float64]] = {}
        self._position = 0
        self._decode_steps = 0
        self._closed = False

    def _bind(self, arena: Any) -> Mapping[str, CallList]:
        places = {("buffer", name): (arena, tensor.offset) for name, tensor in self._program.buffers.items()}
        for name, tensor in self._program.state.items():
            places["state", name] = (anonymous_map(tensor.size_bytes, f"the cache {name}"), 0)
        for name, tensor in self.artifact.tensors.items():
            places["weight", name] = (self.artifact.weights, tensor.offset)

        def array(argument: Argument) -> NDArray[Any]:
            place, offset = places[argument.kind, argument.name]
            return array_at(place, replace(argument.view, offset=offset + argument.view.offset))

        tensors = TensorTable()
        functions = self._program.functions
        lists = {
            name: [(call.kernel, [array(arg) for arg in call.args]) for call in functions[name]] for name in FUNCTIONS
        }
        return {name: self._library.bind(calls, tensors) for name, calls in lists.items()}

    @property
    def context(self) -> int:
        """Tokens that fit at most."""
        return self._program.context

    @property
    def chunk(self) -> int:
        """Tokens that prefill and score take in one step."""
        return self._program.chunk

    @property
    def vocab(self) -> int:
        """Number of token ids; each logits array has this many columns."""
        return self._program.vocab

    @property
    def position(self) -> int:
        """Tokens seen so far: the place of the next one."""
        return self._position

    def reset(self) -> None:
        """Forget all tokens."""
        self.rewind(0)

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        with self._lock:
            if not 0 <= position <= self._position:
                raise RequestError(f"cannot rewind to position {position}; {self._position} tokens were seen")
            self._position = position

    def check(self, ids: Sequence[int]) -> None:
        """Raise RequestError unless `ids` are tokens of this model that fit behind those seen so far."""
        with self._lock:
            self._checked(ids)

    def prefill(self, ids: Sequence[int]) -> Logits:
        """Read `ids`; the logits [vocab] of what follows them."""
        with self._lock:
            tokens = self._checked(ids)
            if len(tokens) == 1:
                return self._decode(tokens)
            while len(tokens) > self.chunk:
                self._step("prefill", tokens[: self.chunk])
                tokens = tokens[self.chunk :]
            self._step("prefill_last", tokens)
            return self._logits("prefill_last", 1).ravel()

    def decode(self, token: int) -> Logits:
        """Read one token; the logits [vocab] of the next."""
        with self._lock:
            return self._decode(self._checked([token]))

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Read `ids` in chunks and give the logits of each, [tokens of the chunk, vocab]: row i is what follows ids[i].

        The chunks are read as the iterator is asked for them; nothing else may be read in between.
        """
        with self._lock:
            tokens = self._checked(ids)
        return self._score(tokens)

    def _score(self, tokens: NDArray[np.int32]) -> Iterator[Logits]:
        for start in range(0, len(tokens), self.chunk):
            with self._lock:
                part = self._checked(tokens[start : start + self.chunk])
                self._step("score", part)
                logits = self._logits("score", len(part))
            yield logits

    def firing(self) -> list[Firing]:
        """How sparsely each feed-forward part fired, over the decode steps since loading or `reset_firing`."""
        with self._lock:
            self._open()
            counts = [self._buffers["stats"][part.stats_row] / part.neurons for part in self._program.ffn]
            steps = max(self._decode_steps, 1)
            rows = zip(self._program.ffn, counts, strict=True)
            return [Firing(part, float(computed) / steps, float(fired) / steps) for part, (computed, fired) in rows]

    def reset_firing(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._open()
            if "stats" in self._buffers:
                self._buffers["stats"][:] = 0
            self._decode_steps = 0

    def start_timing(self) -> None:
        """Measure every kernel call from now on; this costs about 50 ns a call."""
        with self._lock:
            self._seconds = {name: np.zeros(len(calls)) for name, calls in self._functions.items()}

    def timing(self, function: str) -> list[tuple[Call, float]]:
        """The calls of `decode`, `prefill`, `prefill_last` or `score`, each with its seconds since `start_timing`."""
        with self._lock:
            if function not in self._seconds:
                raise RequestError(f"no times were measured for {function!r}; call start_timing() first")
            return list(zip(self._program.functions[function], self._seconds[function].tolist(), strict=True))

    def close(self) -> None:
        """Give the memory back. Nothing can be run afterwards; arrays that were returned stay valid."""
        with self._lock:
            self._closed = True
            self._functions, self._buffers = {}, {}
            self.artifact.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed")

    def _checked(self, ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """`ids` as int32 [tokens], if they are tokens of this model and fit behind those seen so far."""
        self._open()
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or not len(tokens):
            raise RequestError("there are no tokens to read; give at least one")
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= self.vocab:
            raise RequestError(
                f"tokens must be integers from 0 to {self.vocab - 1}; is this the model's own tokenizer?"
            )
        if self._position + len(tokens) > self.context:
            behind = f" behind the {self._position} before it" if self._position else ""
            what = f"prompt of {len(tokens)} tokens" if len(tokens) > 1 else "token"
            raise RequestError(f"a {what} does not fit the context of {self.context}{behind}; shorten it")
        return tokens.astype(np.int32)

    def _decode(self, token: NDArray[np.int32]) -> Logits:
        self._step("decode", token)
        self._decode_steps += 1
        return self._logits("decode", 1).ravel()

    def _step(self, function: str, tokens: NDArray[np.int32]) -> None:
        count = len(tokens)
        self._buffers["step"][:2] = count, self._position
        self._buffers["tokens"][:count] = tokens
        self._buffers["positions"][:count] = np.arange(self._position, self._position + count)
        self._library.run(self._functions[function], self.threads, self._seconds.get(function))
        self._position += count

    def _logits(self, function: str, rows: int) -> Logits:
        logits: Logits = self._buffers[self._program.logits[function]][:rows].copy()
        return logits


def mean_shares(rows: Sequence[Firing]) -> tuple[float, float]:
    """Computed and fired share over all neurons of the model; 1.0 each for a model with no feed-forward parts."""
    neurons = sum(row.part.neurons for row in rows)
    if not neurons:
        return 1.0, 1.0
    computed = sum(row.computed_share * row.part.neurons for row in rows)
    return computed / neurons, sum(row.fired_share * row.part.neurons for row in rows) / neurons
