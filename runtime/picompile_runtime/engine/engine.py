"""The engine: a loaded artifact, and the state and position of each sequence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.files import translate_system_errors
from picompile_runtime.artifact.program import BATCH, ONE_TOKEN_EACH, SCORE_MASKED, Call
from picompile_runtime.artifact.reader import Artifact, open_artifact
from picompile_runtime.devices.machine import check_threads, default_threads
from picompile_runtime.engine.executor import Executor
from picompile_runtime.engine.timing import CallSpan, FiringCounts, firing_counts
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import (
    check_room,
    check_sequences,
    check_slot,
    shown,
    token_id,
    token_ids,
    whole_number,
)
from picompile_runtime.sampling.sampler import Logits, Scores


def load(
    path: str | os.PathLike[str],
    threads: int | None = None,
    replan: bool = False,
    cache_tokens: int | None = None,
    isa: str | None = None,
) -> Engine:
    """Open, check and load the artifact in the folder `path`, and return an engine for it.

    Args:
        path: the folder that `picompile compile -o` wrote.
        threads: CPU threads to run with; by default PICOMPILE_THREADS, else the physical cores that the process may
            use.
        replan: leave some of the GPU's weights with the host if less GPU memory is free than the artifact's plan needs.
            The GPU then reads what it needs of them over the bus.
        cache_tokens: how many tokens all slots of the KV cache will hold together at most, which the caller sees to;
            this machine's memory must hold so many. By default each slot may hold a whole context. Memory of the host
            is taken page by page, as tokens come; `Engine.release` gives it back.
        isa: the instruction set whose code to run, one of those that `inspect` lists; by default PICOMPILE_ISA, else
            the first that this machine has.

    Raises:
        ArtifactError: the artifact is not whole or not valid.
        MachineError: it was made for another kind of machine.
        DoesNotFitError: this machine has too little memory for it.
        RequestError: an argument, or an environment variable, makes no sense.
    """
    if threads is not None:
        check_threads(threads)  # before any weights are hashed
    artifact = open_artifact(path, isa)
    try:
        return Engine(artifact, threads, replan, cache_tokens)
    except BaseException:
        artifact.close()
        raise


class Engine:
    """Runs sequences of tokens. Each sequence has a slot, which holds its state (as the KV cache): slot 0 by default.

    An artifact has as many slots as `--sequences` said when it was compiled. Sequences do not affect each other, but
    `decode_sequences` reads one token of each in a single step, which takes little longer than a step for one token.
    Methods return new arrays or, with `copy` False, the engine's memory, which the next step overwrites.

    Use an engine from one thread: each call takes a lock and waits for its turn, but with several threads it is a
    matter of luck which token gets which position. Engines on one artifact share its weights.

    A forked process may load engines, and may use its parent's in their state after the last complete step. With a GPU
    it can do neither: methods of an engine from the parent raise RequestError, and loading raises MachineError.
    """

    def __init__(
        self, artifact: Artifact, threads: int | None = None, replan: bool = False, cache_tokens: int | None = None
    ) -> None:
        """Load an opened artifact, which is closed with the engine. For the other arguments see `load`."""
        self.artifact = artifact
        self.threads = check_threads(threads) if threads is not None else default_threads()
        with translate_system_errors(artifact.folder):
            self._executor = Executor(artifact, self.threads, replan, cache_tokens)
        self._program = artifact.program
        self._lock = threading.RLock()
        self._positions = [0] * self._program.sequences
        self._counted = dict.fromkeys(ONE_TOKEN_EACH, 0)
        self._stepping: Sequence[int] = ()  # the slots of a step that has not ended
        self._refusal = ""  # why it cannot be used any more
        _engines.add(self)

    @property
    def context(self) -> int:
        """Number of tokens that a sequence may have."""
        return self._program.context

    @property
    def chunk(self) -> int:
        """Number of tokens that `prefill` and `score` read in one step at most."""
        return self._program.chunk

    @property
    def vocab(self) -> int:
        """Number of token ids; each logits array has this many columns."""
        return self._program.vocab

    @property
    def sequences(self) -> int:
        """Number of slots."""
        return self._program.sequences

    @property
    def moved_bytes(self) -> int:
        """Bytes of the weights that were planned for the GPU and that `replan` left with the host."""
        return self._executor.moved_bytes

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of the host's memory from which a GPU gets weights for prompts, and that the system cannot pin."""
        return self._executor.unpinned_bytes

    @property
    def position(self) -> int:
        """Number of tokens read so far in slot 0, which is the position of the next one."""
        return self._positions[0]

    @property
    def positions(self) -> tuple[int, ...]:
        """Number of tokens read so far in each slot."""
        return tuple(self._positions)

    def reset(self, slot: int = 0) -> None:
        """Forget all tokens of the sequence in `slot`."""
        self.rewind(0, slot)

    def rewind(self, position: int, slot: int = 0) -> None:
        """Forget the tokens of the sequence in `slot` from `position` on.

        Raises RequestError unless `position` is from 0 to the number of tokens read so far, and `reusable` where the
        sequence cannot go back to every position.
        """
        with self._lock:
            self._open()
            check_slot(slot, self.sequences)
            seen = self._positions[slot]
            if not isinstance(position, int | np.integer) or isinstance(position, bool) or not 0 <= position <= seen:
                raise RequestError(f"cannot rewind to position {shown(position)}; {seen} tokens were seen")
            nearest = self._reusable(slot, position)
            if nearest != position:
                raise RequestError(
                    f"cannot rewind to position {position}: the model's recurrent state is not kept there; "
                    f"rewind to {nearest}, the last position before that it was kept at, and read on from there"
                )
            for state in self._executor.states:
                state.cut(slot, nearest, seen)
            self._positions[slot] = int(position)

    @property
    def can_cut(self) -> bool:
        """Whether a sequence can go back to every position. Recurrent state goes back to checkpoints only."""
        return all(state.can_cut for state in self._executor.states)

    def reusable(self, prefix: int, slot: int = 0) -> int:
        """Return how many of the first `prefix` tokens of the sequence in `slot` need not be read again.

        This is the last position up to `prefix` that `rewind` can go back to, and that `copy` can copy. Raises
        RequestError unless `prefix` is from 0 to the number of tokens read so far.
        """
        with self._lock:
            self._open()
            check_slot(slot, self.sequences)
            return self._reusable(slot, whole_number("the prefix", prefix, 0, self._positions[slot]))

    def checkpoint(self, slot: int = 0) -> None:
        """Keep what recurrent state needs for `rewind` to come back to the position that `slot` has now.

        The engine does so after each chunk of a prompt, and keeps a bounded number of such positions for each slot. The
        last one that this method kept stays among them until the sequence goes back behind it.
        """
        with self._lock:
            self._open()
            check_slot(slot, self.sequences)
            self._keep(slot, pin=True)

    def release(self, slot: int = 0) -> None:
        """Give back the memory that `slot` keeps beside that for the tokens that it holds.

        The system takes whole pages. Memory of a GPU is kept.
        """
        with self._lock:
            self._open()
            check_slot(slot, self.sequences)
            for state in self._executor.states:
                state.release(slot, self._positions[slot])

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of the KV cache, on the host and on a GPU, that hold one token."""
        return self._program.token_bytes

    def copy(self, source: int, target: int, count: int | None = None) -> None:
        """Copy the sequence in slot `source` to slot `target`, so that a common prompt is read only once.

        Args:
            source: slot to copy from.
            target: slot to copy to, whose own tokens are forgotten.
            count: how many tokens to copy, from the first on; by default all.

        Raises:
            RequestError: there is no such slot, `source` has fewer tokens, or so many are not `reusable`.
        """
        with self._lock:
            self._open()
            check_slot(source, self.sequences)
            check_slot(target, self.sequences)
            seen = self._positions[source]
            tokens = whole_number("the number of tokens to copy", seen if count is None else count, 0, seen)
            nearest = self._reusable(source, tokens)
            if nearest != tokens:
                raise RequestError(
                    f"cannot copy {tokens} tokens: the model's recurrent state is not kept there; copy {nearest}"
                )
            for state in self._executor.states:
                state.copy(source, target, tokens, seen)
            self._positions[target] = tokens

    def check(self, ids: Sequence[int], slot: int = 0) -> None:
        """Raise RequestError unless `ids` are tokens of this model that fit the context behind those read so far."""
        with self._lock:
            self._checked(ids, slot)

    def prefill(self, ids: Sequence[int], slot: int = 0, copy: bool = True) -> Logits:
        """Read the tokens `ids` and return the logits of the next token, float32 [vocab].

        Args:
            ids: token ids, one or more. They follow the tokens already read in the slot.
            slot: the sequence's slot.
            copy: False returns the engine's memory, which the next step overwrites.

        Raises:
            RequestError: `ids` are no tokens of the model, they do not fit the context, or there is no such slot.
            KernelError: a kernel failed.
        """
        with self._lock:
            return self._executor.logits(self._prefill(ids, slot), 1, copy).ravel()

    def decode(self, token: int, slot: int = 0, copy: bool = True) -> Logits:
        """Read one token and return the logits of the next token, float32 [vocab]. See `prefill` for the rest."""
        with self._lock:
            return self._executor.logits(self._decode_checked(token, slot), 1, copy).ravel()

    def read(self, ids: Sequence[int], slot: int = 0) -> Scores:
        """Read the tokens `ids`, one or many, and return the scores of the next token, which a `Sampler` takes.

        Unlike `prefill` and `decode`, it leaves logits that are in a GPU's memory there until they are asked for, which
        is possible until the next step. Raises RequestError or KernelError as they do.
        """
        with self._lock:
            is_one = type(ids) is list and len(ids) == 1
            function = self._decode_checked(ids[0], slot) if is_one else self._prefill(ids, slot)
            return self._scores(function, 0)

    def read_chunk(self, ids: Sequence[int], slot: int = 0, is_last: bool = True) -> Scores | None:
        """Read one chunk of a prompt in a single step, and return the scores of the next token if it `is_last`.

        Every bit of the scores and of the state is the same however a prompt is cut into chunks.

        Args:
            ids: 1 to `chunk` token ids, which follow those already read in the slot.
            slot: the sequence's slot.
            is_last: whether the prompt ends here. A chunk that is not the last one leaves out the head.

        Raises:
            RequestError: as for `prefill`, or there are more than `chunk` tokens.
            KernelError: a kernel failed.
        """
        with self._lock:
            tokens = self._checked(ids, slot)
            whole_number("the tokens of a chunk", len(tokens), 1, self.chunk)
            self._executor.check_weights()
            function = self._read("prefill_last" if is_last else "prefill", tokens, slot)
            return self._scores(function, 0) if is_last else None

    def decode_sequences(self, tokens: Sequence[int], slots: Sequence[int], copy: bool = True) -> Logits:
        """Read the next token of several sequences in one step, and return the logits that follow each.

        The logits are those that `decode` would return for each sequence, bit for bit, whichever others are in the
        step. On a GPU they may differ by rounding.

        Args:
            tokens: token ids; `tokens[i]` is the next token of the sequence in `slots[i]`.
            slots: slots, all different, one for each token.
            copy: False returns the engine's memory, which the next step overwrites.

        Returns:
            Logits float32 [len(tokens), vocab]; row i follows `tokens[i]`.

        Raises:
            RequestError: tokens or slots make no sense, or a sequence is full; then no sequence has changed.
            KernelError: a kernel failed.
        """
        with self._lock:
            function, rows = self._run_sequences(tokens, slots)
            return self._executor.logits(function, rows, copy)

    def read_sequences(self, tokens: Sequence[int], slots: Sequence[int]) -> list[Scores]:
        """Read tokens as `decode_sequences` does, and return the scores that follow each, as `read` returns them."""
        with self._lock:
            function, rows = self._run_sequences(tokens, slots)
            return [self._scores(function, row) for row in range(rows)]

    @property
    def most_checked(self) -> int:
        """The most tokens that `read_each` reads in a step; 1 if the artifact was made to check no draft.

        It is 1 as well where a sequence cannot go back to every position, which tokens that are not accepted need.
        """
        return self._program.batch_rows if self.can_cut and not self._program.has_accelerator else 1

    def read_each(self, ids: Sequence[int], slot: int = 0) -> list[Scores]:
        """Read tokens of one sequence in one step, and return the scores that follow each of them.

        This is how the tokens of a draft are checked: scores and the state have the bits that `read` gives one
        token after another. `rewind` forgets those that are not accepted.

        Args:
            ids: 1 to `most_checked` token ids, which follow those already read in the slot.
            slot: the sequence's slot.

        Raises:
            RequestError: as for `prefill`, or there are more than `most_checked` tokens.
            KernelError: a kernel failed.
        """
        with self._lock:
            tokens = self._checked(ids, slot)
            count = whole_number("the tokens to read each", len(tokens), 1, self.most_checked)
            if count == 1:
                return [self._scores(self._decode(int(tokens[0]), slot), 0)]
            first = self._positions[slot]
            rows = tokens, range(first, first + count), [slot] * count
            self._step([slot], count, self._executor.run_sequences, *rows)
            self._counted[BATCH] += count
            return [self._scores(BATCH, row) for row in range(count)]

    @property
    def scores_masked(self) -> bool:
        """Whether `score` can leave out the neurons that predictors leave out."""
        return SCORE_MASKED in self._program.functions

    def score(self, ids: Sequence[int], slot: int = 0, masked: bool = False) -> Iterator[Logits]:
        """Read the tokens `ids` in chunks, and yield the logits after every token of each chunk.

        A chunk is read when the iterator is asked for it; read nothing else in between.

        Args:
            ids: token ids, which follow those already read in the slot.
            slot: the slot.
            masked: leave out the neurons that predictors leave out, as decoding does, in the arithmetic of prompts.

        Yields:
            Logits float32 [tokens of the chunk, vocab]; a row has the logits of the token that follows its token.

        Raises:
            RequestError: as for `prefill`, or the program cannot leave out neurons of a chunk, at once.
        """
        if masked and not self.scores_masked:
            raise RequestError("this artifact has no function that scores chunks with masks; read token by token")
        with self._lock:
            tokens = self._checked(ids, slot)
        return self._score(SCORE_MASKED if masked else "score", tokens, slot)

    def _score(self, function: str, tokens: NDArray[np.int32], slot: int) -> Iterator[Logits]:
        for start in range(0, len(tokens), self.chunk):
            with self._lock:
                part = self._checked(tokens[start : start + self.chunk], slot)
                self._executor.check_weights()
                self._read(function, part, slot)
                logits = self._executor.logits(function, len(part))
            yield logits

    def firing(self, function: str = "decode") -> list[FiringCounts]:
        """Return which share of its neurons each feed-forward part computed, and which share of them fired.

        Args:
            function: "decode", "batch" for steps that read several tokens, or "all" for both.

        Returns:
            The mean over all tokens that steps of `function` have read since loading or `reset_firing`.

        Raises:
            RequestError: neurons of `function` are not counted.
        """
        with self._lock:
            return firing_counts(self._program.ffn, *self._counts(function))

    def firing_totals(self, function: str = "decode") -> tuple[int, int, int]:
        """Return what steps of `function`, as of `firing`, have counted in all parts since loading or `reset_firing`.

        Returns:
            The neurons computed, the neurons that fired, and those that computing every neuron would have computed.

        Raises:
            RequestError: neurons of `function` are not counted.
        """
        with self._lock:
            counts, tokens = self._counts(function)
            if counts is None:
                return 0, 0, 0
            rows = [part.stats_row for part in self._program.ffn]
            computed, fired = counts[rows].sum(axis=0).tolist()
            return computed, fired, tokens * sum(part.neurons for part in self._program.ffn)

    def reset_firing(self) -> None:
        """Forget the neurons that were counted so far."""
        with self._lock:
            self._open()
            for name in ("stats", "stats.batch"):
                self._executor.forget_counts(name)
            self._counted = dict.fromkeys(self._counted, 0)

    def start_timing(self, slowly: bool = False) -> None:
        """Measure the time of every kernel call from now on, which costs about 50 ns a call.

        Calls on a GPU are measured only with `slowly`: events between them make the GPU slower.
        """
        with self._lock:
            self._open()
            self._executor.start_timing(slowly)

    def stop_timing(self) -> None:
        """Stop measuring."""
        with self._lock:
            self._open()
            self._executor.stop_timing()

    def timing(self, function: str) -> list[tuple[Call, float]]:
        """Return the calls of a function of the program, each with the seconds it took in all since `start_timing`.

        The functions are `decode`, `prefill`, `prefill_last`, `score` and, where a step can have several rows, `batch`.
        Calls on an accelerator that is not measured have 0 seconds. Raises RequestError for another function.
        """
        with self._lock:
            self._open()
            return self._executor.timing(self._function(function))

    def spans(self, function: str) -> list[CallSpan]:
        """Return when each call of the last step of a function ran, since `start_timing`.

        Calls that are not measured are left out. Raises RequestError as `timing` does.
        """
        with self._lock:
            self._open()
            return self._executor.spans(self._function(function))

    def close(self) -> None:
        """Free the memory. The engine can run nothing afterwards; arrays that it returned stay valid."""
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

    def _counts(self, function: str) -> tuple[NDArray[np.int64] | None, int]:
        """Return the counters of a function, int64 [parts, 2], and the tokens that were read.

        Raises RequestError if its neurons are not counted.
        """
        self._open()
        counted = [name for name in self._counted if name in self._program.functions]
        if not isinstance(function, str) or function not in ("all", *counted):
            raise RequestError(f"neurons of {shown(function)} are not counted")
        names = counted if function == "all" else [function]
        counts = [self._executor.counts("stats" if name == "decode" else f"stats.{name}") for name in names]
        known = [each for each in counts if each is not None]
        tokens = sum(self._counted[name] for name in names)
        return (sum(known[1:], known[0]) if known else None), tokens

    def _open(self) -> None:
        if self._refusal:
            raise RequestError(self._refusal)

    def _function(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._program.functions:
            raise RequestError(f"the program has no function {shown(name)}, but {', '.join(self._program.functions)}")
        return name

    def _checked(self, ids: Sequence[int] | NDArray[np.int32], slot: int) -> NDArray[np.int32]:
        """Return `ids` as int32 [tokens], or raise RequestError as `check` does."""
        self._open()
        tokens = token_ids(ids, self.vocab)
        self._check_room(len(tokens), slot)
        return tokens

    def _check_room(self, tokens: int, slot: int) -> None:
        check_slot(slot, self.sequences)
        check_room(tokens, self._positions[slot], self.context, slot if self.sequences > 1 else None)

    def _prefill(self, ids: Sequence[int], slot: int) -> str:
        """Read tokens, and return the name of the function that ran last."""
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
        self._step([slot], 1, self._executor.run_one, token, self._positions[slot], slot)
        self._counted["decode"] += 1
        return "decode"

    def _run_sequences(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[str, int]:
        """Read one token each, and return the name of the function that ran and how many tokens it read."""
        self._open()
        ids = token_ids(tokens, self.vocab)
        slots = check_sequences(slots, len(ids), self.sequences)
        positions = [self._positions[slot] for slot in slots]
        for slot, position in zip(slots, positions, strict=True):
            check_room(1, position, self.context, slot)
        if len(ids) == 1:
            return self._decode(int(ids[0]), slots[0]), 1
        self._step(slots, 1, self._executor.run_sequences, ids, positions, slots)
        self._counted[BATCH] += len(ids)
        return BATCH, len(ids)

    def _scores(self, function: str, row: int) -> Scores:
        """Return the scores for one row of the latest step, which was a step of `function`."""

        def logits() -> Logits:
            with self._lock:
                self._open()
                return self._executor.logits(function, 1, copy=False, first=row).ravel()

        return Scores(logits, self._executor.top_logits(function, row), self.overflow)

    def overflow(self) -> str | None:
        """Return why logits may be no numbers: a key or value overflows the float16 KV cache. None if none does."""
        with self._lock:
            for slot, seen in enumerate(self._positions):
                for layer in (state.overflowed(slot, seen) for state in self._executor.states):
                    if layer is not None:
                        return (
                            f"keys or values of layer {layer} are beyond 65504, the most that a KV cache in f16 holds; "
                            "compile the model again with --kv-dtype f32"
                        )
        return None

    def _read(self, function: str, tokens: NDArray[np.int32], slot: int) -> str:
        self._step([slot], len(tokens), self._executor.run, function, tokens, self._positions[slot], slot)
        self._keep(slot)
        return function

    def _step(self, slots: Sequence[int], count: int, run: Callable[..., None], *arguments: object) -> None:
        """Run a step that reads `count` tokens of each of the sequences in `slots`."""
        self._stepping = slots
        try:
            run(*arguments)
        except BaseException:
            self._recover()
            raise
        for slot in slots:
            self._positions[slot] += count
        self._stepping = ()

    def _recover(self) -> None:
        """Let the sequences of a step that was not completed go back to where their state is sure."""
        for slot in self._stepping:
            for state in self._executor.states:
                self._positions[slot] = state.recover(slot, self._positions[slot])
        self._stepping = ()

    def _reusable(self, slot: int, prefix: int) -> int:
        for state in self._executor.states:
            prefix = state.reusable(slot, prefix, self._positions[slot])
        return int(prefix)

    def _keep(self, slot: int, pin: bool = False) -> None:
        for state in self._executor.states:
            state.keep(slot, self._positions[slot], pin)

    def _after_fork(self) -> None:
        """Let a forked process use the engine as its parent's last whole step left it, if its accelerator allows it."""
        self._lock = threading.RLock()
        self._refusal = self._executor.after_fork() or self._refusal
        self._recover()


_engines: WeakSet[Engine] = WeakSet()


def _after_fork_in_child() -> None:
    """Give engines new locks: a thread that held one does not exist in the child, and would hold it for ever."""
    for engine in list(_engines):
        engine._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
