"""The engine: an artifact in memory, its KV cache, and the position of each sequence in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import BATCH, ONE_TOKEN_EACH, Call
from picompile_runtime.artifact.reader import Artifact, open_artifact
from picompile_runtime.devices.machine import check_threads, default_threads
from picompile_runtime.engine.executor import Executor
from picompile_runtime.engine.timing import CallSpan, FiringCounts, firing_counts
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import check_room, check_sequences, check_slot, shown, token_id, token_ids
from picompile_runtime.sampling.scores import Logits, Scores
from picompile_runtime.system_errors import translate_system_errors


def load(path: str | os.PathLike[str], threads: int | None = None, replan: bool = False) -> Engine:
    """Open, check and load the artifact in the folder `path`. Raises ArtifactError, MachineError or DoesNotFitError.

    `replan`: where the GPU has less memory free than the artifact's plan needs, some of its weights stay with the host.
    """
    if threads is not None:
        check_threads(threads)  # before weights are hashed for nothing
    artifact = open_artifact(path)
    try:
        return Engine(artifact, threads, replan)
    except BaseException:
        artifact.close()
        raise


class Engine:
    """Runs sequences of tokens, each in a slot of the KV cache: slot 0 unless a method is told another.

    An artifact has as many slots as it was compiled for with `--sequences`. Sequences know nothing of each other, but
    `decode_sequences` reads a token of each in one step, which takes little longer than one token does. Methods return
    arrays of their own, or with `copy` False the engine's memory, which the next step overwrites.

    An engine is not made for several threads: each call takes a lock and waits for its turn, but which token lands at
    which position is then a matter of luck. Engines on one artifact share its weights.

    A forked process may load engines, and use those of its parent as the last whole step left them. With a GPU it can
    do neither: methods of an engine from the parent raise RequestError, and loading raises MachineError.
    """

    def __init__(self, artifact: Artifact, threads: int | None = None, replan: bool = False) -> None:
        """Take over an opened artifact; it is closed with the engine. `threads`: see `machine.default_threads`."""
        self.artifact = artifact
        self.threads = check_threads(threads) if threads is not None else default_threads()
        self._program = artifact.program
        with translate_system_errors(artifact.folder):
            self._executor = Executor(artifact, self.threads, replan)
        self._lock = threading.RLock()
        self._positions = [0] * self._program.sequences
        self._counted = dict.fromkeys(ONE_TOKEN_EACH, 0)
        self._refusal = ""  # why it cannot be used any more
        _engines.add(self)

    @property
    def context(self) -> int:
        """Tokens that fit a sequence at most."""
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
    def sequences(self) -> int:
        """Slots of the KV cache."""
        return self._program.sequences

    @property
    def moved_bytes(self) -> int:
        """Of the weights that were planned for the GPU, those that `replan` left with the host."""
        return self._executor.moved_bytes

    @property
    def position(self) -> int:
        """Tokens seen so far in slot 0: the place of the next one."""
        return self._positions[0]

    @property
    def positions(self) -> tuple[int, ...]:
        """The same of each slot."""
        return tuple(self._positions)

    def reset(self, slot: int = 0) -> None:
        """Forget all tokens of a sequence."""
        self.rewind(0, slot)

    def rewind(self, position: int, slot: int = 0) -> None:
        """Forget the tokens of a sequence from `position` on."""
        with self._lock:
            self._open()
            check_slot(slot, self.sequences)
            seen = self._positions[slot]
            if not isinstance(position, int | np.integer) or isinstance(position, bool) or not 0 <= position <= seen:
                raise RequestError(f"cannot rewind to position {shown(position)}; {seen} tokens were seen")
            self._positions[slot] = int(position)

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` hold the sequence of slot `source`, too: a prompt that several begin with is read once."""
        with self._lock:
            self._open()
            check_slot(source, self.sequences)
            check_slot(target, self.sequences)
            self._executor.copy_cache(source, target, self._positions[source])
            self._positions[target] = self._positions[source]

    def check(self, ids: Sequence[int], slot: int = 0) -> None:
        """Raise RequestError unless `ids` are tokens of this model that fit behind those seen so far."""
        with self._lock:
            self._checked(ids, slot)

    def prefill(self, ids: Sequence[int], slot: int = 0, copy: bool = True) -> Logits:
        """Read `ids`; the logits [vocab] of what follows them."""
        with self._lock:
            return self._executor.logits(self._prefill(ids, slot), 1, copy).ravel()

    def decode(self, token: int, slot: int = 0, copy: bool = True) -> Logits:
        """Read one token; the logits [vocab] of the next."""
        with self._lock:
            return self._executor.logits(self._decode_checked(token, slot), 1, copy).ravel()

    def read(self, ids: Sequence[int], slot: int = 0) -> Scores:
        """Read `ids`, one or many; the scores of what follows them, for `Sampler`.

        As `prefill` and `decode`, but where the logits are in the memory of a GPU they stay there unless they are asked
        for, which they can be until the next step.
        """
        with self._lock:
            is_one = type(ids) is list and len(ids) == 1
            function = self._decode_checked(ids[0], slot) if is_one else self._prefill(ids, slot)
            return self._scores(function, 0)

    def decode_sequences(self, tokens: Sequence[int], slots: Sequence[int], copy: bool = True) -> Logits:
        """Read the next token of several sequences, `tokens[i]` of that in `slots[i]`; row i are the logits behind it.

        Logits [len(tokens), vocab] are those that `decode` would give one by one, but for rounding, and but for neurons
        that predictors leave out: of those a batch may compute more.
        """
        with self._lock:
            function, rows = self._decode_batch(tokens, slots)
            return self._executor.logits(function, rows, copy)

    def read_sequences(self, tokens: Sequence[int], slots: Sequence[int]) -> list[Scores]:
        """As `decode_sequences`; the scores of what follows each of the tokens, as `read` gives them."""
        with self._lock:
            function, rows = self._decode_batch(tokens, slots)
            return [self._scores(function, row) for row in range(rows)]

    def score(self, ids: Sequence[int], slot: int = 0) -> Iterator[Logits]:
        """Read `ids` in chunks and give the logits of each, [tokens of the chunk, vocab]: row i is what follows ids[i].

        The chunks are read as the iterator is asked for them; nothing else may be read in between.
        """
        with self._lock:
            tokens = self._checked(ids, slot)
        return self._score(tokens, slot)

    def _score(self, tokens: NDArray[np.int32], slot: int) -> Iterator[Logits]:
        for start in range(0, len(tokens), self.chunk):
            with self._lock:
                part = self._checked(tokens[start : start + self.chunk], slot)
                self._executor.check_weights()
                self._read("score", part, slot)
                logits = self._executor.logits("score", len(part))
            yield logits

    def firing(self, function: str = "decode") -> list[FiringCounts]:
        """How sparsely each feed-forward part fired, over the steps of `decode`, or of `batch`, since loading or
        `reset_firing`: the mean of the steps, and of the sequences of a batch.
        """
        with self._lock:
            self._open()
            if (
                not isinstance(function, str)
                or function not in self._program.functions
                or function not in self._counted
            ):
                raise RequestError(f"neurons of {shown(function)} are not counted")
            name = "stats" if function == "decode" else f"stats.{function}"
            return firing_counts(self._program.ffn, self._executor.counts(name), self._counted[function])

    def reset_firing(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._open()
            for name in ("stats", "stats.batch"):
                self._executor.forget_counts(name)
            self._counted = dict.fromkeys(self._counted, 0)

    def start_timing(self, slowly: bool = False) -> None:
        """Measure every kernel call from now on; this costs about 50 ns a call.

        Calls on a GPU are measured only if it may run `slowly`, with events between them.
        """
        with self._lock:
            self._open()
            self._executor.start_timing(slowly)

    def stop_timing(self) -> None:
        """Measure no more."""
        with self._lock:
            self._open()
            self._executor.stop_timing()

    def timing(self, function: str) -> list[tuple[Call, float]]:
        """The calls of a function of the program, each with its seconds since `start_timing`.

        Functions are `decode`, `prefill`, `prefill_last`, `score` and, where there are several slots, `batch`. Where
        a device is not measured, calls take 0.
        """
        with self._lock:
            self._open()
            return self._executor.timing(self._function(function))

    def spans(self, function: str) -> list[CallSpan]:
        """When each call of the last step of a function ran, since `start_timing`; those that are not measured are left
        out.
        """
        with self._lock:
            self._open()
            return self._executor.spans(self._function(function))

    def close(self) -> None:
        """Give the memory back. Nothing can be run afterwards; arrays that were returned stay valid."""
        with self._lock:
            self._refusal = self._refusal or "the engine is closed"
            self._executor.close()
            self.artifact.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if self._refusal:
            raise RequestError(self._refusal)

    def _function(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._program.functions:
            raise RequestError(f"the program has no function {shown(name)}, but {', '.join(self._program.functions)}")
        return name

    def _checked(self, ids: Sequence[int] | NDArray[np.int32], slot: int) -> NDArray[np.int32]:
        """`ids` as int32 [tokens], if they are tokens of this model and fit behind those seen so far."""
        self._open()
        tokens = token_ids(ids, self.vocab)
        self._check_room(len(tokens), slot)
        return tokens

    def _check_room(self, tokens: int, slot: int) -> None:
        check_slot(slot, self.sequences)
        check_room(tokens, self._positions[slot], self.context, slot if self.sequences > 1 else None)

    def _prefill(self, ids: Sequence[int], slot: int) -> str:
        """The function that ran last."""
        tokens = self._checked(ids, slot)
        if len(tokens) == 1:
            return self._decode(int(tokens[0]), slot)
        self._executor.check_weights()
        while len(tokens) > self.chunk:
            self._read("prefill", tokens[: self.chunk], slot)
            tokens = tokens[self.chunk :]
        return self._read("prefill_last", tokens, slot)

    def _decode_checked(self, token: int, slot: int) -> str:
        self._open()
        token = token_id(token, self.vocab)
        self._check_room(1, slot)
        return self._decode(token, slot)

    def _decode(self, token: int, slot: int) -> str:
        self._executor.run_one(token, self._positions[slot], slot)
        self._positions[slot] += 1
        self._counted["decode"] += 1
        return "decode"

    def _decode_batch(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[str, int]:
        """The function that ran, and how many tokens it read."""
        self._open()
        ids = token_ids(tokens, self.vocab)
        slots = check_sequences(slots, len(ids), self.sequences)
        positions = [self._positions[slot] for slot in slots]
        for slot, position in zip(slots, positions, strict=True):
            check_room(1, position, self.context, slot)
        if len(ids) == 1:
            return self._decode(int(ids[0]), slots[0]), 1
        self._executor.run_sequences(ids, positions, slots)
        self._counted[BATCH] += len(ids)
        for slot in slots:
            self._positions[slot] += 1
        return BATCH, len(ids)

    def _scores(self, function: str, row: int) -> Scores:
        """Of a row of the last step, which was one of `function`."""

        def logits() -> Logits:
            with self._lock:
                self._open()
                return self._executor.logits(function, 1, copy=False, first=row).ravel()

        return Scores(logits, self._executor.top_logits(function, row))

    def _read(self, function: str, tokens: NDArray[np.int32], slot: int) -> str:
        self._executor.run(function, tokens, self._positions[slot], slot)
        self._positions[slot] += len(tokens)
        return function

    def _after_fork(self) -> None:
        """Let a forked process use the engine as its parent's last whole step left it, where its device can be used."""
        self._lock = threading.RLock()
        self._refusal = self._executor.after_fork() or self._refusal


_engines: WeakSet[Engine] = WeakSet()


def _after_fork_in_child() -> None:
    """Threads that used an engine are not here, and would hold its lock for ever."""
    for engine in list(_engines):
        engine._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
