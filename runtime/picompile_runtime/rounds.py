"""Rounds of a benchmark: a prompt, then tokens one by one, and the speed of memory before and after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.bandwidth import MemoryReader
from picompile_runtime.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.trace import Step, recorded

# A few: they show what all others are like.
_TRACED_STEPS = 8


@dataclass(frozen=True)
class Lengths:
    """What is measured: a prompt of `prompt` tokens, then `decode` steps, each of a token in `batch` sequences.

    With `depth` either begins behind so many tokens; without it the prompt is the first in the cache, and decoding
    goes on behind it.
    """

    prompt: int = 512
    decode: int = 128
    depth: int | None = None
    batch: int = 1

    @property
    def decode_depth(self) -> int:
        """Tokens in the cache before the first step."""
        return self.prompt if self.depth is None else self.depth

    @property
    def total(self) -> int:
        """Tokens that must fit the context."""
        return self.prompt + self.decode if self.depth is None else self.depth + max(self.prompt, self.decode)

    @property
    def function(self) -> str:
        """The function of the program that makes the steps."""
        return "decode" if self.batch == 1 else "batch"

    def check(self, engine: Engine) -> None:
        """Raises RequestError for what cannot be measured."""
        if self.prompt < 1 or self.decode < 1:
            raise RequestError("a benchmark needs at least one prompt token, one decoded token and one repetition")
        if self.depth is not None and self.depth < 0:
            raise RequestError(f"the depth must be 0 or more, not {self.depth}")
        if not 1 <= self.batch <= engine.sequences:
            has = f"the model was compiled for {engine.sequences} (--sequences)"
            raise RequestError(f"a batch of {self.batch} sequences cannot be decoded: {has}")
        if self.total > engine.context:
            behind = "" if not self.depth else f" behind {self.depth} others"
            what = f"{self.prompt} prompt tokens and {self.decode} decoded ones{behind}"
            raise RequestError(f"{what} do not fit the context of {engine.context}; measure fewer")


@dataclass(frozen=True)
class Round:
    """One round: seconds of the prompt, of all decode steps, and of each call in them; what memory gave meanwhile."""

    prefill_s: float
    decode_s: float
    call_s: NDArray[np.float64]
    bytes_per_s: NDArray[np.float64]


class Rounds:
    """Runs rounds that all do the same."""

    def __init__(self, engine: Engine, lengths: Lengths, ids: Sequence[int] | None) -> None:
        """`ids` as for `bench.measure`. Raises RequestError for lengths that do not fit."""
        lengths.check(engine)
        self._engine, self._lengths = engine, lengths
        self._reader = MemoryReader(engine.artifact.load_code(), engine.threads)
        random = np.random.Generator(np.random.PCG64(0))
        count = lengths.total + lengths.batch * lengths.decode
        text = random.integers(0, engine.vocab, count) if ids is None else np.resize(np.asarray(ids), count)
        start = lengths.depth or 0
        self._prompt = text[start : start + lengths.prompt].tolist()
        # Sequences of a batch begin alike and go on differently.
        steps = text[lengths.decode_depth :][: lengths.batch * lengths.decode].reshape(lengths.batch, lengths.decode)
        self._steps: list[list[int]] = steps.T.tolist()
        engine.reset()
        if start:
            engine.read(text[:start].tolist())
            self._copy()

    def run(self) -> Round:
        """One round."""
        engine, lengths = self._engine, self._lengths
        engine.rewind(lengths.depth or 0)
        start = time.perf_counter()
        engine.read(self._prompt)
        prefill_s = time.perf_counter() - start
        if lengths.depth is None:
            self._copy()
        for slot in range(lengths.batch):
            engine.rewind(lengths.decode_depth, slot)
        before = self._reader.read()
        engine.start_timing()
        decode_s = self._decode()
        call_s = np.array([seconds for _, seconds in engine.timing(lengths.function)])
        engine.stop_timing()
        return Round(prefill_s, decode_s, call_s, np.concatenate([before, self._reader.read()]))

    def trace(self) -> list[Step]:
        """One step of the prompt, if it has more than one token, and a few of decoding, each call of them timed."""
        engine, lengths = self._engine, self._lengths
        engine.rewind(lengths.depth or 0)
        first, rest = self._prompt[: engine.chunk], self._prompt[engine.chunk :]
        engine.start_timing(slowly=True)
        steps = [recorded(engine, "prefill_last", lambda: engine.read(first))] if len(first) > 1 else []
        engine.stop_timing()
        if lengths.depth is None:
            if left := rest if steps else self._prompt:
                engine.read(left)
            self._copy()
        for slot in range(lengths.batch):
            engine.rewind(lengths.decode_depth, slot)
        engine.start_timing(slowly=True)
        for tokens in self._steps[:_TRACED_STEPS]:
            steps.append(recorded(engine, lengths.function, partial(self._step, tokens)))
        engine.stop_timing()
        return steps

    def _copy(self) -> None:
        for slot in range(1, self._lengths.batch):
            self._engine.copy(0, slot)

    def _decode(self) -> float:
        start = time.perf_counter()
        for tokens in self._steps:
            self._step(tokens)
        return time.perf_counter() - start

    def _step(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 1:
            self._engine.read(tokens)
        else:
            self._engine.read_batch(tokens, list(range(len(tokens))))
