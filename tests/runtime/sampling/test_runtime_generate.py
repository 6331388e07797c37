from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.toys.toy_artifact import make_toy, reference_logits
from helpers.toys.toy_tokenizers import EOS, byte_level, metaspace
from picompile_runtime import Engine, RequestError, SamplingParams, generate, load
from picompile_runtime.sampling.generate import StopFinder

GREEDY = SamplingParams(temperature=0)
VOCAB = 300
PROMPT = "Hi"
Scripted = Callable[..., Engine]


@pytest.fixture
def scripted(make_artifact: Callable[..., Path]) -> Scripted:
    """An engine that answers PROMPT with the given tokens, whatever else the toy model thinks."""

    def make(answer: Sequence[int], context: int = 200) -> Engine:
        start = len(byte_level().encode(PROMPT)) - 1
        script = {start + index: token for index, token in enumerate(answer)}
        return load(make_artifact(toy=make_toy(VOCAB, context, script), context=context), threads=1)

    return make


def test_text_up_to_the_end_token(scripted: Scripted) -> None:
    answer = [*byte_level().encode("hello 🙂 world"), EOS]
    generation = generate(scripted(answer), byte_level(), PROMPT, GREEDY)
    assert list(generation) == ["hell", "o", " ", "🙂", " w", "or", "l", "d"]
    assert generation.tokens == answer
    assert generation.prompt_tokens == byte_level().encode(PROMPT)
    stats = generation.stats
    assert (stats.stop_reason, stats.prompt_tokens, stats.generated_tokens) == ("eos", 2, len(answer))
    assert stats.prefill_tokens_per_s > 0 and stats.decode_tokens_per_s > 0
    assert 0 < stats.time_to_first_token_s < 10


@pytest.mark.parametrize(("count", "text"), [(1, "hell"), (2, "hello"), (4, "hello \ufffd")])
def test_at_most_so_many_tokens(scripted: Scripted, count: int, text: str) -> None:
    """Part of a character that is left over at the end is shown as such."""
    engine = scripted(byte_level().encode("hello 🙂 world"))
    generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=count)
    assert "".join(generation) == text
    assert (generation.stats.stop_reason, len(generation.tokens)) == ("max_tokens", count)
    assert (generation.stats.decode_tokens_per_s == 0) == (count == 1)


@pytest.mark.parametrize("most", [None, 1000])
def test_the_end_of_the_context_ends_the_text(scripted: Scripted, most: int | None) -> None:
    engine = scripted(byte_level().encode("x" * 39), context=40)
    generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=most)
    assert "".join(generation) == "x" * 39  # 38 of them were read, the last one is only told
    assert generation.stats.stop_reason == "context"
    assert engine.position == engine.context == 40


def test_a_prompt_that_fills_the_context_has_one_token_after_it(scripted: Scripted) -> None:
    engine = scripted([], context=40)
    generation = generate(engine, byte_level(), [5] * 40, GREEDY)
    assert len(list(generation)) <= 1
    assert (len(generation.tokens), generation.stats.stop_reason) == (1, "context")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["world"], "hello 🙂 "),
        ("world", "hello 🙂 "),
        (["o w"], "hello 🙂 world"),
        (["or", "wor"], "hello 🙂 "),
        (["ld", "w"], "hello 🙂 "),
        (["🙂 wo"], "hello "),
        (["h"], ""),
        (["d"], "hello 🙂 worl"),
        (["d!", "dd"], "hello 🙂 world"),
    ],
)
def test_stop_texts(scripted: Scripted, stop: str | list[str], text: str) -> None:
    engine = scripted([*byte_level().encode("hello 🙂 world"), EOS])
    generation = generate(engine, byte_level(), PROMPT, GREEDY, stop=stop)
    assert "".join(generation) == text
    assert generation.stats.stop_reason == ("eos" if text.endswith("world") else "stop")


def test_a_stop_text_that_is_complete_only_at_the_very_end(scripted: Scripted) -> None:
    engine = scripted(byte_level().encode("ab🙂"))
    generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=3, stop=["b\ufffd"])
    assert "".join(generation) == "a"
    assert generation.stats.stop_reason == "stop"


def by_character(text: str, stops: Sequence[str]) -> str:
    """The text before the stop text that is complete first (of several the longest)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=10), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
)
def test_stops_do_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text, expected = "".join(pieces), by_character("".join(pieces), stops)
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        shown += finder.feed(piece)
        assert expected.startswith(shown)
    shown += finder.rest()
    assert shown == expected
    assert finder.found == (expected != text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=10), st.text("ab", min_size=1, max_size=4))
def test_only_beginnings_of_stop_texts_are_held_back(pieces: list[str], stop: str) -> None:
    finder, text, shown = StopFinder([stop]), "", ""
    for piece in pieces:
        text += piece
        shown += finder.feed(piece)
        if finder.found:
            break
        assert stop.startswith(text[len(shown) :]) and len(text) - len(shown) < len(stop)


def test_greedy_is_the_argmax_of_the_model(scripted: Scripted) -> None:
    toy = make_toy(VOCAB, 200)
    ids = [7, 8, 9]
    for _ in range(30):
        ids.append(int(reference_logits(toy, ids)[-1].argmax()))
    expected = ids[3 : ids.index(EOS, 3) + 1] if EOS in ids[3:] else ids[3:]
    generation = generate(scripted([]), byte_level(), [7, 8, 9], GREEDY, max_tokens=30)
    list(generation)
    assert generation.tokens == expected and len(expected) > 5


def test_seeded_generations_repeat(scripted: Scripted) -> None:
    engine = scripted([])

    def tokens(seed: int) -> list[int]:
        params = SamplingParams(temperature=3.0, top_k=0, seed=seed)
        generation = generate(engine, byte_level(), PROMPT, params, max_tokens=20)
        list(generation)
        return generation.tokens

    assert tokens(1) == tokens(1) != tokens(2)


def test_the_penalty_knows_the_prompt(scripted: Scripted) -> None:
    """A token of the prompt that the script wants, by 100, is passed over when its logit is divided by 1000."""
    token = byte_level().encode(PROMPT)[0]
    engine = scripted([token])
    params = SamplingParams(temperature=0, repetition_penalty=1000.0)
    generation = generate(engine, byte_level(), PROMPT, params, max_tokens=1)
    list(generation)
    assert generation.tokens != [token]


def test_position_is_kept_on_demand(scripted: Scripted) -> None:
    engine = scripted([])
    list(generate(engine, byte_level(), [1, 2, 3], GREEDY, max_tokens=1))
    list(generate(engine, byte_level(), [4], GREEDY, max_tokens=1, keep_position=True))
    assert engine.position == 4
    list(generate(engine, byte_level(), [4], GREEDY, max_tokens=1))
    assert engine.position == 1


def test_time_of_the_reader_does_not_count(scripted: Scripted) -> None:
    generation = generate(scripted(byte_level().encode("abcdefgh")), byte_level(), PROMPT, GREEDY, max_tokens=8)
    for _ in generation:
        time.sleep(0.05)
    assert generation.stats.decode_tokens_per_s > 7 / 0.1


def test_stats_of_a_generation_that_goes_on(scripted: Scripted) -> None:
    generation = generate(scripted([]), byte_level(), PROMPT, GREEDY)
    assert (generation.stats.generated_tokens, generation.stats.stop_reason) == (0, "")
    assert generation.stats.prefill_tokens_per_s == 0


def test_requests_that_cannot_be_met_raise(scripted: Scripted) -> None:
    """All at once, not when the text is read."""
    engine = scripted([])
    with pytest.raises(RequestError, match=r"the prompt is empty, and this model has no token that begins a text"):
        generate(engine, byte_level(), "")
    with pytest.raises(RequestError, match="prompt is empty"):
        generate(engine, byte_level(), [])
    with pytest.raises(RequestError, match="prompt of 201 tokens does not fit the context of 200"):
        generate(engine, byte_level(), [1] * 201)
    with pytest.raises(RequestError, match="tokens must be integers from 0 to 299"):
        generate(engine, byte_level(), [300])
    with pytest.raises(RequestError, match="max_tokens must be 1 or more, not 0"):
        generate(engine, byte_level(), PROMPT, max_tokens=0)
    with pytest.raises(RequestError, match="stop text must not be empty"):
        generate(engine, byte_level(), PROMPT, stop=["a", ""])
    generation = generate(engine, metaspace(), "", GREEDY, max_tokens=1)
    assert generation.prompt_tokens == [1]


def test_prompt_ids_may_come_from_numpy(scripted: Scripted) -> None:
    generation = generate(scripted([]), byte_level(), np.array([1, 2]), GREEDY, max_tokens=1)  # type: ignore[arg-type]
    assert generation.prompt_tokens == [1, 2]
