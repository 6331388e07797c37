"""The answers that have a slot: prompts are read chunk by chunk, and all answers get their tokens in shared steps."""

from __future__ import annotations

import threading
import time

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import KernelError
from picompile_runtime.sampling.sampler import Scores
from picompile_server.answer import AnswerState, is_failure, one_line
from picompile_server.firing import FiringMeter
from picompile_server.request import Event, FinishReason
from picompile_server.slots import SlotTable
from picompile_server.stats import Counters

# Tokens of a prompt that are read in a turn while other answers wait for their next tokens.
_SHARED_TURN_TOKENS = 64


class Batch:
    """The running answers; one thread does their steps. At most one prompt is being read; others wait in the queue.

    So a request is placed when the engine is ready for its prompt, and finds in the slots whatever was read before.
    What other threads see, the slots and the counts, changes under `lock`; steps and listeners run without it.

    Attributes:
        slots: what the slots hold.
        reading: the answer whose prompt is being read.
        decoding: the answers whose tokens are being generated, in the order in which their prompts were read.
        counters: counts and seconds so far.
        reserved_tokens: tokens that the slots of these answers may come to hold.
        fired_share: the share of the neurons that fired in the latest steps.
    """

    def __init__(
        self, engine: Engine, lock: threading.Condition, kv_tokens: int | None, exact_reuse: bool, prefix_reuse: bool
    ) -> None:
        """Make a batch without answers. For the options see `SchedulerOptions`."""
        self._engine, self._lock = engine, lock
        self._kv_tokens, self._prefix_reuse = kv_tokens, prefix_reuse
        self.slots = SlotTable(engine.sequences, engine.context, exact_reuse, engine.reusable)
        self.reading: AnswerState | None = None
        self.decoding: list[AnswerState] = []
        self.counters = Counters()
        self.reserved_tokens = 0
        self.fired_share: float | None = None
        self._firing = FiringMeter(engine)
        self._events: list[tuple[AnswerState, Event]] = []

    @property
    def running(self) -> list[AnswerState]:
        """The answers that have a slot."""
        return ([] if self.reading is None else [self.reading]) + self.decoding

    def fits(self, answer: AnswerState) -> bool:
        """Return whether an answer can be admitted now."""
        if self.reading is not None or not self.slots.idle:
            return False
        return self._kv_tokens is None or self.reserved_tokens + answer.reserved_tokens <= self._kv_tokens

    def admit(self, answer: AnswerState) -> None:
        """Give a slot to an answer that `fits`, with the known part of its prompt; an error of its grammar ends it.

        Raises RequestError or KernelError if the engine fails.
        """
        with self._lock:
            self.reading = answer
            self.reserved_tokens += answer.reserved_tokens
        try:
            answer.start()
        except BaseException as error:  # whatever a grammar raises
            if not is_failure(error):
                raise
            self.end(answer, "error", one_line(error))
            return
        place = self.slots.place(answer.prompt, self._prefix_reuse and not answer.request.with_prompt)
        if place.source is None:
            self._engine.rewind(place.reused, place.slot)
        else:
            self._engine.copy(place.source, place.slot, place.reused)
        with self._lock:
            self.slots.begin(place, answer.prompt, answer.number)
            answer.slot, answer.cached_tokens = place.slot, place.reused
            evicted = [] if self._kv_tokens is None else self.slots.evict(self._kv_tokens - self.reserved_tokens)
            # The slot keeps no more memory than this request may need: with time each slot has had a long one.
            if self.slots.resident(place.slot) > answer.reserved_tokens:
                self.slots.released(place.slot)
                evicted.append(place.slot)
        for slot in evicted:
            self._engine.rewind(self.slots.position(slot), slot)
            self._engine.release(slot)

    def read_chunk(self) -> bool:
        """Read one chunk of the prompt that is being read, and return whether there is one.

        Raises RequestError or KernelError if the engine fails.
        """
        answer = self.reading
        if answer is None:
            return False
        first, prompt = self.slots.position(answer.slot), len(answer.prompt)
        # The last token is read by a step that leaves its scores; all before it by steps that score what follows.
        is_scored = answer.request.with_prompt and first < prompt - 1
        last = min(first + self._turn_tokens(), prompt - is_scored)
        scores = self._read(answer, first, last, is_scored)
        if last < prompt:
            return True
        with self._lock:
            self.reading = None
            self.decoding.append(answer)
            self.counters.prompt_tokens += prompt
            self.counters.cached_tokens += answer.cached_tokens
        self._events.append((answer, answer.prompt_read()))
        if scores is None:
            self.end(answer, "max_tokens")
        else:
            self._choose(answer, scores, None)
        return True

    def _turn_tokens(self) -> int:
        """Return how many tokens of a prompt are read in a turn: fewer where other answers wait for it to end."""
        return min(self._engine.chunk, _SHARED_TURN_TOKENS) if self.decoding else self._engine.chunk

    def _read(self, answer: AnswerState, first: int, last: int, is_scored: bool) -> Scores | None:
        """Read tokens of a prompt in one step, and return the scores behind the prompt if they are needed."""
        part, scores, rows = answer.prompt[first:last].tolist(), None, None
        start = time.perf_counter()
        if is_scored:
            rows = next(self._engine.score(part, answer.slot))
        else:
            is_last = last == len(answer.prompt) and not answer.only_reads
            scores = self._engine.read_chunk(part, answer.slot, is_last)
        seconds = time.perf_counter() - start
        with self._lock:
            self.slots.prompt_read(answer.slot, len(part))
            self.counters.prompt_steps += 1
            self.counters.prompt_s += seconds
        if rows is not None:
            try:
                answer.note_prompt(rows, first + 1)
            except KernelError as error:  # scores that are no numbers
                self.end(answer, "error", one_line(error))
        return scores

    def decode(self) -> bool:
        """Read the last token of each answer in one step, choose the next ones, and return whether there are answers.

        A single answer may have a draft, which the step checks. Raises RequestError or KernelError if the engine
        fails.
        """
        answers = list(self.decoding)
        if not answers:
            return False
        only = answers[0] if len(answers) == 1 else None
        drafted = [] if only is None else only.draft(self.slots.position(only.slot))
        tokens, slots = [answer.next_token for answer in answers], [answer.slot for answer in answers]
        start = time.perf_counter()
        if drafted:
            rows = self._engine.read_each(tokens + drafted, slots[0])
        else:
            rows = self._engine.read_sequences(tokens, slots)
        seconds = time.perf_counter() - start
        if only is not None:
            only.saw_step(len(rows), seconds)
        share = self._firing.after_step()
        with self._lock:
            if not drafted:
                self._decoded(slots)
            self.counters.decode_steps += 1
            self.counters.decode_s += seconds
            self.fired_share = self._firing.recent_share
        if drafted:
            self._choose_each(answers[0], rows, drafted, share)
            return True
        for answer, scores in zip(answers, rows, strict=True):
            self._choose(answer, scores, share)
        return True

    def _choose_each(self, answer: AnswerState, rows: list[Scores], drafted: list[int], share: float | None) -> None:
        """Choose one answer's tokens as long as they agree with the draft, and one token more."""
        slot, accepted = answer.slot, 0
        for scores, draft in zip(rows, [*drafted, None], strict=True):
            with self._lock:
                self._decoded([slot])
            self._choose(answer, scores, share)
            is_right = answer.next_token == draft
            accepted += is_right
            if answer.has_ended or not is_right:
                break
        with self._lock:
            self.counters.drafted_tokens += len(drafted)
            self.counters.accepted_tokens += accepted
        self._engine.rewind(self.slots.position(slot), slot)

    def _decoded(self, slots: list[int]) -> None:
        """Note, under the lock, that the last chosen tokens of the answers in `slots` were read."""
        for slot in slots:
            self.slots.decoded(slot)
        self.counters.decoded_tokens += len(slots)

    def _choose(self, answer: AnswerState, scores: Scores, share: float | None) -> None:
        try:
            event, reason = answer.choose(scores, self.slots.position(answer.slot), share)
        except BaseException as error:  # of the grammar, or scores that are no numbers: other answers go on
            if not is_failure(error):
                raise
            self.end(answer, "error", one_line(error))
            return
        with self._lock:
            self.slots.chosen(answer.slot, event.token)
            self.counters.generated_tokens += 1
        self._events.append((answer, event))
        if reason is not None:
            self.end(answer, reason)

    def reread(self) -> bool:
        """Read a chunk of an ended answer as if it were a prompt, and return whether there was one to read.

        Raises RequestError or KernelError if the engine fails.
        """
        slot = self.slots.next_reread()
        if slot is None:
            return False
        with self._lock:
            position = self.slots.rewind(slot)
        self._engine.rewind(position, slot)
        part = self.slots.unread(slot, self._engine.chunk).tolist()
        self._engine.read_chunk(part, slot, is_last=False)
        with self._lock:
            self.slots.prompt_read(slot, len(part))
            self.counters.reread_tokens += len(part)
        return True

    def end(self, answer: AnswerState, reason: FinishReason, error: str = "") -> None:
        """End an answer that has not ended, running or waiting; its slot is free at once."""
        with self._lock:
            if answer.is_admitted:
                self.reserved_tokens -= answer.reserved_tokens
            if self.reading is answer:
                self.reading = None
            elif answer in self.decoding:
                self.decoding.remove(answer)
            if answer.slot >= 0:
                self.slots.release(answer.slot, forget=reason == "error")
            self.counters.finished[reason] += 1
            answer.has_ended = True
        self._events.append((answer, answer.finished(reason, error)))

    def fail(self, error: BaseException) -> None:
        """End all running answers with an error of the engine, after which the content of the cache is unknown."""
        for answer in self.running:
            self.end(answer, "error", one_line(error))
        with self._lock:
            self.slots.forget_all()

    def tell(self) -> None:
        """Send events to the listeners. One that raises an error gets no more of them."""
        while self._events:
            events, self._events = self._events, []
            for answer, event in events:
                if answer.is_dropped:
                    continue
                try:
                    answer.listener(event)
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    answer.is_dropped = True
                    if not answer.has_ended:
                        self.end(answer, "cancelled")
