"""Distributions of samplers are those of transformers, and tokens are drawn from them."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation import logits_process as hf

from picompile_runtime import KernelError, RequestError, Sampler, SamplingParams, Scores, TopScores
from picompile_runtime.sampling.sampler import top_logits

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


@settings(max_examples=250, deadline=None)
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


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_large_vocabularies_go_the_same_way(step: float) -> None:
    """Beyond some thousand tokens most are never looked at alone; `step` makes many of them equal."""
    options = ((40, 0.95, 0.0, 1.0), (1, 1.0, 0.0, 1.0), (40, 1.0, 0.0, 1.3), (600, 0.5, 0.01, 1.0), (0, 0.9, 0.0, 1.0))
    for vocab, (top_k, top_p, min_p, penalty) in product((2560, 20_011), (*options, (0, 1.0, 0.0, 1.1))):
        random = np.random.default_rng(vocab)
        logits = (2 * random.normal(size=vocab)).astype(np.float32)
        logits = np.round(logits / step) * np.float32(step) if step else logits
        seen = random.integers(0, vocab, 50).tolist()
        params = SamplingParams(0.7, top_k, top_p, min_p, penalty)
        actual, expected = by_sampler(list(logits), seen, params), by_transformers(list(logits), seen, params)
        np.testing.assert_allclose(np.sort(actual), np.sort(expected), rtol=1e-9, atol=1e-12)
        if not step:
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_draws_are_those_from_the_ordered_distribution() -> None:
    """Whichever part of a large vocabulary the draw sorts."""
    for spread in (0.0, 1e-15, 1.0, 12.0):
        logits = spread * np.random.default_rng(0).normal(size=3001)
        sampler = Sampler(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=7), 3001)
        ids, probabilities = sampler.distribution(logits)
        shares = np.random.Generator(np.random.PCG64(7)).random(300)
        expected = ids[np.searchsorted(np.cumsum(probabilities), shares, side="right")]
        assert [sampler.sample(logits) for _ in shares] == expected.tolist()
    unseeded = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
    drawn, again = ([Sampler(unseeded, 3001).sample(np.zeros(3001)) for _ in range(9)] for _ in range(2))
    assert drawn != again


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    """With the penalty, which changes no logits of the caller's."""
    sampler = Sampler(SamplingParams(temperature=0), 5)
    assert sampler.sample(np.array([1, 3, 2, 3, 0], np.float32)) == 1
    assert sampler.sample(np.array([-np.inf, -5, -np.inf, -np.inf, -6])) == 1
    assert sampler.sample(np.array([1, np.inf, 2, np.inf, 0])) == 1
    sampler, logits = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), 3), np.array([4.0, 3.0, 2.5])
    sampler.observe([0])
    assert [sampler.sample(logits) for _ in range(4)] == [1, 2, 0, 0]
    assert logits.tolist() == [4.0, 3.0, 2.5]


@pytest.mark.filterwarnings("error")
@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20), PARAMS, st.floats(0, 1e-300))
def test_extreme_logits_give_a_possible_token(logits: list[float], options: dict[str, Any], tiny: float) -> None:
    assume(max(logits) > -math.inf)
    penalties = (options["repetition_penalty"], 1e-6, 1e6)
    for temperature, penalty in product((options["temperature"], tiny, 1e308), penalties):
        extreme = {"temperature": temperature, "repetition_penalty": penalty}
        sampler = Sampler(SamplingParams(**{**options, **extreme}), len(logits))
        sampler.observe([0])
        _, probabilities = sampler.distribution(np.array(logits))
        assert abs(probabilities.sum() - 1) < 1e-9 and (probabilities >= 0).all()
        token = sampler.sample(np.array(logits))
        assert logits[token] > -math.inf
        if math.inf in logits:
            assert logits[token] == math.inf


NO_NUMBERS: list[Any] = [None, "1", math.nan, math.inf, True, [], 10**5000, 1j, np.array([1.0, 2.0])]
WRONG_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1],
    "top_k": [-2, 1.5, -1.5],
    "top_p": [-0.1, -1, 1.01],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e-320, 1e-7, 1e7, 1e308],
    "presence_penalty": [-2.1, 2.001],
    "frequency_penalty": [-2.1, 2.001],
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_values_that_make_no_sense_raise(name: str) -> None:
    for value in WRONG_VALUES[name]:
        with pytest.raises(RequestError, match=rf"^{name} must be .*, not {re.escape(str(value))}"):
            SamplingParams(**{name: value})
    for value in NO_NUMBERS if name != "top_k" else ["1", True, 1j]:
        with pytest.raises(RequestError, match=rf"^{name} must be [^\n]*$"):
            SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=r"^seed must be .*, not -1"):
        SamplingParams(seed=-1)


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
    greedy = Sampler(replace(params, temperature=0), len(logits))
    greedy.observe(prompt)
    expected = by_formula(logits, prompt, [], params)
    assert expected[greedy.sample(np.array(logits))] == pytest.approx(expected.max())


def test_a_bias_is_kept_and_one_that_makes_no_sense_raises() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
    wrong: tuple[tuple[Any, str], ...] = (
        ([1], "must be a mapping of token ids to numbers"),
        ({"1": 1}, "a token of logit_bias must be a token id, not '1'"),
        ({-1: 1}, "a token of logit_bias must be a token id, not -1"),
        ({True: 1}, "a token of logit_bias must be a token id, not True"),
        ({5: 100.5}, "the logit_bias of token 5 must be from -100 to 100, not 100.5"),
        ({5: math.nan}, "the logit_bias of token 5 must be from -100 to 100, not nan"),
        ({3: 1, 9: 1}, "logit_bias has token 9, but the model's tokens are 0 to 8"),
    )
    for refused, text in wrong:
        with pytest.raises(RequestError, match=text):
            Sampler(SamplingParams(logit_bias=refused), 9)


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.8}, {"temperature": 0}, {"presence_penalty": 1.5}])
def test_a_mask_is_as_scores_of_minus_infinity(options: dict[str, Any]) -> None:
    """In all steps: what it leaves out counts neither for top-k nor for top-p. One of all tokens changes no draw."""
    random = np.random.default_rng(4)
    params = SamplingParams(**{"temperature": 1.0, "top_k": 0, "top_p": 0.9, "seed": 3, **options})
    for vocab in (5, 40, 5000):
        masked, plain = Sampler(params, vocab), Sampler(params, vocab)
        for turn in range(20):
            logits, allowed = random.normal(0, 3, vocab).astype(np.float32), random.random(vocab) < 0.4
            if turn % 3 == 0:
                allowed[:] = turn == 0
            allowed[random.integers(vocab)] = True
            token = masked.sample(logits, allowed)
            assert allowed[token]
            assert token == plain.sample(np.where(allowed, logits, np.float32(-np.inf)))
    np.testing.assert_array_equal(masked.distribution(logits, allowed)[0] < vocab, True)


@pytest.mark.parametrize("temperature", [0, 1])
def test_masks_that_leave_nothing_raise_and_broken_logits_are_named(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature), 3)
    nan = np.array([1, np.nan, 2])
    for logits, mask in ((np.zeros(3), np.zeros(3, bool)), (np.array([1, -np.inf, 2]), np.arange(3) == 1)):
        with pytest.raises(RequestError, match="no token is left to choose"):
            sampler.sample(logits, mask)
    for broken, mask in ((nan, np.arange(3) == 0), (nan, None)):
        with pytest.raises(KernelError, match="logits contain NaN"):
            sampler.sample(broken, mask)
    with pytest.raises(KernelError, match="rule out every token"):
        sampler.sample(np.full(3, -np.inf))
    for reason, said, code in (("keys overflow", "contain NaN: keys overflow$", 4), (None, "try `verify`$", 1)):
        for mask in (None, np.ones(3, bool)):
            with pytest.raises(KernelError, match=said) as caught:
                sampler.sample(Scores(lambda: nan, None, lambda reason=reason: reason), mask)  # type: ignore[misc]
            assert caught.value.exit_code == code
    wrong: list[Any] = [np.ones(4, bool), np.ones(3), [True] * 3, "all"]
    for allowed in wrong:
        with pytest.raises(RequestError, match=r"^allowed must be bool \[3\], one for each token, not "):
            sampler.sample(np.zeros(3), allowed)


def test_samplers_that_wait_hold_little_memory() -> None:
    """Arrays as long as the vocabulary are made when the first token is noted."""
    tracemalloc.start()
    waiting = [Sampler(SamplingParams(repetition_penalty=1.1, presence_penalty=1.0), 10**6) for _ in range(8)]
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(waiting) == 8 and held_bytes < 8 * 10_000


# ---- from the highest scores alone: the same tokens, and the same bits, as from all logits ----


Logits = NDArray[np.float32]
COUNT = 64
DRAWS = 6


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


def some(rng: np.random.Generator, vocab: int) -> NDArray[np.bool_]:
    return rng.permutation(vocab) < rng.integers(1, 1 + min(vocab, 100))


KINDS: dict[str, Callable[[np.random.Generator, int], Logits]] = {
    "normal": normal,
    # So many are equal that some are at the edge of any set.
    "rounded": lambda rng, vocab: np.round(normal(rng, vocab)) + np.float32(0),
    "two zeros": lambda rng, vocab: rng.choice(np.array([0.0, -0.0, -1.0], np.float32), vocab),
    "few possible": lambda rng, vocab: np.where(some(rng, vocab), normal(rng, vocab), np.float32(-np.inf)),
    "some infinite": lambda rng, vocab: np.where(some(rng, vocab), np.float32(np.inf), normal(rng, vocab)),
}
CHOICES = (
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
def test_same_draws_as_from_all_logits(kind: str) -> None:
    """A run of tokens with one seed, of vocabularies of which the highest are all, nearly all, and few."""
    for (row, params), (number, vocab) in product(enumerate(CHOICES), enumerate((1, 3, 63, 64, 65, 66, 200, 3001))):
        rng = np.random.default_rng([number, row])
        one, other = (Sampler(SamplingParams(seed=number, **params), vocab) for _ in range(2))  # type: ignore[arg-type]
        for _ in range(DRAWS):
            device = Device(KINDS[kind](rng, vocab))
            for found, expected in zip(
                one.distribution(device.scores()), other.distribution(device.logits), strict=True
            ):
                assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
            assert one.sample(device.scores()) == other.sample(device.logits)


def test_all_logits_are_asked_for_only_where_they_are_needed() -> None:
    """And then once; never of a vocabulary that is in the top logits whole. Broken logits are known by those, too."""
    logits = normal(np.random.default_rng(1), 500)
    assert len(set(logits.tolist())) == 500
    for params, times in zip(CHOICES, (0, 1, 0, 0, None, 0, 1, 1, 1, 1), strict=True):
        device, small = Device(logits), Device(logits[:64])
        Sampler(SamplingParams(**params), 500).sample(device.scores())  # type: ignore[arg-type]
        assert device.asked == times or times is None
        if params.get("repetition_penalty") is None:
            Sampler(SamplingParams(**params), 64).sample(small.scores())  # type: ignore[arg-type]
            assert small.asked == 0
        for value, says in ((np.nan, "contain NaN"), (-np.inf, "rule out every token")):
            broken = np.full(300, -np.inf, np.float32)
            broken[200] = value
            with pytest.raises(KernelError, match=f"logits {says}"):
                Sampler(SamplingParams(**params), 300).sample(Device(broken).scores())  # type: ignore[arg-type]


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
