from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.toys.toy_artifact import Toy, make_toy, reference_logits
from picompile_runtime import KernelError, RequestError, load, perplexity
from picompile_runtime.bench.perplexity import Perplexity, negative_log_likelihood

TOY = make_toy()
IDS = np.random.default_rng(2).integers(0, TOY.vocab, 100).tolist()


def reference(toy: Toy, ids: list[int], window: int) -> float:
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        logits = reference_logits(toy, ids[start : start + window])
        for row, target in zip(logits, ids[start + 1 : start + window + 1], strict=False):
            total += math.log(sum(math.exp(value) for value in row)) - row[target]
    return total


@pytest.mark.parametrize("by_decode", [False, True])
@pytest.mark.parametrize(("count", "window"), [(2, 40), (9, 8), (40, 40), (41, 40), (42, 40), (100, 40), (100, 13)])
def test_every_token_but_the_first_is_predicted_once(
    make_artifact: Callable[..., Path], count: int, window: int, by_decode: bool
) -> None:
    seen: list[tuple[int, int]] = []
    with load(make_artifact(toy=TOY), threads=1) as engine:
        result = perplexity(engine, IDS[:count], window, by_decode, lambda done, total: seen.append((done, total)))
    assert result.tokens == count - 1 == seen[-1][0] == seen[-1][1]
    assert result.nll == pytest.approx(reference(TOY, IDS[:count], window), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nll / (count - 1)))


def test_the_window_is_the_context_by_default(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(toy=TOY), threads=1) as engine:
        assert perplexity(engine, IDS) == perplexity(engine, IDS, 40)


def test_sums_are_safe_for_large_logits() -> None:
    logits = np.array([[1e4, 0, -1e4], [-3e38, 3e38, 0]], np.float32)
    np.testing.assert_allclose(negative_log_likelihood(logits, np.array([0, 1])), [0, 0])
    assert negative_log_likelihood(logits, np.array([2, 1]))[0] == 2e4
    assert Perplexity(nll=1e6, tokens=1).perplexity == math.inf


def test_losses_are_those_of_float64() -> None:
    rng = np.random.default_rng(0)
    for scale in (0.01, 1.0, 8.0):
        logits, targets = (scale * rng.standard_normal((20, 32_000))).astype(np.float32), rng.integers(0, 32_000, 20)
        scores = logits.astype(np.float64)
        expected = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(20), targets]
        np.testing.assert_allclose(negative_log_likelihood(logits, targets), expected, rtol=0, atol=1e-7)


def test_logits_that_are_nan_raise(make_artifact: Callable[..., Path]) -> None:
    toy = make_toy()
    toy.head[3] = np.nan
    with load(make_artifact(toy=toy), threads=1) as engine, pytest.raises(KernelError, match="logits contain NaN"):
        perplexity(engine, IDS)


def test_requests_that_make_no_sense_raise(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(toy=TOY), threads=1) as engine:
        for ids in ([], [1]):
            with pytest.raises(RequestError, match=f"at least 2 tokens, not {len(ids)}"):
                perplexity(engine, ids)
        for window in (0, -1, 41):
            with pytest.raises(RequestError, match=f"window of {window} tokens does not fit the context of 40"):
                perplexity(engine, IDS, window)
        with pytest.raises(RequestError, match="tokens must be integers"):
            perplexity(engine, [1, 2, 50, 3])
