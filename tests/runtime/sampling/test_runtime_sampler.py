from __future__ import annotations

import math
import tracemalloc
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


# Bias, penalties of generated tokens, and masks.

CHANGES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
    }
)


def by_formula(logits: list[float], prompt: list[int], chosen: list[int], params: SamplingParams) -> np.ndarray:
    """Scores [vocab] as vLLM's documentation describes the penalties, one token after the other."""
    scores = np.array(logits, np.float64)
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in chosen:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        scores[token] -= params.frequency_penalty * chosen.count(token)
        scores[token] -= params.presence_penalty * (token in chosen)
    return scores


@settings(max_examples=200, deadline=None)
@given(LOGITS, CHANGES, st.data())
def test_changes_of_scores_follow_the_formula(
    logits: list[float], options: dict[str, Any], data: st.DataObject
) -> None:
    token = st.integers(0, len(logits) - 1)
    bias = data.draw(st.dictionaries(token, st.floats(-100, 100), max_size=4))
    prompt = data.draw(st.lists(token, max_size=6))
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=5, logit_bias=bias, **options)
    sampler, chosen = Sampler(params, len(logits)), list[int]()
    sampler.observe(prompt)
    for _ in range(5):
        expected = by_formula(logits, prompt, chosen, params)
        weights = np.exp(expected - expected.max())
        ids, probabilities = sampler.distribution(np.array(logits))
        dense = np.zeros(len(logits))
        dense[ids] = probabilities
        np.testing.assert_allclose(dense, weights / weights.sum(), rtol=1e-9, atol=1e-300)
        chosen.append(sampler.sample(np.array(logits)))


def test_penalties_count_generated_tokens_and_not_the_prompt() -> None:
    logits = np.array([2.0, 1.5, 0.0])
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=1.0), 3)
    sampler.observe([0, 0, 2])
    assert [sampler.sample(logits) for _ in range(5)] == [0, 1, 0, 0, 0]
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=1.0), 3)
    assert [sampler.sample(logits) for _ in range(6)] == [0, 1, 0, 1, 0, 2]
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=-2.0), 3)
    assert [sampler.sample(-logits) for _ in range(2)] == [2, 2]


def test_a_bias_forces_and_forbids_tokens() -> None:
    logits = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    for temperature in (0.0, 1.0):
        forced = Sampler(SamplingParams(temperature, logit_bias={3: 100.0}), 4)
        assert [forced.sample(logits) for _ in range(20)] == [3] * 20
        forbidden = Sampler(SamplingParams(temperature, logit_bias={0: -100, 1: -100}), 4)
        assert {forbidden.sample(logits) for _ in range(40)} <= {2, 3}


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.8}, {"temperature": 0}, {"presence_penalty": 1.5}])
def test_a_mask_is_as_scores_of_minus_infinity(options: dict[str, Any]) -> None:
    """In all steps: what it leaves out counts neither for top-k nor for top-p."""
    random = np.random.default_rng(4)
    params = SamplingParams(**{"temperature": 1.0, "top_k": 0, "top_p": 0.9, "seed": 3, **options})
    for vocab in (5, 40, 5000):
        masked, plain = Sampler(params, vocab), Sampler(params, vocab)
        for _ in range(20):
            logits, allowed = random.normal(0, 3, vocab).astype(np.float32), random.random(vocab) < 0.4
            allowed[random.integers(vocab)] = True
            token = masked.sample(logits, allowed)
            assert allowed[token]
            assert token == plain.sample(np.where(allowed, logits, np.float32(-np.inf)))
    np.testing.assert_array_equal(masked.distribution(logits, allowed)[0] < vocab, True)


def test_a_mask_of_one_token_leaves_that_token() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 3000).astype(np.float32)
    for temperature in (0, 1):
        for token in (0, 17, 2999):
            assert Sampler(SamplingParams(temperature), 3000).sample(logits, np.arange(3000) == token) == token


def test_a_mask_of_all_tokens_changes_no_draw() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 4000).astype(np.float32)
    for options in ({}, {"top_k": 0, "top_p": 1.0}, {"temperature": 0}):
        one, other = (Sampler(SamplingParams(seed=9, **options), 4000) for _ in range(2))  # type: ignore[arg-type]
        everything = np.ones(4000, bool)
        assert [one.sample(logits) for _ in range(50)] == [other.sample(logits, everything) for _ in range(50)]


def test_options_that_change_nothing_change_no_draw() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 4000).astype(np.float32)
    one = Sampler(SamplingParams(seed=2), 4000)
    other = Sampler(SamplingParams(seed=2, presence_penalty=0.0, frequency_penalty=-0.0, logit_bias={}), 4000)
    assert [one.sample(logits) for _ in range(50)] == [other.sample(logits) for _ in range(50)]


@pytest.mark.parametrize("temperature", [0, 1])
def test_masks_that_leave_nothing_raise_and_broken_logits_are_named(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature), 3)
    with pytest.raises(RequestError, match="no token is left to choose"):
        sampler.sample(np.zeros(3), np.zeros(3, bool))
    with pytest.raises(RequestError, match="no token is left to choose"):
        sampler.sample(np.array([1, -np.inf, 2]), np.array([False, True, False]))
    with pytest.raises(KernelError, match="logits contain NaN"):
        sampler.sample(np.array([1, np.nan, 2]), np.array([True, False, False]))
    wrong: list[Any] = [np.ones(4, bool), np.ones(3), [True] * 3, "all"]
    for allowed in wrong:
        with pytest.raises(RequestError, match=r"^allowed must be bool \[3\], one for each token, not "):
            sampler.sample(np.zeros(3), allowed)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2.1, 2.001, math.nan, math.inf, "1", None, True])
def test_penalties_out_of_range_raise(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be from -2 to 2, not "):
        SamplingParams(**{name: value})


def test_a_bias_that_makes_no_sense_raises() -> None:
    wrong: list[tuple[Any, str]] = [
        ([1], "must be a mapping of token ids to numbers"),
        ({"1": 1}, "a token of logit_bias must be a token id, not '1'"),
        ({-1: 1}, "a token of logit_bias must be a token id, not -1"),
        ({True: 1}, "a token of logit_bias must be a token id, not True"),
        ({5: 100.5}, "the logit_bias of token 5 must be from -100 to 100, not 100.5"),
        ({5: math.nan}, "the logit_bias of token 5 must be from -100 to 100, not nan"),
    ]
    for bias, text in wrong:
        with pytest.raises(RequestError, match=text):
            SamplingParams(logit_bias=bias)
    with pytest.raises(RequestError, match="logit_bias has token 9, but the model's tokens are 0 to 8"):
        Sampler(SamplingParams(logit_bias={3: 1, 9: 1}), 9)


def test_parameters_keep_their_own_bias_and_can_be_hashed() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_samplers_that_wait_hold_little_memory() -> None:
    """Arrays as long as the vocabulary are made when the first token is noted."""
    tracemalloc.start()
    waiting = [Sampler(SamplingParams(repetition_penalty=1.1, presence_penalty=1.0), 10**6) for _ in range(8)]
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(waiting) == 8 and held_bytes < 8 * 10_000
