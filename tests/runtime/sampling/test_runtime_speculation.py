"""Drafting tokens: what is drafted, when it is, and that the text stays the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.speculation import WrongDrafts
from helpers.support import BUNDLED_MODEL
from helpers.toys.toy_artifact import make_toy
from helpers.toys.toy_tokenizers import byte_level
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile_runtime import Engine, Generation, RequestError, SamplingParams, Tokenizer, generate, load, measure
from picompile_runtime.bench import measure as rounds
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.sampling.speculation import DraftPolicy, NgramDraft, Speculation

DRAWS = [SamplingParams(temperature=0), SamplingParams(temperature=1.5, top_k=0, seed=7, repetition_penalty=1.2)]
CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n" * 3
SHORT = "a = b\n" * 3
COUNT = 30


def naive_draft(text: Sequence[int], count: int) -> tuple[int, list[int]]:
    """Return how much of the text's end stood before, by its last 2 to 4 tokens, and what followed it there."""
    for end in (4, 3, 2):
        for place in range(len(text) - 1, end - 1, -1):
            if list(text[place - end : place]) == list(text[-end:]):
                longer = list(text)
                for i in range(count):
                    longer.append(longer[place + i])
                common = next((n for n in range(place) if text[place - n - 1] != text[len(text) - n - 1]), place)
                return min(common, 32), longer[len(text) :]
    return 0, []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_the_latest_continuation_of_the_longest_end_is_drafted(text: list[int], count: int) -> None:
    ngrams = NgramDraft()
    ngrams.add(text)
    assert (ngrams.length, ngrams.draft(count)) == naive_draft(text, count)
    assert ngrams.draft(0) == []


def test_nothing_is_drafted_before_it_would_have_been_accepted() -> None:
    speculation = Speculation(7)
    speculation.add([5, 6, 7, 8, 9])
    assert speculation.draft(7) == []
    speculation.saw_step(1, 0.01)
    for _ in range(3):
        speculation.add([5, 6, 7, 8, 9])
    drafted = speculation.draft(7)
    assert len(drafted) > 1 and drafted == [5, 6, 7, 8, 9, 5, 6][: len(drafted)]
    assert speculation.draft(1) == [5]
    assert speculation.draft(0) == speculation.draft(-3) == []


def test_nothing_is_drafted_where_drafts_are_wrong() -> None:
    speculation, rng = Speculation(7), np.random.default_rng(0)
    speculation.saw_step(1, 0.01)
    drafted = 0
    for _ in range(500):
        drafted += len(speculation.draft(7))
        speculation.add([int(rng.integers(4))])
    assert drafted < 50


def test_as_many_are_drafted_as_steps_are_fast() -> None:
    """With a share of accepted drafts of nearly one, what counts is the time of a step for each token."""

    def count(step_s: dict[int, float]) -> int:
        policy = DraftPolicy(7)
        for _ in range(60):
            for length in range(4, 12):
                policy.saw_token(length, True)
            for tokens, seconds in step_s.items():
                policy.saw_step(tokens, seconds)
        return policy.count(4)

    assert count({}) == 0
    assert count({1: 1.0, **dict.fromkeys(range(2, 9), 1.1)}) == 7
    assert count({1: 1.0, **{tokens: 1.0 + 0.1 * tokens + 9.0 * (tokens > 4) for tokens in range(2, 9)}}) == 3
    assert count({1: 1.0, **{tokens: float(tokens) for tokens in range(2, 9)}}) == 0
    # Steps that were not measured are expected to cost as much more as others do.
    assert count({1: 1.0, 2: 1.9}) == 0 and count({1: 1.0, 2: 1.1}) == 7


@pytest.fixture
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with load(tiny_artifact, threads=2) as loaded:
        yield loaded


@pytest.mark.parametrize("params", DRAWS, ids=["greedy", "drawn"])
def test_the_text_is_the_same(engine: Engine, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.of(engine.artifact)
    plain = generate(engine, tokenizer, SHORT, params, COUNT)
    text = "".join(plain)
    for patch in (False, True):
        if patch:
            WrongDrafts([*plain.prompt_tokens, *plain.tokens], seed=1).install(monkeypatch)
        drafted = generate(engine, tokenizer, SHORT, params, COUNT, draft="ngram")
        assert ("".join(drafted), drafted.tokens) == (text, plain.tokens)
        assert engine.position == len(plain.prompt_tokens) + COUNT - 1
        assert drafted.stats.generated_tokens == COUNT
    assert 0 < drafted.stats.accepted_tokens < drafted.stats.draft_tokens
    assert plain.stats.draft_tokens == 0


@pytest.fixture
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all sizes are taken for equally long, whatever they take here; and little memory is read for bench."""
    monkeypatch.setattr(DraftPolicy, "saw_step", lambda policy, tokens, _: policy._seconds.update({tokens: 1.0}))
    monkeypatch.setattr(rounds, "MemoryReader", functools.partial(MemoryReader, size_bytes=2**18))


@pytest.mark.parametrize("most", [1, 2, 3, 17])
def test_limits_are_kept(engine: Engine, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tokens and of the context; a text that is left in the middle leaves what it has shown in the cache."""
    tokenizer = Tokenizer.of(engine.artifact)

    def whole(**options: Any) -> Generation:
        generation = generate(engine, tokenizer, SHORT, DRAWS[0], **{"max_tokens": None, **options})
        "".join(generation)
        return generation

    plain = whole()
    assert plain.stats.stop_reason in ("eos", "context")
    WrongDrafts([*plain.prompt_tokens, *plain.tokens], seed=2).install(monkeypatch)
    prompt, ended = len(plain.prompt_tokens), whole(draft="ngram")
    assert (ended.tokens, ended.stats.stop_reason) == (plain.tokens, plain.stats.stop_reason)
    limited = whole(max_tokens=most, draft="ngram")
    assert (limited.tokens, engine.position) == (plain.tokens[:most], prompt + most - 1)
    cancelled, seen = generate(engine, tokenizer, SHORT, DRAWS[0], draft="ngram"), 0
    for _ in cancelled:
        if not seen and len(cancelled.tokens) >= most:
            cancelled.cancel()
            seen = len(cancelled.tokens)
    assert (cancelled.tokens, cancelled.stats.stop_reason) == (plain.tokens[:seen], "cancelled")
    assert engine.position == prompt + len(cancelled.tokens) - 1
    stopped = whole(stop=tokenizer.decode(plain.tokens[most : most + 1]), draft="ngram")
    assert (stopped.stats.stop_reason, engine.position) == ("stop", prompt + len(stopped.tokens) - 1)


@pytest.mark.usefixtures("even_steps")
def test_bench_reads_a_text_with_drafts(engine: Engine) -> None:
    ids = Tokenizer.of(engine.artifact).encode(SHORT)
    found = measure(engine, 20, 20, repeats=2, ids=ids, draft="ngram")["draft"]
    assert found["tokens_per_s"] > 0 and found["stdev"] >= 0
    assert 0 < found["accepted_share"] <= found["draft_share"]
    assert measure(engine, 8, 8, repeats=1)["draft"] is None
    with pytest.raises(RequestError, match="draft must be ngram or none"):
        measure(engine, 8, 8, draft="all")


@pytest.mark.slow("compiles the bundled model twice")
def test_repeated_text_is_drafted(tmp_path: Path, even_steps: None) -> None:
    for name, draft_tokens in (("artifact", 7), ("without", 0)):
        options = CompileOptions(context=512, draft_tokens=draft_tokens)
        compile_model(BUNDLED_MODEL, tmp_path / name, options)
        with load(tmp_path / name, threads=2) as engine:
            assert engine.most_checked == 1 + draft_tokens
            drafted = generate(engine, Tokenizer.of(engine.artifact), CODE, DRAWS[0], 40, draft="ngram")
            assert len("".join(drafted)) > 40
            assert (drafted.stats.accepted_tokens > 0) == (draft_tokens > 0)


def test_read_each_checks_its_tokens(engine: Engine) -> None:
    engine.prefill([1, 2, 3])
    for ids, message in [
        ([1] * 9, r"the tokens to read each must be a whole number from 1 to 8, not 9"),
        ([], "there are no tokens"),
        ([engine.vocab], "token"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.read_each(ids)
    with pytest.raises(RequestError, match="there is no slot 1"):
        engine.read_each([1], slot=1)
    assert engine.position == 3
    with pytest.raises(RequestError, match="draft must be ngram or none, not 'magic'"):
        generate(engine, Tokenizer.of(engine.artifact), "a", draft="magic")


@pytest.mark.usefixtures("even_steps")
def test_an_artifact_that_checks_no_draft(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(toy=make_toy(300)), threads=1) as engine:
        assert engine.most_checked == 1
        drafted = generate(engine, byte_level(), "def f(x):", DRAWS[0], 8, draft="ngram")
        assert len("".join(drafted)) > 0 and drafted.stats.draft_tokens == 0
        with pytest.raises(RequestError, match="can check no drafts: compile it with --draft-tokens"):
            measure(engine, 8, 8, draft="ngram")
