"""The k highest of a vocabulary's scores, without sorting or converting the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Many more groups than tokens are wanted, so that few of these share one; and groups so large that their highest scores
# are far fewer than all scores.
_GROUPS_PER_TOKEN, _LEAST_GROUP = 16, 4


def leading(scores: NDArray[Any], top_k: int) -> NDArray[np.int64]:
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
