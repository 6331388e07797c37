"""An answer in progress: its checked request, its sampler, and the conditions of its end."""

from __future__ import annotations

import time

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import PicompileRuntimeError, RequestError
from picompile_runtime.request_checks import check_room, shown, token_ids, whole_number
from picompile_runtime.sampling.sampler import Logits, Sampler, Scores
from picompile_runtime.sampling.speculation import speculate
from picompile_server.log_probabilities import log_probabilities, log_probability
from picompile_server.request import (
    AnswerTimes,
    Finished,
    FinishReason,
    Grammar,
    Listener,
    PromptRead,
    ServingRequest,
    TokenChosen,
    TokenLogProbability,
)

_UNLIMITED = 2**63 - 1


class AnswerState:
    """An accepted request and the progress of its answer, which depends on no other answer.

    It is made on the caller's thread; after that only the engine's thread uses it.

    Attributes:
        number: the request's number.
        prompt: its token ids, int32 [n].
        reserved_tokens: tokens that its slot may come to hold.
        slot: its slot; -1 while it waits.
        cached_tokens: tokens of the prompt that were not read, since the cache had them.
        next_token: the token that was chosen last, which the engine reads next.
        listener: is told its events.
        is_dropped: whether the listener has raised an error, so that it is not told any more.
        has_ended: whether its last event was made.
    """

    def __init__(self, engine: Engine, request: ServingRequest, listener: Listener, draft: str = "none") -> None:
        """Check a request. Raises RequestError if it makes no sense, or does not fit the model.

        `draft` says how its tokens may be drafted, see `picompile_runtime.generate`.
        """
        if not isinstance(request, ServingRequest):
            raise RequestError(f"a scheduler takes a ServingRequest, not {shown(request)}")
        self.prompt = token_ids(request.prompt, engine.vocab)
        most = _UNLIMITED if request.max_tokens is None else request.max_tokens
        self._most = whole_number("max_tokens", value=most, least=0, most=_UNLIMITED, must="0 or more")
        self._top = request.top_log_probabilities
        if self._top is not None:
            self._top = whole_number("top_log_probabilities", self._top, 0, engine.vocab)
        elif request.with_prompt:
            raise RequestError("log-probabilities of the prompt need top_log_probabilities; give 0 or more")
        _check_context(len(self.prompt), self._most > 0, engine.context)
        self.number = 0
        self.request, self.listener = request, listener
        self.reserved_tokens = min(len(self.prompt) + self._most, engine.context)
        self.slot, self.cached_tokens, self.next_token = -1, 0, -1
        self.has_ended = self.is_dropped = False
        self._sampler = Sampler(request.params, engine.vocab)
        self._end_tokens = frozenset() if request.ignore_end else engine.artifact.eos_token_ids
        self._context = engine.context
        self._speculation = speculate(draft, engine.most_checked)
        self._grammar: Grammar | None = None
        self._generated = 0
        self._of_prompt: list[TokenLogProbability | None] = [None]
        self._submitted_s = time.monotonic()
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None

    @property
    def only_reads(self) -> bool:
        """Whether no token is to be generated."""
        return self._most == 0

    @property
    def is_admitted(self) -> bool:
        """Whether it has left the queue."""
        return self._admitted_s is not None

    def start(self) -> None:
        """Note that the answer was admitted, and make its sampler. Raises the errors of its grammar."""
        self._admitted_s = time.monotonic()
        self._sampler.observe(self.prompt)
        if self._speculation is not None:
            self._speculation.add(self.prompt.tolist())
        if self.request.grammar is not None:
            self._grammar = self.request.grammar()

    def note_prompt(self, logits: Logits, first: int) -> None:
        """Note the log-probabilities of some tokens of the prompt.

        Args:
            logits: float32 [n, vocab]; row i has the scores of the token at `first + i`.
            first: place of a token in the prompt.
        """
        tokens = self.prompt[first : first + len(logits)].tolist()
        self._of_prompt += log_probabilities(logits, tokens, self._top or 0)

    def prompt_read(self) -> PromptRead:
        """Return the event that the prompt was read."""
        return PromptRead(self.cached_tokens, tuple(self._of_prompt) if self.request.with_prompt else None)

    def choose(
        self, scores: Scores, position: int, fired_share: float | None
    ) -> tuple[TokenChosen, FinishReason | None]:
        """Choose the next token.

        Args:
            scores: those of the place behind the tokens that were read.
            position: how many tokens were read.
            fired_share: for the event.

        Returns:
            The event, and why the answer ends with this token; None if it goes on.

        Raises:
            Exception: whatever the grammar raises; RequestError if it allows no token, KernelError for broken scores.
        """
        allowed = None if self._grammar is None else self._grammar.allowed()
        if self._top is None:
            token, named = self._sampler.sample(scores, allowed), None
        else:
            logits = scores.logits()
            token = self._sampler.sample(logits, allowed)
            named = log_probability(logits, token, self._top)
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._generated += 1
        self.next_token = token
        if self._speculation is not None:
            self._speculation.add([token])
        return TokenChosen(token, named, fired_share), self._end_reason(token, position)

    def draft(self, position: int) -> list[int]:
        """Return a draft of the tokens after the last chosen one; empty if that should be read alone.

        `position` is how many tokens were read.
        """
        if self._speculation is None:
            return []
        return self._speculation.draft(min(self.reserved_tokens - position - 1, self._most - self._generated - 1))

    def saw_step(self, tokens: int, seconds: float) -> None:
        """Take note of the time of a step for so many tokens of this answer alone."""
        if self._speculation is not None:
            self._speculation.saw_step(tokens, seconds)

    def finished(self, reason: FinishReason, error: str = "") -> Finished:
        """Return the event that the answer has ended."""
        now = time.monotonic()
        times = AnswerTimes(self._submitted_s, self._admitted_s or now, self._first_token_s or now, now)
        return Finished(reason, times, error)

    def _end_reason(self, token: int, position: int) -> FinishReason | None:
        if token in self._end_tokens:
            return "eos"
        if self._grammar is not None and self._grammar.accept(token):
            return "grammar"
        if self._generated == self._most:
            return "max_tokens"
        return "context" if position >= self._context else None


def is_failure(error: BaseException) -> bool:
    """Return whether code that was called has failed: with any error but an interrupt, which the main thread gets."""
    return not isinstance(error, KeyboardInterrupt)


def one_line(error: BaseException) -> str:
    """Return an error's text as the event `Finished` has it."""
    if isinstance(error, PicompileRuntimeError):
        return str(error)
    return str(PicompileRuntimeError(f"{type(error).__name__}: {error}"))


def _check_context(prompt: int, generates: bool, context: int) -> None:
    """Raise RequestError unless the prompt fits the context, with room for a token if some are to be generated."""
    check_room(prompt, 0, context)
    if generates and prompt == context:
        raise RequestError(
            f"a prompt of {prompt} tokens leaves no room for an answer in the context of {context}; shorten it"
        )
