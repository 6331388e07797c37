"""Means and their intervals: against sums in a loop, known quantiles, and how often they hold the true mean."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from picompile.accuracy import Estimate
from picompile.intervals import block_size, estimate_mean, student_quantile, token_blocks


def test_blocks_are_equal_parts_of_windows() -> None:
    assert token_blocks([5, 0, 3, 1], 2).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 4]
    assert token_blocks([], 2).tolist() == []
    for windows, size in (([511] * 8, 255), ([511] * 3, 64), ([7, 100, 129], 64), ([3], 64)):
        counts = np.bincount(token_blocks(windows, size))
        assert counts.sum() == sum(windows) and counts.min() > 0
        assert counts.max() <= 1.5 * size


def test_blocks_are_long_where_the_text_is() -> None:
    assert block_size([511] * 2) == 64
    assert block_size([511] * 8) == 255
    assert block_size([511] * 32) == 511
    assert block_size([127] * 400) == 127
    assert block_size([9]) == 9


@pytest.mark.parametrize(
    ("freedom", "expected"),
    # Student's table.
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (8, 2.30600), (15, 2.13145), (63, 1.99834), (10**6, 1.96)],
)  # fmt: skip
def test_quantiles(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, rel=0.01 if freedom < 5 else 2e-4)


def test_an_interval_is_that_of_a_loop_over_blocks() -> None:
    random = np.random.default_rng(0)
    windows, size = (128, 64, 1, 40), 64
    values = random.normal(0.3, 2, sum(windows))
    found = estimate_mean(values, token_blocks(windows, size))
    pieces, start = [], 0
    for window in windows:
        for first in range(0, window, size):
            pieces.append(values[start + first : start + min(first + size, window)].tolist())
        start += window
    mean = math.fsum(x for piece in pieces for x in piece) / len(values)
    spread = math.fsum((math.fsum(piece) - mean * len(piece)) ** 2 for piece in pieces)
    error = math.sqrt(len(pieces) / (len(pieces) - 1) * spread) / len(values)
    assert len(pieces) == 5
    assert found.value == pytest.approx(mean)
    assert found.high is not None and found.low is not None
    assert found.high - found.value == pytest.approx(2.77645 * error, rel=2e-3)
    assert found.value - found.low == pytest.approx(found.high - found.value)


def _independent(random: np.random.Generator, tokens: int) -> np.ndarray:
    return random.normal(1, 1, tokens)


def _alike(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Runs of 16 tokens have much in common."""
    return 1 + np.repeat(random.normal(0, 1, -(-tokens // 16)), 16)[:tokens] + random.normal(0, 0.5, tokens)


@pytest.mark.parametrize("draw", [_independent, _alike])
def test_intervals_hold_the_mean_as_often_as_they_say(draw: Callable[..., np.ndarray]) -> None:
    random = np.random.default_rng(1)
    blocks = token_blocks([511] * 4, 64)
    held = 0
    for _ in range(600):
        found = estimate_mean(draw(random, 4 * 511), blocks)
        assert found.low is not None and found.high is not None
        held += found.low <= 1 <= found.high
    assert 0.92 <= held / 600 <= 0.98
    # Tokens taken for independent would promise too much where they are not.
    alone = [estimate_mean(draw(random, 4 * 511), np.arange(4 * 511)) for _ in range(300)]
    share = np.mean([each.low <= 1 <= each.high for each in alone if each.low is not None and each.high is not None])
    assert share < 0.6 if draw is _alike else share > 0.9


def test_a_short_text_has_no_interval() -> None:
    assert estimate_mean(np.array([1.0, 3.0]), token_blocks([2], 2)) == Estimate(2.0)
    assert estimate_mean(np.array([1.0, math.inf]), token_blocks([1, 1], 1)) == Estimate(math.inf)
    assert Estimate(2.0).map(lambda value: -1 / value) == Estimate(-0.5)
    assert Estimate(1.0, 0.5, 2.0).map(math.exp) == Estimate(math.e, math.exp(0.5), math.exp(2))
