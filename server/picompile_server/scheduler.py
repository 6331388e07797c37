"""The scheduler: it takes requests from any thread, and answers them on one, which does all of the engine's steps.

It works in turns. A turn takes cancellations, admits the request that has waited for longest if a slot is free and no
prompt is being read, reads one chunk of the prompt that is being read, and generates one token of every other answer in
one step. So a long prompt delays the next token of the others by one chunk at most.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import whole_number
from picompile_runtime.sampling.speculation import check_draft
from picompile_server.answer import AnswerState, is_failure
from picompile_server.batch import Batch
from picompile_server.request import Listener, ServingRequest
from picompile_server.slots import SlotState
from picompile_server.stats import SchedulerStats

_MOST = 2**63 - 1


class QueueFullError(RequestError):
    """Raised where as many requests wait as may wait."""


class ClosedError(RequestError):
    """The scheduler takes no requests any more."""


@dataclass(frozen=True)
class SchedulerOptions:
    """Options of scheduling requests.

    Attributes:
        max_waiting: how many requests may wait, beyond those for which slots are free.
        kv_tokens: how many tokens the slots may hold together; None for as many as they have room for. A request
            reserves its prompt and its `max_tokens`, and waits until that is free.
        prefix_reuse: whether what a slot holds of a prompt is not read again.
        exact_reuse: whether only tokens that were read as a prompt are reused, so that an answer has the same bits
            with reuse and without. False reuses decoded tokens as they are.
        reread: whether answers that have ended are read again as prompts while there is nothing else to do, so that
            they can be reused. It is not needed without `exact_reuse`.
        draft: how tokens are drafted while a single answer is made, see `picompile_runtime.generate`. Where several are
            made, a step for all of them reads matrices once already.

    Raises:
        RequestError: a value makes no sense.
    """

    max_waiting: int = 1024
    kv_tokens: int | None = None
    prefix_reuse: bool = True
    exact_reuse: bool = True
    reread: bool = True
    draft: str = "none"

    def __post_init__(self) -> None:
        whole_number("max_waiting", value=self.max_waiting, least=0, most=_MOST, must="0 or more")
        check_draft(self.draft)
        if self.kv_tokens is not None:
            whole_number("kv_tokens", value=self.kv_tokens, least=1, most=_MOST, must="1 or more")


class Answer:
    """An answer that was asked for. `number` is its request's, counted from 1."""

    def __init__(self, number: int, cancel: Callable[[], None]) -> None:
        self.number = number
        self._cancel = cancel

    def cancel(self) -> None:
        """End the answer; its slot is free after the current step. Does nothing if the answer has ended.

        It may be called from any thread, a listener included. The listener is told that the answer has `Finished`.
        """
        self._cancel()


class Scheduler:
    """A scheduler that answers many requests on one engine, which nothing else may use meanwhile.

    A sequence depends on nothing but its own request: its tokens are the same whichever others run beside it.
    """

    def __init__(self, engine: Engine, options: SchedulerOptions | None = None, start: bool = True) -> None:
        """Make a scheduler.

        Args:
            engine: the engine; it stays open when the scheduler is closed.
            options: how requests are scheduled.
            start: whether to start the engine's thread. Without it, call `step`.
        """
        self._engine = engine
        self.options = options or SchedulerOptions()
        self._lock = threading.Condition()
        self._batch = Batch(
            engine,
            lock=self._lock,
            kv_tokens=self.options.kv_tokens,
            exact_reuse=self.options.exact_reuse,
            prefix_reuse=self.options.prefix_reuse,
        )
        self._rereads = self.options.reread and self.options.exact_reuse and self.options.prefix_reuse
        self._waiting: deque[AnswerState] = deque()
        self._cancelled: list[AnswerState] = []
        self._submitted = 0
        self._is_closing = self._is_aborting = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True) if start else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, request: ServingRequest, listener: Listener) -> Answer:
        """Queue a request, and return its answer. It may be called from any thread.

        Args:
            request: what to answer.
            listener: called with each event of the answer on the engine's thread, possibly before `submit` returns.
                It must return at once. If it raises an error, the answer is cancelled, and it is not called again.

        Raises:
            RequestError: the request makes no sense or does not fit the model.
            QueueFullError: as many requests wait as may.
            ClosedError: the scheduler was closed.
        """
        state = AnswerState(self._engine, request, listener, self.options.draft)
        limit = self.options.kv_tokens
        if limit is not None and state.reserved_tokens > limit:
            raise RequestError(
                f"the request needs room for {state.reserved_tokens} tokens of prompt and answer, and the KV cache has "
                f"{limit}; shorten the prompt or lower max_tokens"
            )
        with self._lock:
            if self._is_closing:
                raise ClosedError("the scheduler is closed and takes no requests any more")
            if len(self._waiting) - self._batch.slots.idle >= self.options.max_waiting:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._submitted += 1
            state.number = self._submitted
            self._waiting.append(state)
            self._lock.notify_all()
        return Answer(state.number, lambda: self._cancel(state))

    def stats(self) -> SchedulerStats:
        """Return a snapshot of counts, queue and cache. It may be called from any thread."""
        capacity = self._engine.sequences * self._engine.context
        with self._lock:
            batch = self._batch
            return SchedulerStats(
                **dataclasses.asdict(batch.counters),
                waiting=len(self._waiting),
                reading=int(batch.reading is not None),
                decoding=len(batch.decoding),
                held_tokens=batch.slots.held_tokens,
                reserved_tokens=batch.reserved_tokens,
                capacity_tokens=min(capacity, self.options.kv_tokens or capacity),
                fired_share=batch.fired_share,
            )

    def slots(self) -> tuple[SlotState, ...]:
        """Return the state of each slot of the KV cache. It may be called from any thread."""
        with self._lock:
            return self._batch.slots.states()

    def close(self, drain: bool = True) -> None:
        """Take no more requests, and return when all answers have ended. It may be called from any thread.

        Args:
            drain: whether to finish the requests that are running or waiting; else they are cancelled.
        """
        with self._lock:
            self._is_closing = True
            self._is_aborting |= not drain
            self._lock.notify_all()
        if self._thread is None:
            while self.step():
                pass
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def step(self) -> bool:
        """Do one turn on this thread, and return whether there was something to do. Only for `start=False`.

        It raises nothing: an error of the engine ends all running answers.
        """
        try:
            has_worked = self._turn()
        except BaseException as error:  # of a kernel, or of whatever else may fail: the scheduler goes on
            if not is_failure(error):
                raise
            self._batch.fail(error)
            has_worked = True
        self._batch.tell()
        return has_worked

    def _run(self) -> None:
        """Do turns until the scheduler is closed; sleep while it is idle."""
        while True:
            if self.step():
                continue
            with self._lock:
                if self._is_closing and not self._waiting:
                    return
                self._lock.wait_for(lambda: self._waiting or self._cancelled or self._is_closing)

    def _turn(self) -> bool:
        has_cancelled = self._take_cancellations()
        has_admitted = self._admit()
        has_read = self._batch.read_chunk()
        self._batch.tell()  # the first token is not kept back until the others have theirs
        has_cancelled |= self._take_cancellations()
        if self._batch.decode() or has_read or has_admitted or has_cancelled:
            return True
        return self._rereads and not self._is_closing and self._batch.reread()

    def _admit(self) -> bool:
        """Admit the requests that waited for longest, until there is a prompt to read; return whether it did."""
        has_admitted = False
        while self._waiting and self._batch.fits(self._waiting[0]):
            with self._lock:
                answer = self._waiting.popleft()
            self._batch.admit(answer)
            has_admitted = True
        return has_admitted

    def _cancel(self, answer: AnswerState) -> None:
        with self._lock:
            if not answer.has_ended:
                self._cancelled.append(answer)
                self._lock.notify_all()

    def _take_cancellations(self) -> bool:
        """End the answers that were cancelled, and return whether there were any."""
        with self._lock:
            named = [*self._batch.running, *self._waiting] if self._is_aborting else dict.fromkeys(self._cancelled)
            self._cancelled = []
            cancelled = [answer for answer in named if not answer.has_ended]
            for answer in cancelled:
                if not answer.is_admitted:
                    self._waiting.remove(answer)
        for answer in cancelled:
            self._batch.end(answer, "cancelled")
        return bool(cancelled)
