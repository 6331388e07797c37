"""How many neurons were computed, and how many of them fired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from picompile_runtime.program import FeedForward


@dataclass(frozen=True)
class Firing:
    """Of the neurons of one feed-forward part, the share that steps computed and the share that fired."""

    part: FeedForward
    computed_share: float
    fired_share: float


def firing_of(parts: Sequence[FeedForward], counts: NDArray[Any] | None, steps: int) -> list[Firing]:
    """Shares of each part from what kernels counted in `steps` steps: int64 [parts, 2], computed and fired."""
    if counts is None:
        return []
    shares = [(part, counts[part.stats_row] / part.neurons / max(steps, 1)) for part in parts]
    return [Firing(part, float(computed), float(fired)) for part, (computed, fired) in shares]


def mean_shares(rows: Sequence[Firing]) -> tuple[float, float]:
    """Computed and fired share over all neurons of the model; 1.0 each for a model with no feed-forward parts."""
    neurons = sum(row.part.neurons for row in rows)
    if not neurons:
        return 1.0, 1.0
    computed = sum(row.computed_share * row.part.neurons for row in rows)
    return computed / neurons, sum(row.fired_share * row.part.neurons for row in rows) / neurons
