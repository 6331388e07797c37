"""Scores of the next token, and the top k of them, without sorting or converting the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# There are many more groups than tokens that are wanted, so that few of these are in the same group, and groups are so
# large that their highest scores are far fewer than all scores.
_GROUPS_PER_TOKEN, _LEAST_GROUP = 16, 4


def top_logits(scores: NDArray[Any], top_k: int) -> NDArray[np.int64]:
    """Return the tokens whose scores are no less than the k-th highest, int64 [n], ascending.

    They are more than k if several scores equal the k-th.

    Args:
        scores: [vocab].
        top_k: k; 0, or more than the vocabulary has, returns all tokens.
    """
    if not 0 < top_k < len(scores):
        return np.arange(len(scores))
    bound = _lower_bound(scores, top_k)
    ids = np.arange(len(scores)) if bound is None else np.flatnonzero(scores >= bound)
    some = scores[ids]
    kept: NDArray[np.int64] = ids[some >= _highest(some, top_k)]
    return kept


def _lower_bound(scores: NDArray[Any], top_k: int) -> Any | None:
    """Return a score that at least `top_k` scores reach; None if finding one would not save time.

    It is the k-th highest among the highest scores of groups.
    """
    groups = _GROUPS_PER_TOKEN * top_k
    size = len(scores) // groups
    if size < _LEAST_GROUP:
        return None
    return _highest(scores[: size * groups].reshape(size, groups).max(axis=0), top_k)


def _highest(scores: NDArray[Any], place: int) -> Any:
    """Return the score at `place`, counted from the highest, which is at place 1."""
    return np.partition(scores, len(scores) - place)[len(scores) - place]


Logits = NDArray[np.float32]


@dataclass(frozen=True)
class TopScores:
    """The top logits of a vocabulary, and their tokens.

    Attributes:
        scores: float32 [n], descending; NaN comes before all numbers.
        ids: their tokens, int32 [n], ascending among equal scores.
        is_all: whether the vocabulary has no other tokens. Else the others' scores are no higher than the last one.
    """

    scores: Logits
    ids: NDArray[np.int32]
    is_all: bool

    @property
    def highest(self) -> tuple[int, float]:
        """The first token with the highest score, and the score."""
        return int(self.ids[0]), float(self.scores[0])

    def top(self, count: int) -> tuple[NDArray[np.int64], Logits] | None:
        """Return the tokens whose scores are no less than the `count`-th, ascending, and their scores.

        A `count` of 0 asks for all tokens. Returns None if tokens that are not known here may be among them.
        """
        if 0 < count < len(self.ids):
            return self.at_least(self.scores[count - 1])
        return self.at_least(self.scores[-1]) if self.is_all else None

    def at_least(self, bound: np.float32 | float) -> tuple[NDArray[np.int64], Logits] | None:
        """Return the tokens whose scores are no less than `bound`, ascending, and their scores; None as for `top`."""
        kept = self.scores >= bound
        if kept[-1] and not self.is_all:
            return None
        ids = self.ids[kept].astype(np.int64)
        order = np.argsort(ids)
        return ids[order], self.scores[kept][order]


@dataclass(frozen=True)
class Scores:
    """The scores of the next token.

    Attributes:
        logits: returns the scores of the whole vocabulary, float32 [vocab], in the engine's memory, which its next step
            overwrites. If the accelerator has them, it copies them from there.
        top_logits: the highest of them, which the host has already, if the accelerator has the others; else None.
    """

    logits: Callable[[], Logits]
    top_logits: TopScores | None = None
