"""Generation behind tokens that the engine has read already, and its cancellation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.toys.toy_artifact import make_toy
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import Engine, RequestError, SamplingParams, generate, load

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(1, 31))


@pytest.fixture
def engine(make_artifact: Callable[..., Path]) -> Engine:
    return load(make_artifact(toy=make_toy(300, 100), context=100), threads=1)


@pytest.mark.parametrize("reused", [0, 1, 8, 13, 28, 29])
def test_a_prompt_whose_beginning_was_read_has_the_same_continuation(engine: Engine, reused: int) -> None:
    whole = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=9)
    text = "".join(whole)
    engine.reset()
    engine.read([*PROMPT[:reused], 77, 78])
    again = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=9, reused_tokens=reused)
    assert "".join(again) == text
    assert again.tokens == whole.tokens
    assert engine.position == len(PROMPT) + 8
    assert again.stats.prompt_tokens == len(PROMPT)


def test_tokens_that_are_reused_count_for_the_repetition_penalty(engine: Engine) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1e6)
    whole = generate(engine, byte_level(), PROMPT, params, max_tokens=20)
    "".join(whole)
    again = generate(engine, byte_level(), PROMPT, params, max_tokens=20, reused_tokens=20)
    "".join(again)
    assert again.tokens == whole.tokens


@pytest.mark.parametrize("reused", [-1, 21, 30, True, 1.0])
def test_no_more_is_reused_than_was_read(engine: Engine, reused: int) -> None:
    engine.read(PROMPT[:20])
    with pytest.raises(RequestError, match="reused_tokens must be a whole number from 0 to 20"):
        generate(engine, byte_level(), PROMPT, GREEDY, reused_tokens=reused)
    assert engine.position == 20


def test_a_token_of_the_prompt_is_left_to_read(engine: Engine) -> None:
    engine.read([*PROMPT, 5])
    with pytest.raises(RequestError, match="reused_tokens must be a whole number from 0 to 29, not 30"):
        generate(engine, byte_level(), PROMPT, GREEDY, reused_tokens=30)
    with pytest.raises(RequestError, match="reused_tokens must be 0: with keep_position"):
        generate(engine, byte_level(), PROMPT, GREEDY, keep_position=True, reused_tokens=1)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_cancelled_generation_ends_before_its_next_token(engine: Engine, pieces: int) -> None:
    generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=60)
    for _ in range(pieces):
        next(generation)
    made, position = len(generation.tokens), engine.position
    generation.cancel()
    "".join(generation)
    assert (len(generation.tokens), engine.position) == (made, position)
    assert generation.stats.stop_reason == "cancelled"
