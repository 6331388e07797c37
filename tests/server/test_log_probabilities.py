from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from picompile_runtime import KernelError
from picompile_server.log_probabilities import log_probabilities, log_probability
from picompile_server.request import TokenLogProbability

LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=50)


def check(logits: np.ndarray, token: int, top: int) -> None:
    """Compare with the double-precision log-softmax of PyTorch; of equal scores, the lowest ids come first."""
    expected = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1).numpy()
    found, order = log_probability(logits, token, top), np.lexsort((np.arange(len(logits)), -logits))[:top]
    assert found.token == token and [each for each, _ in found.top] == order.tolist()
    assert found.log_probability == pytest.approx(expected[token], abs=1e-6)
    np.testing.assert_allclose([value for _, value in found.top], expected[order], rtol=0, atol=1e-6)


@settings(max_examples=150)
@given(LOGITS, st.data())
def test_they_are_those_of_log_softmax(values: list[float], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    check(logits, data.draw(st.integers(0, len(logits) - 1)), data.draw(st.integers(0, len(logits) + 2)))


@pytest.mark.parametrize("vocab", [2048, 32_000, 131_072])
def test_large_vocabularies_are_as_exact(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 8, vocab).astype(np.float32)
    for each in (logits, np.round(logits * 2) / np.float32(2)):  # in the second, many scores are equal
        for token, top in ((0, 0), (vocab - 1, 1), (vocab // 2, 20)):
            check(each, token, top)


def test_rows_have_the_bits_that_they_have_alone() -> None:
    logits = np.random.default_rng(1).normal(0, 5, (17, 3001)).astype(np.float32)
    tokens = np.random.default_rng(2).integers(0, 3001, 17).tolist()
    before = logits.copy()
    alone = [log_probability(row.copy(), token, 7) for row, token in zip(logits, tokens, strict=True)]
    assert log_probabilities(logits, tokens, 7) == alone
    np.testing.assert_array_equal(logits, before)
    assert log_probabilities(logits[:0], [], 7) == []


def test_infinite_scores() -> None:
    impossible = log_probability(np.array([1, -np.inf, 1], np.float32), 1, 3)
    assert impossible == TokenLogProbability(1, -math.inf, ((0, -math.log(2)), (2, -math.log(2)), (1, -math.inf)))
    certain = log_probability(np.array([1, np.inf, 5, np.inf], np.float32), 3, 3)
    assert certain == TokenLogProbability(3, -math.log(2), ((1, -math.log(2)), (3, -math.log(2)), (2, -math.inf)))


def test_broken_scores_raise() -> None:
    with pytest.raises(KernelError, match="contain NaN"):
        log_probability(np.array([1, np.nan], np.float32), 0)
    with pytest.raises(KernelError, match="rule out every token"):
        log_probability(np.full(3, -np.inf, np.float32), 0)
