"""An engine without kernels, for tests of the scheduler, a scheduler on it, and listeners that keep what they are told.

The engine's scores say how each token came into the cache.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from picompile_runtime import KernelError, Sampler, SamplingParams, Scores
from picompile_server.log_probabilities import log_probability
from picompile_server.request import (
    Event,
    Finished,
    PromptRead,
    ServingRequest,
    TokenChosen,
    TokenLogProbability,
)
from picompile_server.scheduler import Answer, Scheduler, SchedulerOptions

VOCAB, CONTEXT, CHUNK, END = 40, 96, 8, 0
NEURONS = 100  # of a token


@dataclass(frozen=True)
class Call:
    """A call of the engine: its name, the slots, and the number of tokens of each."""

    name: str
    slots: tuple[int, ...]
    tokens: int


class FakeEngine:
    """Takes the calls that a scheduler makes of an `Engine`, and fails the test if one of them is not legal.

    The cache of a slot has a mark for each token: `p` if it was read as a prompt, `d` if by a decode step. Scores are
    drawn from a hash of all marks before, so they differ wherever bits of a real cache would.
    """

    def __init__(self, sequences: int = 3, context: int = CONTEXT, chunk: int = CHUNK, vocab: int = VOCAB) -> None:
        self.sequences, self.context, self.chunk, self.vocab = sequences, context, chunk, vocab
        self.most_checked = 8
        self.artifact = SimpleNamespace(eos_token_ids=frozenset({END}), program=SimpleNamespace(has_accelerator=False))
        self.caches: list[list[tuple[int, str]]] = [[] for _ in range(sequences)]
        self.resident = [0] * sequences  # tokens that each slot has memory for
        self.calls: list[Call] = []
        self.failures = 0  # of how many steps are to come
        self._memory = np.zeros((max(sequences, chunk, self.most_checked), vocab), np.float32)
        self._decoded = {"decode": 0, "batch": 0}

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(len(cache) for cache in self.caches)

    def steps(self) -> list[Call]:
        """The calls that are steps, without copies and rewinds."""
        return [call for call in self.calls if call.name in ("chunk", "last", "score", "decode")]

    def rewind(self, position: int, slot: int = 0) -> None:
        assert 0 <= position <= len(self.caches[slot])
        del self.caches[slot][position:]

    def reusable(self, prefix: int, slot: int = 0) -> int:
        assert 0 <= prefix <= len(self.caches[slot])
        return prefix

    def reset(self, slot: int = 0) -> None:
        self.rewind(0, slot)

    def release(self, slot: int = 0) -> None:
        self.resident[slot] = len(self.caches[slot])

    def copy(self, source: int, target: int, count: int) -> None:
        assert source != target and 0 < count <= len(self.caches[source])
        self.calls.append(Call("copy", (source, target), count))
        self.caches[target] = self.caches[source][:count]
        self._take_memory(target)

    def read_chunk(self, ids: Sequence[int], slot: int = 0, is_last: bool = True) -> Scores | None:
        self._step("last" if is_last else "chunk", [slot], len(ids))
        self._read_prompt(ids, slot)
        self._memory[0] = self._logits(slot)
        return self._scores(0) if is_last else None

    def score(self, ids: Sequence[int], slot: int = 0) -> Iterator[np.ndarray]:
        self._step("score", [slot], len(ids))
        rows = []
        for token in ids:
            self._read_prompt([token], slot)
            rows.append(self._logits(slot))
        yield np.array(rows)

    def read_sequences(self, tokens: Sequence[int], slots: Sequence[int]) -> list[Scores]:
        assert len(tokens) == len(slots) == len(set(slots)) > 0
        self._step("decode", slots, 1)
        for token, slot in zip(tokens, slots, strict=True):
            assert type(token) is int and 0 <= token < self.vocab
            assert self.caches[slot], "a sequence is decoded that has no prompt"
            self.caches[slot].append((token, "d"))
            self._take_memory(slot)
        for row, slot in enumerate(slots):
            self._memory[row] = self._logits(slot)
        self._decoded["batch"] += len(tokens)
        return [self._scores(row) for row in range(len(tokens))]

    def read_each(self, ids: Sequence[int], slot: int = 0) -> list[Scores]:
        """The marks are those of decode steps: bits are the same."""
        assert 1 <= len(ids) <= self.most_checked
        self._step("each", [slot], 1)
        for row, token in enumerate(ids):
            assert type(token) is int and 0 <= token < self.vocab
            self.caches[slot].append((token, "d"))
            self._take_memory(slot)
            self._memory[row] = self._logits(slot)
        self._decoded["batch"] += len(ids)
        return [self._scores(row) for row in range(len(ids))]

    def firing_totals(self, function: str) -> tuple[int, int, int]:
        tokens = self._decoded[function]
        return 30 * tokens, 20 * tokens, NEURONS * tokens

    def _step(self, name: str, slots: Sequence[int], tokens: int) -> None:
        assert 1 <= tokens <= self.chunk
        assert all(type(slot) is int and 0 <= slot < self.sequences for slot in slots)
        self._memory[:] = np.nan  # whoever looks at the scores of the last step now has waited too long
        self.calls.append(Call(name, tuple(slots), tokens))
        if self.failures:
            self.failures -= 1
            for cache in self.caches:  # the cache may have been written anywhere
                cache[:] = [(token, "broken") for token, _ in cache]
            raise KernelError("the kernel broke")

    def _read_prompt(self, ids: Sequence[int], slot: int) -> None:
        assert all(type(token) is int and 0 <= token < self.vocab for token in ids)
        self.caches[slot] += [(token, "p") for token in ids]
        self._take_memory(slot)

    def _take_memory(self, slot: int) -> None:
        assert len(self.caches[slot]) <= self.context
        self.resident[slot] = max(self.resident[slot], len(self.caches[slot]))

    def _logits(self, slot: int) -> np.ndarray:
        seed = hashlib.blake2b(repr(self.caches[slot]).encode(), digest_size=8).digest()
        random = np.random.default_rng(int.from_bytes(seed, "little"))
        return random.normal(0, 2, self.vocab).astype(np.float32)

    def _scores(self, row: int) -> Scores:
        memory = self._memory
        return Scores(lambda: memory[row])


@dataclass(frozen=True)
class SoloAnswer:
    """An answer as it is without a scheduler: its tokens and their log-probabilities, those of the prompt, the end."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[TokenLogProbability | None, ...]
    of_prompt: tuple[TokenLogProbability | None, ...] | None
    reason: str


def answer_alone(engine: Any, request: ServingRequest, slot: int = 0) -> SoloAnswer:
    """Return what an engine answers to a request in a plain loop, whatever it has done before.

    The prompt is read token by token, by `score` if its tokens' log-probabilities are wanted. `engine` is an `Engine`
    or a `FakeEngine`.
    """
    engine.reset(slot)
    prompt, top = list(request.prompt), request.top_log_probabilities
    of_prompt: list[TokenLogProbability | None] = [None]
    scores = None
    for place, token in enumerate(prompt):
        if request.with_prompt and place + 1 < len(prompt):
            (logits,) = next(engine.score([token], slot))
            of_prompt.append(log_probability(logits, prompt[place + 1], top or 0))
        else:
            scores = engine.read_chunk([token], slot)
    sampler, tokens, named = Sampler(request.params, engine.vocab), list[int](), list[TokenLogProbability | None]()
    sampler.observe(prompt)
    grammar = None if request.grammar is None else request.grammar()
    reason = "max_tokens" if request.max_tokens == 0 else ""
    while not reason:
        logits = scores.logits().copy()
        token = sampler.sample(logits, None if grammar is None else grammar.allowed())
        tokens.append(token)
        named.append(None if top is None else log_probability(logits, token, top))
        if token in engine.artifact.eos_token_ids and not request.ignore_end:
            reason = "eos"
        elif grammar is not None and grammar.accept(token):
            reason = "grammar"
        elif len(tokens) == request.max_tokens:
            reason = "max_tokens"
        elif len(prompt) + len(tokens) > engine.context:
            reason = "context"
        else:
            scores = engine.read_sequences([token], [slot])[0]
    engine.reset(slot)
    return SoloAnswer(tuple(tokens), tuple(named), tuple(of_prompt) if request.with_prompt else None, reason)


@dataclass
class Told:
    """A listener. The events of an answer are its prompt, its tokens, its end; a cancelled one may lack the first."""

    events: list[Event] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        before = self.events[-1] if self.events else None
        assert not isinstance(before, Finished), "nothing follows the end"
        assert isinstance(event, PromptRead) == (before is None) or isinstance(event, Finished)
        self.events.append(event)
        if isinstance(event, Finished):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenChosen)]

    @property
    def prompt(self) -> PromptRead:
        first = self.events[0]
        assert isinstance(first, PromptRead)
        return first

    @property
    def end(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def reason(self) -> str:
        return self.end.reason

    def answer(self) -> SoloAnswer:
        """Return what was told, in the form of what `answer_alone` returns."""
        assert self.end.error == ""
        chosen = [event for event in self.events if isinstance(event, TokenChosen)]
        return SoloAnswer(
            tuple(event.token for event in chosen),
            tuple(event.log_probability for event in chosen),
            self.prompt.log_probabilities,
            self.reason,
        )

    def is_beginning_of(self, expected: SoloAnswer) -> bool:
        """Whether an answer that was cut off is what `expected` begins with."""
        chosen = [(event.token, event.log_probability) for event in self.events if isinstance(event, TokenChosen)]
        return chosen == list(zip(expected.tokens, expected.log_probabilities, strict=True))[: len(chosen)]


def request(prompt: list[int], max_tokens: int | None = 5, seed: int = 0, **options: Any) -> ServingRequest:
    """A request whose answer the model does not end."""
    return ServingRequest(prompt, SamplingParams(seed=seed), max_tokens, **{"ignore_end": True, **options})


def alone(*args: Any, **options: Any) -> SoloAnswer:
    """The answer to a request without a scheduler."""
    return answer_alone(FakeEngine(), request(*args, **options))


class Desk:
    """A scheduler without a thread of its own, and its engine, which is a fake one with so many slots."""

    def __init__(self, engine: FakeEngine | int = 3, **options: Any) -> None:
        self.engine = FakeEngine(engine) if isinstance(engine, int) else engine
        self.scheduler = Scheduler(self.engine, SchedulerOptions(**options), start=False)  # type: ignore[arg-type]
        self.answers: list[Answer] = []

    def submit(self, *args: Any, **options: Any) -> Told:
        """Submit `request(...)`, or a request that is given."""
        given = args[0] if isinstance(args[0], ServingRequest) else request(*args, **options)
        told = Told()
        self.answers.append(self.scheduler.submit(given, told))
        return told

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def finish(self) -> None:
        while self.scheduler.step():
            pass

    def ask(self, *args: Any, **options: Any) -> Told:
        """The answer, at its end: nothing was done after that."""
        told = self.submit(*args, **options)
        while not told.ended.is_set():
            self.scheduler.step()
        return told
