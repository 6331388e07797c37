"""Choosing from the highest scores alone: the same tokens, and the same bits, as from all logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from picompile_runtime import KernelError, Sampler, SamplingParams, Scores, TopScores
from picompile_runtime.sampling.sampler import top_logits

Logits = NDArray[np.float32]
COUNT = 64
DRAWS = 12


@dataclass
class Device:
    """Logits [vocab] in memory of its own; counts how often all of them were asked for."""

    logits: Logits
    asked: int = field(default=0)

    def scores(self) -> Scores:
        return Scores(self._read, top_scores_of(self.logits))

    def _read(self) -> Logits:
        self.asked += 1
        return self.logits.copy()


def top_scores_of(logits: Logits) -> TopScores:
    """Return the top logits as an accelerator picks them: NaN first, then by score, then by token."""
    is_nan = np.isnan(logits)
    ids = np.lexsort((-np.where(is_nan, np.float32(0), logits), ~is_nan))[:COUNT].astype(np.int32)
    return TopScores(logits[ids], ids, len(ids) == len(logits))


def normal(rng: np.random.Generator, vocab: int) -> Logits:
    return rng.normal(0, 4, vocab).astype(np.float32)


def rounded(rng: np.random.Generator, vocab: int) -> Logits:
    """So many are equal that some are at the edge of any set."""
    return np.round(normal(rng, vocab)) + np.float32(0)


def two_zeros(rng: np.random.Generator, vocab: int) -> Logits:
    return rng.choice(np.array([0.0, -0.0, -1.0], np.float32), vocab)


def few_possible(rng: np.random.Generator, vocab: int) -> Logits:
    logits = np.full(vocab, -np.inf, np.float32)
    some = rng.permutation(vocab)[: rng.integers(1, 1 + min(vocab, 100))]
    logits[some] = normal(rng, len(some))
    return logits


def some_infinite(rng: np.random.Generator, vocab: int) -> Logits:
    logits = normal(rng, vocab)
    logits[rng.permutation(vocab)[: rng.integers(1, 1 + min(vocab, 90))]] = np.inf
    return logits


KINDS = (normal, rounded, two_zeros, few_possible, some_infinite)
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {},
    {"top_k": 1, "top_p": 1.0},
    {"top_k": 5, "temperature": 1.7, "min_p": 0.05},
    {"top_k": 63, "temperature": 3.0, "top_p": 1.0},
    {"top_k": 64, "top_p": 1.0},
    {"top_k": 65},
    {"top_k": 0, "temperature": 1.2},
    {"top_k": 40, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_same_draws_as_from_all_logits(kind: object, params: dict[str, float]) -> None:
    """A run of tokens with one seed, of vocabularies of which the highest are all, nearly all, and few."""
    for number, vocab in enumerate((1, 3, 63, 64, 65, 66, 200, 3001)):
        rng = np.random.default_rng([number, len(str(params))])
        one, other = (Sampler(SamplingParams(seed=number, **params), vocab) for _ in range(2))  # type: ignore[arg-type]
        for _ in range(DRAWS):
            device = Device(kind(rng, vocab))  # type: ignore[operator]
            for found, expected in zip(
                one.distribution(device.scores()), other.distribution(device.logits), strict=True
            ):
                assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
            assert one.sample(device.scores()) == other.sample(device.logits)


@pytest.mark.parametrize(("number", "times"), [(0, 0), (1, 1), (2, 0), (3, 0), (5, 0), (6, 1), (7, 1), (8, 1), (9, 1)])
def test_all_logits_are_asked_for_only_where_they_are_needed(number: int, times: int) -> None:
    """And then once."""
    device = Device(normal(np.random.default_rng(1), 500))
    assert len(set(device.logits.tolist())) == 500
    Sampler(SamplingParams(**PARAMS[number]), 500).sample(device.scores())  # type: ignore[arg-type]
    assert device.asked == times


@pytest.mark.parametrize("vocab", [1, 20, 64])
def test_top_logits_of_a_small_vocabulary_are_all(vocab: int) -> None:
    device = Device(rounded(np.random.default_rng(2), vocab))
    for params in ({"top_k": 0}, {"top_k": 3}, {"top_k": 64}, {"top_k": 500}):
        Sampler(SamplingParams(**params), vocab).sample(device.scores())  # type: ignore[arg-type]
    assert device.asked == 0


def test_tokens_as_high_as_the_last_one_wanted() -> None:
    """They are in the set, too; where they may go on behind what is known, nothing can be said."""
    for last in range(2, 70):
        logits = -np.arange(200, dtype=np.float32)
        logits[2 : last + 1] = -2
        found = top_scores_of(logits).top(3)
        if last >= COUNT - 1:
            assert found is None
        else:
            assert found is not None
            assert found[0].tolist() == top_logits(logits, 3).tolist() == list(range(last + 1))


@pytest.mark.parametrize(("value", "says"), [(np.nan, "contain NaN"), (-np.inf, "rule out every token")])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_broken_logits_raise(value: float, says: str, params: dict[str, float]) -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[200] = value
    with pytest.raises(KernelError, match=f"logits {says}"):
        Sampler(SamplingParams(**params), 300).sample(Device(logits).scores())  # type: ignore[arg-type]
