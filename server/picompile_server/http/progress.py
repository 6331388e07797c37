"""Progress of one answer of a request: its events become text, log-probabilities, counts and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from picompile_server.http.errors import ApiError
from picompile_server.http.grammars import WatchedGrammar
from picompile_server.model import ServedModel
from picompile_server.request import (
    AnswerTimes,
    Event,
    Finished,
    PromptRead,
    ServingRequest,
    TokenChosen,
    TokenLogProbability,
)
from picompile_server.text import TextAssembler

FinishName = Literal["stop", "length", "tool_calls"]
_FINISH: dict[str, FinishName] = {"eos": "stop", "grammar": "stop", "max_tokens": "length", "context": "length"}


@dataclass(frozen=True)
class NamedToken:
    """A token, its log-probability, and where its text begins in the answer's text, in characters."""

    named: TokenLogProbability
    offset: int


@dataclass(frozen=True)
class Delta:
    """The part of an answer that an event adds: text, the tokens of this text, and in the end why the answer ended.

    `fired_share` is the share of the neurons that fired for the latest token, None if it is not known.
    """

    text: str
    tokens: Sequence[NamedToken] = ()
    finish: FinishName | None = None
    fired_share: float | None = None


@dataclass
class AnswerProgress:
    """An answer of a request, while its events come.

    Attributes:
        model: who answers.
        request: what the scheduler was asked for.
        assembler: makes its text.
        asked_s: when it was asked for, of `time.monotonic`.
        keeps_end: whether the model's end token is among the tokens of the deltas; it has no text.
        tokens: the answer's tokens, the end token and those of a stop text included.
        cached_tokens: how many tokens of the prompt were not read.
        reasoning_tokens: how many of the answer's tokens are reasoning, which those who read its text note.
        prompt: the log-probabilities of the prompt's tokens.
        first_token_s, last_token_s: when the first and the latest token came, of `time.monotonic`; 0 before.
        times: when what happened, known in the end.
        outcome: why the answer ended, as the scheduler has it; "stop" for a stop text, and "" before.
    """

    model: ServedModel
    request: ServingRequest
    assembler: TextAssembler
    keeps_end: bool = False
    asked_s: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    prompt: Sequence[TokenLogProbability | None] = ()
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    times: AnswerTimes | None = None
    outcome: str = ""
    _unsent: list[NamedToken] = field(default_factory=list)
    _text: str = ""
    _fired: tuple[float, int] = (0.0, 0)
    _last_share: float | None = None

    def __post_init__(self) -> None:
        # With the last of these tokens the answer ends: its text waits for the reason, and comes together with it.
        most = self.model.engine.context - len(self.request.prompt) + 1
        self._last = most if self.request.max_tokens is None else min(most, self.request.max_tokens)
        self._end_tokens = frozenset() if self.request.ignore_end else self.model.end_tokens

    @property
    def generated(self) -> int:
        """Number of tokens that the answer has."""
        return len(self.tokens)

    @property
    def fired_share(self) -> float | None:
        """The mean share of the neurons that fired in the steps of the answer so far; None if it is not known."""
        total, steps = self._fired
        return total / steps if steps else None

    def take(self, event: Event) -> Delta | None:
        """Take an event, and return its additions; None if there are none.

        Raises ApiError if the answer has failed. When the assembler has found a stop text, cancel the answer.
        """
        if isinstance(event, TokenChosen):
            return self._take_token(event)
        if isinstance(event, PromptRead):
            self.cached_tokens = event.cached_tokens
            self.prompt = event.log_probabilities or ()
            return None
        return self._finish(event)

    def _take_token(self, event: TokenChosen) -> Delta | None:
        if self.assembler.is_stopped:  # chosen before the engine knew
            return None
        self.tokens.append(event.token)
        self.first_token_s = self.first_token_s or event.chosen_s
        self.last_token_s = event.chosen_s
        self._last_share = event.fired_share
        if event.fired_share is not None:
            self._fired = self._fired[0] + event.fired_share, self._fired[1] + 1
        is_end = event.token in self._end_tokens
        if event.log_probability is not None and (self.keeps_end or not is_end):
            self._unsent.append(NamedToken(event.log_probability, self.assembler.decoded))
        if not is_end:
            self._text += self.assembler.push(event.token)
        if not self._text or is_end or self.generated >= self._last or self.assembler.is_stopped:
            return None
        return self._delta(None)

    def _finish(self, event: Finished) -> Delta:
        self.times = event.times
        self._text += self.assembler.finish()
        self.outcome = "stop" if self.assembler.is_stopped else event.reason
        grammar = self.request.grammar
        if self.outcome == "error" and isinstance(grammar, WatchedGrammar) and grammar.failures:
            raise ApiError(400, grammar.failures[0], code="grammar_failed")
        if self.outcome == "error":
            raise ApiError(500, f"the model failed: {event.error}", code="engine_error")
        if self.outcome == "cancelled":
            raise ApiError(503, "the server is shutting down and has cancelled the answer", code="shutting_down")
        return self._delta(_FINISH.get(self.outcome, "stop"))

    def _delta(self, finish: FinishName | None) -> Delta:
        text, self._text = self._text, ""
        shown = self.assembler.shown
        if finish is not None and not self.assembler.is_stopped:
            sent, self._unsent = self._unsent, []
        else:  # the text of later ones is held back, or is not shown at all
            sent = [token for token in self._unsent if token.offset < shown]
            self._unsent = self._unsent[len(sent) :]
        return Delta(text, sent, finish, self._last_share)
