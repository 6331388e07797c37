"""What a step says of the next token: all logits, and where a hot device has made them the highest before that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Leading:
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
    there. `leading` then is the highest of them, which are here already; else it is None.
    """

    logits: Callable[[], Logits]
    leading: Leading | None = None
