"""Choosing the next token from logits.

The steps and their order are those of Hugging Face's `generate` (transformers, generation/logits_process.py):
repetition penalty over prompt and generated tokens, temperature, top-k, top-p, min-p; then a draw from what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import KernelError, RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How to choose. Temperature 0 takes the most probable token, the lowest id among equals; top_k 0 and top_p 1 and
    min_p 0 leave all tokens in, repetition_penalty 1 changes none; with a seed the choices can be repeated.

    Raises RequestError on values that mean nothing.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, self.temperature >= 0, "0 or more")
        _check("top_k", self.top_k, self.top_k >= 0 and self.top_k == int(self.top_k), "0 (off) or a positive integer")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0")
        _check("seed", self.seed or 0, (self.seed or 0) >= 0, "0 or more")


def _check(name: str, value: float, holds: bool, must: str) -> None:
    if not holds or not math.isfinite(value):
        raise RequestError(f"{name} must be {must}, not {value}")


class Sampler:
    """Chooses tokens of one sequence; remembers which tokens occurred in it."""

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._seen = np.zeros(vocab, bool)

    def observe(self, ids: Iterable[int]) -> None:
        """Note the tokens of a prompt, for the repetition penalty."""
        self._seen[list(ids)] = True

    def sample(self, logits: NDArray[Any]) -> int:
        """The next token for logits [vocab]; it is noted as seen. Raises KernelError if they are not numbers."""
        ids, probabilities = self.distribution(logits)
        choice = np.searchsorted(np.cumsum(probabilities), self._random.random() * probabilities.sum(), side="right")
        token = int(ids[min(int(choice), len(ids) - 1)])
        self._seen[token] = True
        return token

    def distribution(self, logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be chosen, ascending by probability, and their probabilities (float64, summing to 1)."""
        scores = _penalized(_numbers(logits), self._seen, self.params.repetition_penalty)
        if self.params.temperature == 0:
            return np.array([np.argmax(scores)]), np.ones(1)
        scores = _finite(scores)
        with np.errstate(over="ignore"):
            scores = (scores - scores.max()) / self.params.temperature
        kept = _top_k(scores, self.params.top_k)
        # Ascending, and of equals the lower id last: the tails that top-p cuts off are then at the front.
        kept = kept[np.lexsort((-kept, scores[kept]))]
        kept = kept[_top_p(_softmax(scores[kept]), self.params.top_p)]
        probabilities = _softmax(scores[kept])
        probable = probabilities >= self.params.min_p * probabilities[-1]
        return kept[probable], probabilities[probable] / probabilities[probable].sum()


def _numbers(logits: NDArray[Any]) -> NDArray[np.float64]:
    scores = np.array(logits, np.float64)
    if np.isnan(scores).any() or scores.max() == -np.inf:
        kind = "contain NaN" if np.isnan(scores).any() else "rule out every token"
        raise KernelError(f"the model's logits {kind}: its weights or the artifact's code are broken; try `verify`")
    return scores


def _penalized(scores: NDArray[np.float64], seen: NDArray[np.bool_], penalty: float) -> NDArray[np.float64]:
    if penalty != 1.0:
        of_seen = scores[seen]
        scores[seen] = np.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
    return scores


def _finite(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same, but where some are +inf only those are possible, all alike: their limit."""
    return np.where(scores == np.inf, 0.0, -np.inf) if scores.max() == np.inf else scores


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def _top_k(scores: NDArray[np.float64], top_k: int) -> NDArray[np.int64]:
    """Tokens no less probable than the k-th: more than k where several equal it."""
    if not 0 < top_k < len(scores):
        return np.flatnonzero(scores > -np.inf)
    return np.flatnonzero((scores >= np.partition(scores, -top_k)[-top_k]) & (scores > -np.inf))


def _top_p(ascending: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Which are left when the least probable ones, as many as together have at most 1 - top_p, are cut off."""
    kept = np.cumsum(ascending) > 1 - top_p if top_p < 1 else np.ones(len(ascending), bool)
    kept[-1] = True
    return kept
