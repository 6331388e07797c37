from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    stats = generation.stats
    assert (stats.generated_tokens, stats.stop_reason, stats.prefill_tokens_per_s) == (0, "", 0)
    assert list(generation) == ["hell", "o", " ", "🙂", " w", "or", "l", "d"]
    assert generation.tokens == answer
    assert generation.prompt_tokens == byte_level().encode(PROMPT)
    stats = generation.stats
    assert (stats.stop_reason, stats.prompt_tokens, stats.generated_tokens) == ("eos", 2, len(answer))
    assert stats.prefill_tokens_per_s > 0 and stats.decode_tokens_per_s > 0
    assert 0 < stats.time_to_first_token_s < 10


def test_at_most_so_many_tokens(scripted: Scripted) -> None:
    """Part of a character that is left over at the end is shown as such."""
    engine = scripted(byte_level().encode("hello 🙂 world"))
    for count, text in ((1, "hell"), (2, "hello"), (4, "hello \ufffd")):
        generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=count)
        assert "".join(generation) == text
        assert (generation.stats.stop_reason, len(generation.tokens)) == ("max_tokens", count)
        assert (generation.stats.decode_tokens_per_s == 0) == (count == 1)


def test_the_end_of_the_context_ends_the_text(scripted: Scripted) -> None:
    engine = scripted(byte_level().encode("x" * 39), context=40)
    for most in (None, 1000):
        generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=most)
        assert "".join(generation) == "x" * 39  # 38 of them were read, the last one is only told
        assert generation.stats.stop_reason == "context"
        assert engine.position == engine.context == 40
    generation = generate(engine, byte_level(), [5] * 40, GREEDY)
    assert len(list(generation)) <= 1
    assert (len(generation.tokens), generation.stats.stop_reason) == (1, "context")


def test_stop_texts(scripted: Scripted) -> None:
    engine = scripted([*byte_level().encode("hello 🙂 world"), EOS])
    stops: list[str | list[str]] = ["world", ["world"], ["or", "wor"], ["ld", "w"], ["🙂 wo"], ["h"], ["d"]]
    texts = ["hello 🙂 "] * 4 + ["hello ", "", "hello 🙂 worl"]
    stops += [["o w"], ["d!", "dd"]]
    texts += ["hello 🙂 world"] * 2
    for stop, text in zip(stops, texts, strict=True):
        generation = generate(engine, byte_level(), PROMPT, GREEDY, stop=stop)
        assert "".join(generation) == text
        assert generation.stats.stop_reason == ("eos" if text.endswith("world") else "stop")
    # One that is complete only at the very end, with what is left over of a character.
    generation = generate(engine, byte_level(), PROMPT, GREEDY, max_tokens=4, stop=[" \ufffd"])
    assert ("".join(generation), generation.stats.stop_reason) == ("hello", "stop")


def test_a_stop_text_that_names_a_special_token_ends_at_it(scripted: Scripted) -> None:
    tokenizer = metaspace()
    start = tokenizer.special_tokens["<s>"]
    engine = scripted([*tokenizer.encode("he", special_tokens=False), start, *tokenizer.encode("abe"), EOS])
    for stop, reason in (("<s>", "stop"), ("<s", "eos")):
        generation = generate(engine, tokenizer, byte_level().encode(PROMPT), GREEDY, stop=stop)
        text = "".join(generation)
        assert generation.stats.stop_reason == reason
        assert (text == "he" and generation.tokens[-1] == start) == (reason == "stop")


def by_character(text: str, stops: Sequence[str]) -> str:
    """The text before the stop text that is complete first (of several the longest)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=10), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
)
def test_stops_do_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    """Only the beginnings of stop texts are held back."""
    text, expected = "", by_character("".join(pieces), stops)
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        text += piece
        shown += finder.feed(piece)
        assert expected.startswith(shown)
        held = text[len(shown) :]
        assert finder.found or not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)
    shown += finder.rest()
    assert shown == expected
    assert finder.found == (expected != text)


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

    def tokens(prompt: Any, params: SamplingParams) -> list[int]:
        generation = generate(engine, byte_level(), prompt, params, max_tokens=20)
        list(generation)
        return generation.tokens

    one, other = (SamplingParams(temperature=3.0, top_k=0, seed=seed) for seed in (1, 2))
    assert tokens(PROMPT, one) == tokens(PROMPT, one) != tokens(PROMPT, other)
    assert tokens(np.array([1, 2]), GREEDY) == tokens([1, 2], GREEDY)


def test_the_penalty_knows_the_prompt(scripted: Scripted) -> None:
    """A token of the prompt that the script wants, by 100, is passed over when its logit is divided by 1000."""
    token = byte_level().encode(PROMPT)[0]
    params = SamplingParams(temperature=0, repetition_penalty=1000.0)
    generation = generate(scripted([token]), byte_level(), PROMPT, params, max_tokens=1)
    list(generation)
    assert generation.tokens != [token]


# ---- behind what was read ----

LONG = list(range(1, 31))


def test_a_prompt_whose_beginning_was_read_has_the_same_continuation(scripted: Scripted) -> None:
    """With a repetition penalty, too: tokens that are reused count."""
    engine = scripted([])
    for params in (GREEDY, SamplingParams(temperature=0, repetition_penalty=1e6)):
        whole = generate(engine, byte_level(), LONG, params, max_tokens=9)
        text = "".join(whole)
        for reused in (0, 1, 8, 13, 28, 29):
            engine.reset()
            engine.read([*LONG[:reused], 77, 78])
            again = generate(engine, byte_level(), LONG, params, max_tokens=9, reused_tokens=reused)
            assert ("".join(again), again.tokens) == (text, whole.tokens)
            assert engine.position == len(LONG) + 8
            assert again.stats.prompt_tokens == len(LONG)


def test_no_more_is_reused_than_was_read(scripted: Scripted) -> None:
    engine = scripted([])
    engine.read(LONG[:20])
    for reused in (-1, 21, 30, True, 1.0):
        with pytest.raises(RequestError, match="reused_tokens must be a whole number from 0 to 20"):
            generate(engine, byte_level(), LONG, GREEDY, reused_tokens=reused)  # type: ignore[arg-type]
    assert engine.position == 20
    engine.reset()
    engine.read([*LONG, 5])
    with pytest.raises(RequestError, match="reused_tokens must be a whole number from 0 to 29, not 30"):
        generate(engine, byte_level(), LONG, GREEDY, reused_tokens=30)  # a token is left to read
    with pytest.raises(RequestError, match="reused_tokens must be 0: with keep_position"):
        generate(engine, byte_level(), LONG, GREEDY, keep_position=True, reused_tokens=1)
    list(generate(engine, byte_level(), [4], GREEDY, max_tokens=1, keep_position=True))
    assert engine.position == 32
    list(generate(engine, byte_level(), [4], GREEDY, max_tokens=1))
    assert engine.position == 1


def test_a_cancelled_generation_ends_before_its_next_token(scripted: Scripted) -> None:
    engine = scripted([])
    for pieces in (0, 1, 3):
        generation = generate(engine, byte_level(), LONG, GREEDY, max_tokens=60)
        for _ in range(pieces):
            next(generation)
        made, position = len(generation.tokens), engine.position
        generation.cancel()
        "".join(generation)
        assert (len(generation.tokens), engine.position) == (made, position)
        assert generation.stats.stop_reason == "cancelled"


def test_time_of_the_reader_does_not_count(scripted: Scripted) -> None:
    generation = generate(scripted(byte_level().encode("abcdefgh")), byte_level(), PROMPT, GREEDY, max_tokens=8)
    for _ in generation:
        time.sleep(0.05)
    assert generation.stats.decode_tokens_per_s > 7 / 0.1


def test_requests_that_cannot_be_met_raise(scripted: Scripted) -> None:
    """All at once, not when the text is read."""
    engine = scripted([])
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ("", {}, r"the prompt is empty, and this model has no token that begins a text"),
        ([], {}, "prompt is empty"),
        ([1] * 201, {}, "prompt of 201 tokens does not fit the context of 200"),
        ([300], {}, "tokens must be integers from 0 to 299"),
        (PROMPT, {"max_tokens": 0}, "max_tokens must be 1 or more, not 0"),
        (PROMPT, {"stop": ["a", ""]}, "stop text must not be empty"),
    )
    for prompt, options, says in wrong:
        with pytest.raises(RequestError, match=says):
            generate(engine, byte_level(), prompt, **options)
    assert generate(engine, metaspace(), "", GREEDY, max_tokens=1).prompt_tokens == [1]
