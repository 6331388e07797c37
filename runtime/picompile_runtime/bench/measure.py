"""Measurement of an engine's speed, in tokens per second and as a share of the memory's bandwidth.

A round reads a prompt, then decodes tokens one by one. Decoding reads each weight that it uses once a token, so the
memory's bandwidth sets a floor to its time: the bytes that a token must move / bandwidth. The bandwidth is measured
before and after each round, since it varies: other work on the machine, or on the host of a virtual one, takes a part
of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import DEVICES, Program
from picompile_runtime.bench.bandwidth import KINDS, KernelTime, MemoryReader, kind, step_bytes
from picompile_runtime.bench.drafting import DraftedTokens, decode_drafting, draft_figures
from picompile_runtime.bench.speed import SpeedStatistics
from picompile_runtime.bench.trace import TracedStep, hybrid_figures, recorded
from picompile_runtime.devices.open_accelerator import accelerator_kind
from picompile_runtime.engine.engine import Engine
from picompile_runtime.engine.timing import FiringCounts, mean_shares
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.speculation import check_draft

# A few steps are traced, since all steps are alike.
_TRACED_STEPS = 8


@dataclass(frozen=True)
class BenchmarkLengths:
    """The lengths of a round: a prompt of `prompt` tokens, then `decode` steps for `sequences` sequences at once.

    With `depth`, prompt and decoding each begin behind that many tokens. Without it, the prompt is at the beginning of
    the cache, and decoding continues behind it.
    """

    prompt: int = 512
    decode: int = 128
    depth: int | None = None
    sequences: int = 1

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
        """The function of the program that decodes."""
        return "decode" if self.sequences == 1 else "batch"

    def check(self, engine: Engine) -> None:
        """Raise RequestError if `engine` cannot be measured with these lengths."""
        if self.prompt < 1 or self.decode < 1:
            raise RequestError("a benchmark needs at least one prompt token, one decoded token and one repetition")
        if self.depth is not None and self.depth < 0:
            raise RequestError(f"the depth must be 0 or more, not {self.depth}")
        if not 1 <= self.sequences <= engine.sequences:
            has = f"the model was compiled for {engine.sequences} (--sequences)"
            raise RequestError(f"{self.sequences} sequences cannot be decoded together: {has}")
        if self.total > engine.context:
            behind = "" if not self.depth else f" behind {self.depth} others"
            what = f"{self.prompt} prompt tokens and {self.decode} decoded ones{behind}"
            raise RequestError(f"{what} do not fit the context of {engine.context}; measure fewer")


@dataclass(frozen=True)
class BenchmarkRound:
    """The times of one round: of the prompt, of all decode steps, and of each call in them; and the memory's speed.

    `drafting` has the times of reading the same tokens with drafts, if that was asked for.
    """

    prefill_s: float
    decode_s: float
    call_s: NDArray[np.float64]
    bytes_per_s: NDArray[np.float64]
    drafting: DraftedTokens | None = None


class BenchmarkRunner:
    """Runs rounds that all do the same."""

    def __init__(self, engine: Engine, lengths: BenchmarkLengths, ids: Sequence[int] | None, draft: str) -> None:
        """Prepare rounds; for `ids` and `draft` see `measure`. Raises RequestError for lengths that do not fit."""
        lengths.check(engine)
        self._drafts = check_draft(draft) != "none"
        if self._drafts and lengths.sequences > 1:
            raise RequestError("drafts are for one sequence; measure several without --draft")
        self._engine, self._lengths = engine, lengths
        self._reader = MemoryReader(engine.artifact.load_code(), engine.threads)
        random = np.random.Generator(np.random.PCG64(0))
        count = lengths.total + lengths.sequences * lengths.decode
        text = random.integers(0, engine.vocab, count) if ids is None else np.resize(np.asarray(ids), count)
        start = lengths.depth or 0
        self._before: list[int] = text[: lengths.decode_depth].tolist()
        self._prompt = text[start : start + lengths.prompt].tolist()
        # All sequences begin with the same tokens and continue with different ones.
        steps = text[lengths.decode_depth :][: lengths.sequences * lengths.decode].reshape(
            lengths.sequences, lengths.decode
        )
        self._steps: list[list[int]] = steps.T.tolist()
        engine.reset()
        if start:
            engine.read(text[:start].tolist())
            engine.checkpoint()
            self._copy()

    def run(self) -> BenchmarkRound:
        """Run one round and return its times."""
        engine, lengths = self._engine, self._lengths
        engine.rewind(lengths.depth or 0)
        start = time.perf_counter()
        engine.read(self._prompt)
        prefill_s = time.perf_counter() - start
        if lengths.depth is None:
            self._copy()
        for slot in range(lengths.sequences):
            engine.rewind(lengths.decode_depth, slot)
        before = self._reader.read()
        engine.start_timing()
        decode_s = self._decode()
        call_s = np.array([seconds for _, seconds in engine.timing(lengths.function)])
        engine.stop_timing()
        speeds = np.concatenate([before, self._reader.read()])
        return BenchmarkRound(
            prefill_s, decode_s, call_s, bytes_per_s=speeds, drafting=self._draft() if self._drafts else None
        )

    def _draft(self) -> DraftedTokens:
        self._engine.rewind(self._lengths.decode_depth)
        return decode_drafting(self._engine, self._before, [token for (token,) in self._steps])

    def trace(self) -> list[TracedStep]:
        """Run a few steps with times of each call, one of the prompt if it has several tokens, and return them."""
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
        for slot in range(lengths.sequences):
            engine.rewind(lengths.decode_depth, slot)
        engine.start_timing(slowly=True)
        for tokens in self._steps[:_TRACED_STEPS]:
            steps.append(recorded(engine, lengths.function, partial(self._step, tokens)))
        engine.stop_timing()
        return steps

    def _copy(self) -> None:
        for slot in range(1, self._lengths.sequences):
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
            self._engine.read_sequences(tokens, list(range(len(tokens))))


def measure(
    engine: Engine,
    prompt_tokens: int = 512,
    decode_tokens: int = 128,
    repeats: int = 5,
    ids: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    depth: int | None = None,
    sequences: int = 1,
    trace: Callable[[Sequence[TracedStep]], object] | None = None,
    draft: str = "none",
) -> dict[str, Any]:
    """Prefill and decode `repeats` times after one round that does not count, and return the figures of `bench --json`.

    Every round decodes the same tokens. Which neurons fire depends on the text, and so does the speed of decoding.

    Args:
        engine: the engine.
        prompt_tokens: tokens in the prompt.
        decode_tokens: tokens to decode in each sequence.
        repeats: rounds that count.
        ids: the text to read, repeated or cut to length; by default random tokens, always the same ones.
        progress: called with the number of rounds done and of all rounds.
        depth: see `BenchmarkLengths`.
        sequences: how many sequences decode together.
        trace: called with a few steps after the last round, call by call: see `BenchmarkRunner.trace`.
        draft: with `ngram` every round also reads its tokens with drafts, see `picompile_runtime.generate`; they are
            accepted where the text has them.

    Raises:
        RequestError: an argument makes no sense, or the tokens do not fit the context.
    """
    lengths = BenchmarkLengths(prompt_tokens, decode_tokens, depth, sequences)
    if repeats < 1:
        raise RequestError("a benchmark needs at least one prompt token, one decoded token and one repetition")
    runner, rounds = BenchmarkRunner(engine, lengths, ids, draft), []
    for number in range(repeats + 1):
        if number == 1:
            engine.reset_firing()
        rounds.append(runner.run())
        if progress:
            progress(number + 1, repeats + 1)
    firing = engine.firing(lengths.function)
    steps = runner.trace() if trace or engine.artifact.program.has_accelerator else []
    if trace:
        trace(steps)
    of_decoding = [step for step in steps if step.function == lengths.function]
    return _result(_Measurement(engine, lengths, rounds=rounds[1:], firing=firing, steps=of_decoding), engine.threads)


@dataclass(frozen=True)
class _Measurement:
    """Everything that was measured. `steps` are the traced steps of decoding."""

    engine: Engine
    lengths: BenchmarkLengths
    rounds: Sequence[BenchmarkRound]
    firing: Sequence[FiringCounts]
    steps: Sequence[TracedStep]

    @property
    def tokens(self) -> int:
        """Number of tokens that a round decodes."""
        return self.lengths.sequences * self.lengths.decode

    @property
    def program(self) -> Program:
        """The program that ran."""
        return self.engine.artifact.program

    @property
    def on_gpu(self) -> bool:
        """Whether the accelerator is a GPU.

        Then rounds have no times of its calls, and its memory is not the one whose bandwidth is measured.
        """
        return self.program.has_accelerator and not accelerator_kind(self.engine.artifact).on_cpu

    @property
    def bandwidths(self) -> list[float]:
        """The speed of the host's memory in each round, in bytes per second."""
        return [float(np.median(each.bytes_per_s)) for each in self.rounds]

    def seconds(self, device: str, chosen: NDArray[np.bool_]) -> float:
        """Return the seconds per token of the `chosen` calls of a step, all of which are on `device`."""
        if device == "accelerator" and self.on_gpu:
            spans = [np.array([span.end_ns - span.begin_ns for span in step.spans]) for step in self.steps]
            return float(np.median([1e-9 * each[chosen].sum() / self.lengths.sequences for each in spans]))
        return float(np.median([each.call_s[chosen].sum() / self.tokens for each in self.rounds]))


def _result(measured: _Measurement, threads: int) -> dict[str, Any]:
    """Return the medians of the rounds."""
    lengths, rounds = measured.lengths, measured.rounds
    program = measured.program
    drafting = [each.drafting for each in rounds if each.drafting is not None]
    return {
        "prefill": asdict(SpeedStatistics.of(lengths.prompt, [each.prefill_s for each in rounds])),
        "decode": _decode(measured),
        "draft": draft_figures(drafting) if drafting else None,
        "hybrid": hybrid_figures(program, measured.steps, lengths.sequences) if program.has_accelerator else None,
        "bandwidth_bytes_per_s": float(np.median(measured.bandwidths)),
        "bandwidth_best_bytes_per_s": float(max(each.bytes_per_s.max() for each in rounds)),
        "threads": threads,
    }


def _decode(measured: _Measurement) -> dict[str, Any]:
    lengths, rounds, bandwidths = measured.lengths, measured.rounds, measured.bandwidths
    # In steps for several sequences, kernels that compute every neuron do not count them.
    is_counted = lengths.sequences == 1 or any(row.computed_share for row in measured.firing)
    firing = (
        measured.firing
        if is_counted
        else [replace(row, computed_share=1.0, fired_share=1.0) for row in measured.firing]
    )
    computed_share, firing_share = mean_shares(firing)
    # Several sequences read at most the sum of what each of them reads of a block, and no more than all of it.
    read = [_by_all(row, lengths.sequences) for row in firing]
    cached = lengths.decode_depth + (lengths.decode + 1) / 2
    moved = step_bytes(measured.engine.artifact, lengths.function, firing=read, cached=cached, rows=lengths.sequences)
    of_calls = np.array(moved) / lengths.sequences
    token_bytes, pairs = float(of_calls.sum()), zip(rounds, bandwidths, strict=True)
    shares = [token_bytes / speed * measured.tokens / each.decode_s for each, speed in pairs]
    return {
        **asdict(SpeedStatistics.of(measured.tokens, [each.decode_s for each in rounds])),
        "depth": lengths.decode_depth,
        "sequences": lengths.sequences,
        "bytes_per_token": round(token_bytes),
        "floor_tokens_per_s": None if measured.on_gpu else float(np.median(bandwidths)) / token_bytes,
        "bandwidth_share": None if measured.on_gpu else float(np.median(shares)),
        "firing_share": firing_share if is_counted else None,
        "computed_share": computed_share,
        "kernels": [kernel.to_json() for kernel in _kernels(measured, of_calls)],
    }


def _by_all(row: FiringCounts, sequences: int) -> FiringCounts:
    """Return the shares that so many sequences read together at most."""
    computed, fired = (min(1.0, share * sequences) for share in (row.computed_share, row.fired_share))
    return replace(row, computed_share=computed, fired_share=fired)


def _kernels(measured: _Measurement, of_calls: NDArray[np.float64]) -> Iterator[KernelTime]:
    """Yield a row for each kind of kernel on each device; `of_calls` are the bytes per token of each call."""
    calls = measured.program.functions[measured.lengths.function]
    kinds, devices = np.array([kind(call) for call in calls]), np.array([call.device for call in calls])
    for device in DEVICES:
        for name in KINDS:
            chosen = (kinds == name) & (devices == device)
            if not chosen.any():
                continue
            moved, seconds = float(of_calls[chosen].sum()), measured.seconds(device, chosen)
            is_known = device == "host" or not measured.on_gpu
            floor_s = moved / float(np.median(measured.bandwidths)) if is_known else None
            yield KernelTime(name, device, calls=int(chosen.sum()), bytes=moved, seconds=seconds, floor_s=floor_s)
