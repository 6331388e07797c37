"""The k highest of a vocabulary's scores, without sorting or converting the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Many more groups than tokens are wanted, so that few of these share one; and groups so large that their highest scores
# are far fewer than all scores.
_GROUPS_PER_TOKEN, _LEAST_GROUP = 16, 4


def top_logits(scores: NDArray[Any], top_k: int) -> NDArray[np.int64]:
    """Tokens whose scores [vocab] are no less than the k-th, in order: more than k where several equal it.

    All tokens for `top_k` 0 or one that is larger than the vocabulary.
    """
    if not 0 < top_k < len(scores):
        return np.arange(len(scores))
    bound = _lower_bound(scores, top_k)
    ids = np.arange(len(scores)) if bound is None else np.flatnonzero(scores >= bound)
    some = scores[ids]
    kept: NDArray[np.int64] = ids[some >= _highest(some, top_k)]
    return kept


def _lower_bound(scores: NDArray[Any], top_k: int) -> Any | None:
    """A score that at least `top_k` scores reach; None where finding one would not save anything.

    It is the k-th of the highest scores of groups, each of which is a score.
    """
    groups = _GROUPS_PER_TOKEN * top_k
    size = len(scores) // groups
    if size < _LEAST_GROUP:
        return None
    return _highest(scores[: size * groups].reshape(size, groups).max(axis=0), top_k)


def _highest(scores: NDArray[Any], place: int) -> Any:
    """The score at `place`, from the highest on, which is at place 1."""
    return np.partition(scores, len(scores) - place)[len(scores) - place]


# What a step says of the next token: all logits, and where a hot device has made them the highest before that.


Logits = NDArray[np.float32]


@dataclass(frozen=True)
class TopScores:
    """The highest of a vocabulary's scores, and their tokens.

    `scores` float32 [n] descend, and `ids` int32 [n] rise where they are equal; NaN comes before all numbers. With
    `is_all` the vocabulary has no others; else these are no higher than the last one here.
    """

    scores: Logits
    ids: NDArray[np.int32]
    is_all: bool

    @property
    def highest(self) -> tuple[int, float]:
        """The first of the highest scores: its token, and the score."""
        return int(self.ids[0]), float(self.scores[0])

    def top(self, count: int) -> tuple[NDArray[np.int64], Logits] | None:
        """The tokens whose scores are no less than the `count`-th, ascending, and their scores; 0 asks for all tokens.

        None where others, which are not here, may be among them.
        """
        if 0 < count < len(self.ids):
            return self.at_least(self.scores[count - 1])
        return self.at_least(self.scores[-1]) if self.is_all else None

    def at_least(self, bound: np.float32 | float) -> tuple[NDArray[np.int64], Logits] | None:
        """The same of tokens whose scores are no less than `bound`."""
        kept = self.scores >= bound
        if kept[-1] and not self.is_all:
            return None
        ids = self.ids[kept].astype(np.int64)
        order = np.argsort(ids)
        return ids[order], self.scores[kept][order]


@dataclass(frozen=True)
class Scores:
    """The scores of the token behind those that were read: `logits()` are those of the whole vocabulary, float32
    [vocab], in the engine's memory, which its next step overwrites; where the hot device has them they are copied from
    there. `top_logits` then is the highest of them, which are here already; else it is None.
    """

    logits: Callable[[], Logits]
    top_logits: TopScores | None = None
