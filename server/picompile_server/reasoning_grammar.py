"""Grammars of answers that may reason first: the reasoning is free, and what follows it is restricted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.tokenizer import Tokenizer
from picompile_server.reasoning_formats import ReasoningFormat
from picompile_server.request import Grammar
from picompile_server.vocabulary import token_bytes

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ReasoningTokens:
    """A model's tokens for its reasoning.

    Attributes:
        style: the texts around the reasoning.
        tokenizer: the model's.
        vocab: how many columns the model's logits have.
        end_tokens: tokens that end an answer.
    """

    style: ReasoningFormat
    tokenizer: Tokenizer
    vocab: int
    end_tokens: frozenset[int]

    def ids(self, text: str) -> list[int]:
        """Return the tokens of one of the format's texts."""
        return self.tokenizer.encode(text, special_tokens=False)

    @cached_property
    def texts(self) -> Sequence[bytes]:
        """The bytes of each token, those of special tokens their names. The first use takes a moment."""
        special = {number: name for name, number in self.tokenizer.special_tokens.items()}
        found = token_bytes(self.tokenizer, self.vocab, self.end_tokens)
        return [special[number].encode() if number in special else text for number, text in enumerate(found)]

    @cached_property
    def spaces(self) -> Mask:
        """Which tokens are spaces alone, bool [vocab]."""
        return np.array([bool(text) and not text.strip() for text in self.texts])

    @cached_property
    def unending(self) -> Mask:
        """Which tokens do not end an answer, bool [vocab]."""
        mask = np.ones(self.vocab, np.bool_)
        mask[[end for end in self.end_tokens if 0 <= end < self.vocab]] = False
        return mask

    def unfit(self, rest: bytes) -> list[int]:
        """Return the tokens that begin with `rest` and go on with more than spaces."""
        return [number for number, text in enumerate(self.texts) if text.startswith(rest) and text[len(rest) :].strip()]


class ReasoningGrammar:
    """Follows one answer: through its reasoning, which an end token cannot end, and then with the grammar of the rest.

    Behind the reasoning one token of spaces may come, which models have learned to write there.
    """

    def __init__(self, tokens: ReasoningTokens, make: Callable[[], Grammar], is_open: bool, is_text: bool) -> None:
        """Make the grammar of one answer.

        Args:
            tokens: the model's.
            make: makes the grammar of what follows the reasoning.
            is_open: whether the prompt has begun the reasoning. Else the answer begins with it, or has none.
            is_text: whether `make` is for a text, before which some formats write more, rather than for calls of tools.
        """
        style = tokens.style
        self._tokens, self._make, self._inner = tokens, make, make()
        self._end = style.end.encode()
        self._begin = deque([] if is_open else tokens.ids(style.begin.rstrip()))
        # Where a text must stand behind another, which this answer cannot begin with, it reasons.
        self._may_answer = not (is_text and style.before_answer)
        self._is_reasoning, self._tail = is_open, b""
        self._forced = deque[int]()
        self._behind = tokens.ids(style.between + (style.before_answer if is_text else ""))
        self._may_space = False
        self._mask: Mask | None = None

    def allowed(self) -> Mask | None:
        """Return which tokens may come next, bool [vocab]. Raises RequestError as the inner grammar does."""
        if self._is_reasoning:
            return self._in_reasoning()
        if self._forced:
            return self._only(self._forced[0])
        if self._begin and not self._may_answer:
            return self._only(self._begin[0])
        self._mask = mask = self._inner.allowed()
        if mask is None or not (self._begin or self._may_space):
            return mask
        mask = mask.copy()
        if self._begin:
            mask[self._begin[0]] = True
        if self._may_space:
            mask |= self._tokens.spaces
        return mask

    def accept(self, token: int) -> bool:
        """Note that `token` was chosen, and return whether the answer is complete."""
        if self._is_reasoning:
            self._reason(token)
            return False
        if self._forced:
            self._forced.popleft()
            return False
        fits = self._mask is None or bool(self._mask[token])
        if self._begin and token == self._begin[0]:
            self._begin.popleft()
            self._may_answer = self._may_answer and fits
            if not self._begin:
                self._inner, self._is_reasoning = self._make(), True
            elif self._may_answer:
                self._inner.accept(token)
            return False
        self._begin.clear()
        if self._may_space and not fits and self._tokens.spaces[token]:
            self._may_space = False
            return False
        self._may_space = False
        return self._inner.accept(token)

    def _only(self, token: int) -> Mask:
        mask = np.zeros(self._tokens.vocab, np.bool_)
        mask[token] = True
        return mask

    def _in_reasoning(self) -> Mask:
        """Return the mask of tokens of reasoning: none ends it that has more of a text than spaces."""
        mask = self._tokens.unending
        for length in range(1, len(self._end)):
            if self._tail.endswith(self._end[:length]):
                mask = mask.copy()
                mask[self._tokens.unfit(self._end[length:])] = False
        return mask

    def _reason(self, token: int) -> None:
        self._tail += self._tokens.texts[token]
        place = self._tail.find(self._end)
        if place < 0:
            self._tail = self._tail[-len(self._end) :]
            return
        if self._tail[place + len(self._end) :].strip():
            raise RequestError("the answer cannot go on: a token ends the reasoning and begins the answer")
        self._is_reasoning = False
        self._forced.extend(self._behind)
        self._may_space = not self._behind
