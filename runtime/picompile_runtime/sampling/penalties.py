"""Changes of the scores before a token is chosen: the bias of single tokens, and penalties on tokens that occurred.

Their order and their formulas are vLLM's (v1/sample/sampler.py): bias, repetition penalty over prompt and generated
tokens, then frequency and presence penalty over generated tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError


class ScoreChanges:
    """Penalties on the scores of one sequence, with the tokens that occurred in it as far as a penalty needs them."""

    def __init__(
        self, vocab: int, bias: Mapping[int, float], repetition: float, presence: float, frequency: float
    ) -> None:
        """Make the changes for a vocabulary of `vocab` tokens; for the rest see `SamplingParams`.

        Raises RequestError if `bias` has tokens that the vocabulary lacks.
        """
        if bias and max(bias) >= vocab:
            raise RequestError(f"logit_bias has token {max(bias)}, but the model's tokens are 0 to {vocab - 1}")
        self._biased = np.fromiter(bias, np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float64, len(bias))
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._vocab = vocab
        # Made only when a token is noted, since many samplers may wait for their turn.
        self._seen: NDArray[np.bool_] | None = None
        self._counts: NDArray[np.int32] | None = None
        self.are_any = bool(bias) or repetition != 1.0 or self._counts_tokens

    @property
    def _counts_tokens(self) -> bool:
        return self._presence != 0.0 or self._frequency != 0.0

    def note_prompt(self, tokens: NDArray[np.int32]) -> None:
        """Note the tokens of a prompt, int32 [n]."""
        if self._repetition != 1.0 and len(tokens):
            self._occurred()[tokens] = True

    def note_chosen(self, token: int) -> None:
        """Note a token that was generated."""
        if self._repetition != 1.0:
            self._occurred()[token] = True
        if self._counts_tokens:
            if self._counts is None:
                self._counts = np.zeros(self._vocab, np.int32)
            self._counts[token] += 1

    def apply(self, logits: NDArray[Any]) -> NDArray[np.float64]:
        """Return the changed scores, a new array float64 [vocab]."""
        scores = np.array(logits, np.float64)
        if len(self._biased):
            scores[self._biased] += self._bias
        if self._seen is not None:
            of_seen = scores[self._seen]
            scores[self._seen] = np.where(of_seen < 0, of_seen * self._repetition, of_seen / self._repetition)
        if self._counts is not None:
            chosen = np.flatnonzero(self._counts)
            scores[chosen] -= self._frequency * self._counts[chosen] + self._presence
        return scores

    def _occurred(self) -> NDArray[np.bool_]:
        if self._seen is None:
            self._seen = np.zeros(self._vocab, bool)
        return self._seen
