from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from picompile_runtime import KernelError, RequestError, Sampler, SamplingParams

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 5),
        "top_k": st.integers(0, 45),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
    }
)


def by_transformers(logits: list[float], seen: list[int], params: SamplingParams) -> np.ndarray:
    """Probabilities [vocab] as transformers' `generate` makes them, without the processors that do nothing."""
    ids, scores = torch.tensor([seen], dtype=torch.long), torch.tensor([logits], dtype=torch.float64)
    processors: list[Any] = [hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)] if seen else []
    processors.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(hf.MinPLogitsWarper(params.min_p))
    for processor in processors:
        scores = processor(ids, scores)
    return scores.softmax(-1)[0].numpy()


def by_sampler(logits: list[float], seen: list[int], params: SamplingParams) -> np.ndarray:
    sampler = Sampler(params, len(logits))
    sampler.observe(seen)
    ids, probabilities = sampler.distribution(np.array(logits))
    dense = np.zeros(len(logits))
    dense[ids] = probabilities
    return dense


@settings(max_examples=400, deadline=None)
@given(LOGITS, PARAMS, st.data())
def test_distribution_is_that_of_transformers(
    logits: list[float], options: dict[str, Any], data: st.DataObject
) -> None:
    params = SamplingParams(**options)
    seen = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=10))
    actual, expected = by_sampler(logits, seen, params), by_transformers(logits, seen, params)
    # Which of two equal tokens at the edge of top-p stays is nobody's business but must not fail the test: sorted, the
    # probabilities agree in any case; and where they are all different, by more than is rounded, the tokens agree too.
    np.testing.assert_allclose(np.sort(actual), np.sort(expected), rtol=1e-9, atol=1e-12)
    if (np.diff(np.sort(logits)) > 1e-9).all() and not seen:
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("vocab", [2560, 5003, 20_011])
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_large_vocabularies_go_the_same_way(vocab: int, step: float) -> None:
    """Beyond some thousand tokens most are never looked at alone; `step` makes many of them equal."""
    random = np.random.default_rng(vocab)
    logits = (2 * random.normal(size=vocab)).astype(np.float32)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    seen = random.integers(0, vocab, 50).tolist()
    for top_k, top_p, min_p, penalty in (
        (40, 0.95, 0.0, 1.0), (1, 1.0, 0.0, 1.0), (40, 1.0, 0.0, 1.3), (600, 0.5, 0.01, 1.0), (0, 0.9, 0.0, 1.0),
        (0, 1.0, 0.0, 1.1),
    ):  # fmt: skip
        params = SamplingParams(0.7, top_k, top_p, min_p, penalty)
        actual, expected = by_sampler(list(logits), seen, params), by_transformers(list(logits), seen, params)
        np.testing.assert_allclose(np.sort(actual), np.sort(expected), rtol=1e-9, atol=1e-12)
        if not step:
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 1e-15, 1.0, 12.0])
def test_draws_are_those_from_the_ordered_distribution(spread: float) -> None:
    """Whichever part of a large vocabulary the draw sorts."""
    logits = spread * np.random.default_rng(0).normal(size=3001)
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=7), 3001)
    ids, probabilities = sampler.distribution(logits)
    shares = np.random.Generator(np.random.PCG64(7)).random(300)
    expected = ids[np.searchsorted(np.cumsum(probabilities), shares, side="right")]
    assert [sampler.sample(logits) for _ in shares] == expected.tolist()


def test_order_of_the_steps() -> None:
    """Top-p after temperature and top-k, min-p last: with any two exchanged, other tokens would be left."""
    logits = np.log([0.5, 0.2, 0.15, 0.1, 0.05])
    for options in (
        {"temperature": 2.0, "top_k": 4, "top_p": 0.7, "min_p": 0.0},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.12},
    ):
        params = SamplingParams(**options)
        np.testing.assert_allclose(by_sampler(list(logits), [], params), by_transformers(list(logits), [], params))


def test_frequencies_follow_the_distribution() -> None:
    params = SamplingParams(temperature=1.3, top_k=5, top_p=0.9, seed=3)
    logits = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]
    sampler = Sampler(params, 6)
    counts = np.bincount([sampler.sample(np.array(logits)) for _ in range(20_000)], minlength=6)
    np.testing.assert_allclose(counts / 20_000, by_transformers(logits, [], params), atol=0.015)


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    sampler = Sampler(SamplingParams(temperature=0), 5)
    assert sampler.sample(np.array([1, 3, 2, 3, 0], np.float32)) == 1
    assert sampler.sample(np.array([-np.inf, -5, -np.inf, -np.inf, -6])) == 1
    assert sampler.sample(np.array([1, np.inf, 2, np.inf, 0])) == 1


def test_temperature_zero_obeys_the_penalty() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), 3)
    sampler.observe([0])
    assert [sampler.sample(np.array([4.0, 3.0, 2.5])) for _ in range(4)] == [1, 2, 0, 0]
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), 2)
    sampler.observe([0, 0, 0])
    assert sampler.sample(np.array([-1.0, -1.5])) == 1


def test_same_seed_same_tokens() -> None:
    logits = np.random.default_rng(0).normal(size=100)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=2, top_k=0, top_p=1, seed=seed), 100)
        return [sampler.sample(logits) for _ in range(20)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_logits_are_not_changed() -> None:
    logits = np.arange(5, dtype=np.float64)
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 5)
    sampler.observe([4])
    sampler.sample(logits)
    np.testing.assert_array_equal(logits, np.arange(5))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20), PARAMS, st.floats(0, 1e-300))
def test_extreme_logits_give_a_possible_token(logits: list[float], options: dict[str, Any], tiny: float) -> None:
    assume(max(logits) > -math.inf)
    for temperature in (options["temperature"], tiny, 1e300):
        sampler = Sampler(SamplingParams(**{**options, "temperature": temperature}), len(logits))
        _, probabilities = sampler.distribution(np.array(logits))
        assert abs(probabilities.sum() - 1) < 1e-9 and (probabilities >= 0).all()
        token = sampler.sample(np.array(logits))
        assert logits[token] > -math.inf
        if math.inf in logits:
            assert logits[token] == math.inf


@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits_raise(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 3)
    with pytest.raises(KernelError, match="logits contain NaN"):
        sampler.sample(np.array([1, np.nan, 2]))
    with pytest.raises(KernelError, match="rule out every token"):
        sampler.sample(np.full(3, -np.inf))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_k", [-1, 1.5, math.nan]),
        ("top_p", [0, -1, 1.01, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, -1, math.inf, math.nan]),
        ("seed", [-1]),
    ],
)
def test_values_that_make_no_sense_raise(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{name} must be .*, not {value}"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
