"""Requests to a scheduler, and the events by which it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.sampling.sampler import SamplingParams

# Why an answer ended: at an end token of the model, at a token that completes the grammar, after `max_tokens`, where
# the context is full, because the client cancelled it, or because the engine or the grammar failed.
FinishReason = Literal["eos", "grammar", "max_tokens", "context", "cancelled", "error"]


class Grammar(Protocol):
    """Restricts which tokens may follow. One object serves one answer."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which tokens may come next, bool [vocab]; None if all may."""

    def accept(self, token: int) -> bool:
        """Note that `token` was chosen, and return whether the answer is complete."""


@dataclass(frozen=True)
class ServingRequest:
    """One answer that a scheduler is asked for.

    Attributes:
        prompt: token ids, one or more.
        params: how to choose tokens.
        max_tokens: how many tokens to generate at most; None goes on to the end of the context. 0 only reads the
            prompt.
        top_log_probabilities: how many alternatives each token's log-probabilities name; None asks for none at all, 0
            for those of the chosen tokens alone.
        with_prompt: whether the prompt's tokens get log-probabilities, too. Then nothing of it is reused, and
            `top_log_probabilities` is not None.
        ignore_end: whether to go on behind the model's end tokens.
        grammar: makes what restricts the tokens; called once, on the engine's thread.
    """

    prompt: Sequence[int] | NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    top_log_probabilities: int | None = None
    with_prompt: bool = False
    ignore_end: bool = False
    grammar: Callable[[], Grammar] | None = None


@dataclass(frozen=True)
class TokenLogProbability:
    """A token, the logarithm of its probability, and those of the likeliest tokens in its place, likeliest first.

    They are those of the model itself: before temperature, penalties and grammars.
    """

    token: int
    log_probability: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """The prompt was read: `cached_tokens` of its tokens were in the KV cache already.

    `log_probabilities` has an entry for each of its tokens if they were asked for: None for the first.
    """

    cached_tokens: int
    log_probabilities: tuple[TokenLogProbability | None, ...] | None = None


@dataclass(frozen=True)
class TokenChosen:
    """The next token of the answer. `fired_share` is the share of the neurons that fired in the step that read the
    token before it, from 0 to 1, over all sequences of the step; None if it is not known: for the first token of an
    answer, and with an accelerator but in each 16th step, which has the mean of the latest 16.

    An end token of the model is the last token of an answer. It has no text. `chosen_s` is of `time.monotonic`.
    """

    token: int
    log_probability: TokenLogProbability | None = None
    fired_share: float | None = None
    chosen_s: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class AnswerTimes:
    """Times of an answer, in s of `time.monotonic`: asked for, admitted to a slot, first token, end.

    What did not happen has the time of the end.
    """

    submitted_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float


@dataclass(frozen=True)
class Finished:
    """The answer has ended; nothing follows. `error` is one line if the reason is `error`."""

    reason: FinishReason
    times: AnswerTimes
    error: str = ""


Event = PromptRead | TokenChosen | Finished
# Called on the engine's thread for each event, in order; it must return at once and raise nothing.
Listener = Callable[[Event], None]
