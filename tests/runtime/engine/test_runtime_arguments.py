"""Arguments that mean nothing, or nearly something: each is a RequestError of one line, and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from helpers.toys.toy_artifact import make_toy
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import (
    ArtifactError,
    Engine,
    RequestError,
    Sampler,
    SamplingParams,
    Tokenizer,
    load,
    perplexity,
)

TOY = make_toy()


@pytest.fixture
def engine(make_artifact: Callable[..., Path]) -> Iterator[Engine]:
    with load(make_artifact(toy=TOY, sequences=2), threads=1) as engine:
        engine.prefill([1, 2, 3])
        yield engine


def test_values_that_are_no_lists_of_tokens_raise(engine: Engine) -> None:
    texts = ("tokens must be integers from 0 to 49", "no tokens to read")
    wrong: list[Any] = [[[1], [1, 2]], None, 5, "12", b"12", {1: 2}, {1}, [None], [True, 2], [50], [1.0], object()]
    for text, values in zip(texts, ([*wrong, [10**30], [2**63, -1]], [[], np.array([], int), ()]), strict=True):
        for ids in values:
            for use in (engine.prefill, engine.read, engine.score, engine.check):
                with pytest.raises(RequestError, match=text):
                    use(ids)
            for use in (lambda ids: perplexity(engine, ids), lambda ids: engine.decode_sequences(ids, [0])):
                with pytest.raises(RequestError):
                    use(ids)
    for slots in (None, 5, {0, 1}, {0: 1, 1: 2}, "01", [0, None], [[0], [1]], object()):
        with pytest.raises(RequestError, match="slot"):
            engine.decode_sequences([1, 2], slots)  # type: ignore[arg-type]
    assert engine.positions == (3, 0)


def test_values_that_are_no_logits_raise() -> None:
    wrong: list[Any] = [None, "abc", [1.0], [[1.0, 2.0, 3.0]], 1.0, ["a", "b", "c"], [None] * 3, object()]
    for logits, temperature in itertools.product(wrong, (0.0, 1.0)):
        with pytest.raises(RequestError, match="logits must be 3 numbers, one for each token, not"):
            Sampler(SamplingParams(temperature), 3).sample(logits)


def test_threads_of_the_environment(make_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_artifact(toy=TOY)
    for value in ("9" * 5000, "2.0", "-1", "0", "257", "٣", " 2"):
        monkeypatch.setenv("PICOMPILE_THREADS", value)
        with pytest.raises(RequestError, match="from 1 to 256") as caught:
            load(folder)
        assert len(str(caught.value)) < 200
    monkeypatch.setenv("PICOMPILE_THREADS", "0" * 5000 + "2")
    assert (load(folder).threads, load(folder, threads=5).threads) == (2, 5)


def test_texts_and_tokens_of_a_tokenizer() -> None:
    tokenizer = byte_level()
    for text in (None, b"a", 5, ["a"], "\ud83d"):
        with pytest.raises(RequestError, match="text"):
            tokenizer.encode(text)  # type: ignore[arg-type]
    for ids in (None, 5, [-1], [2**32], [10**30], [1.5], ["a"], [None]):
        with pytest.raises(RequestError, match="these are no tokens of the tokenizer"):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    assert tokenizer.decode([10**6]) == ""
    for arguments in (("",), ("{}",), ("[]",), ("nonsense",), (b"\xff",), (None,), (5,), ("{}", 5)):
        with pytest.raises(ArtifactError, match=r"tokenizer(.json|_config.json)? "):
            Tokenizer(*arguments)  # type: ignore[arg-type]


class PanicException(BaseException):
    """The exception that a panic in Rust raises in Python."""


def test_a_panic_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, library = byte_level(), Mock()
    library.encode_batch.side_effect = (PanicException("index out of\nbounds"), KeyboardInterrupt)
    monkeypatch.setattr(tokenizer, "_tokenizer", library)
    with pytest.raises(RequestError, match=r"fails on this text .index out of bounds"):
        tokenizer.encode("a")
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
