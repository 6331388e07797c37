"""Means and their intervals: against sums in a loop, known quantiles, and how often they hold the true mean."""

import math

import numpy as np
import pytest

from picompile.intervals import Estimate, block_size, estimate_mean, student_quantile, token_blocks


def test_blocks_are_equal_parts_of_windows() -> None:
    """And long where the text is."""
    assert token_blocks([5, 0, 3, 1], 2).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 4]
    assert token_blocks([], 2).tolist() == []
    for windows, size in (([511] * 8, 255), ([511] * 3, 64), ([7, 100, 129], 64), ([3], 64)):
        counts = np.bincount(token_blocks(windows, size))
        assert counts.sum() == sum(windows) and counts.min() > 0
        assert counts.max() <= 1.5 * size
    texts = [511] * 2, [511] * 8, [511] * 32, [127] * 400, [9]
    assert [block_size(windows) for windows in texts] == [64, 255, 511, 127, 9]


def test_quantiles_are_those_of_students_table() -> None:
    for freedom, expected in {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645}.items():
        assert student_quantile(freedom) == pytest.approx(expected, rel=0.01)
    for freedom, expected in {8: 2.30600, 15: 2.13145, 63: 1.99834, 10**6: 1.96}.items():
        assert student_quantile(freedom) == pytest.approx(expected, rel=2e-4)


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


@pytest.mark.parametrize("alike", [False, True])
def test_intervals_hold_the_mean_as_often_as_they_say(alike: bool) -> None:
    """Also where runs of 16 tokens have much in common."""
    random, tokens = np.random.default_rng(1), 4 * 511

    def draw() -> np.ndarray:
        if not alike:
            return random.normal(1, 1, tokens)
        return 1 + np.repeat(random.normal(0, 1, tokens // 16 + 1), 16)[:tokens] + random.normal(0, 0.5, tokens)

    blocks = token_blocks([511] * 4, 64)
    held = 0
    for _ in range(600):
        found = estimate_mean(draw(), blocks)
        assert found.low is not None and found.high is not None
        held += found.low <= 1 <= found.high
    assert 0.92 <= held / 600 <= 0.98
    # Tokens taken for independent would promise too much where they are not.
    alone = [estimate_mean(draw(), np.arange(tokens)) for _ in range(300)]
    share = np.mean([each.low <= 1 <= each.high for each in alone if each.low is not None and each.high is not None])
    assert share < 0.6 if alike else share > 0.9


def test_a_short_text_has_no_interval() -> None:
    assert estimate_mean(np.array([1.0, 3.0]), token_blocks([2], 2)) == Estimate(2.0)
    assert estimate_mean(np.array([1.0, math.inf]), token_blocks([1, 1], 1)) == Estimate(math.inf)
    assert Estimate(2.0).map(lambda value: -1 / value) == Estimate(-0.5)
    assert Estimate(1.0, 0.5, 2.0).map(math.exp) == Estimate(math.e, math.exp(0.5), math.exp(2))
