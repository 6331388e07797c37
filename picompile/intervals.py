"""Means of figures of single tokens, with 95 % confidence intervals that allow for neighbours being alike."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Neighbouring tokens are taken together in blocks, within which they may depend on each other in any way. Longer is
# better, for texts differ from page to page; but fewer blocks than these say too little of how much they differ.
_LEAST_BLOCKS = 16
_LEAST_BLOCK_TOKENS = 64
# The 97.5 % quantile of the normal distribution.
_NORMAL_QUANTILE = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A measured figure and the ends of its 95 % confidence interval, None where the text is too short for one."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, function: Callable[[float], float]) -> "Estimate":
        """Return the estimate of `function` of the figure; `function` must not fall anywhere."""
        low, high = (None if end is None else function(end) for end in (self.low, self.high))
        return Estimate(function(self.value), low, high)


def block_size(window_tokens: Sequence[int]) -> int:
    """Return the tokens of a block: as many as leave 16 blocks, but 64 at least, and a whole window at most."""
    return min(max(sum(window_tokens) // _LEAST_BLOCKS, _LEAST_BLOCK_TOKENS), max(window_tokens, default=1))


def token_blocks(window_tokens: Sequence[int], size: int) -> NDArray[np.int64]:
    """Return the number of each token's block, int64 [tokens], for windows of so many tokens; no block spans two.

    Each window is cut into equal blocks of about `size` tokens, or is one, if it is shorter.
    """
    blocks: list[NDArray[np.int64]] = []
    first = 0
    for tokens in window_tokens:
        count = max(1, round(tokens / size))
        blocks.append(first + np.arange(tokens, dtype=np.int64) * count // max(tokens, 1))
        first += count if tokens else 0
    return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)


def estimate_mean(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> Estimate:
    """Return the mean of `values` [tokens], with the interval that the spread of the blocks gives.

    Blocks are clusters of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3): with block sums s and
    block sizes n the mean is Σs / Σn, and its variance is B / (B − 1) · Σ(s − mean · n)² / (Σn)², for B blocks.
    """
    sizes = np.bincount(blocks).astype(np.float64)
    count = len(sizes)
    mean = float(values.mean())
    if count < 2 or not math.isfinite(mean):
        return Estimate(mean)
    residuals = np.bincount(blocks, weights=values) - mean * sizes
    error = math.sqrt(count / (count - 1) * float(np.square(residuals).sum())) / float(sizes.sum())
    reach = student_quantile(count - 1) * error
    return Estimate(mean, mean - reach, mean + reach)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom, 1 or more.

    One and two degrees have a closed form; for more it is the expansion of Cornish and Fisher (Abramowitz and Stegun,
    26.7.5), which is off by less than 1 % at three degrees and by less than 0.01 % from eight on.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    x = _NORMAL_QUANTILE
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum((term / float(freedom) ** power for power, term in enumerate(terms)), 0.0)
