"""Statistics of the speeds of several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SpeedStatistics:
    """Median speed of several rounds, and the standard deviation between them (0.0 for a single one)."""

    tokens_per_s: float
    stdev: float

    @classmethod
    def of(cls, tokens: int, seconds: Sequence[float]) -> SpeedStatistics:
        """Return the speed of rounds of `tokens` tokens that took so many `seconds`."""
        speeds = [tokens / second for second in seconds]
        return cls(float(np.median(speeds)), float(np.std(speeds, ddof=1)) if len(speeds) > 1 else 0.0)
