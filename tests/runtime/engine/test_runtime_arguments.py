"""Arguments that mean nothing, or nearly something: each is a RequestError of one line, and changes nothing."""

from __future__ import annotations

import itertools
import math
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
    StreamDecoder,
    Tokenizer,
    generate,
    load,
    perplexity,
)

TOY = make_toy()
HUGE = pytest.param(10**5000, id="huge")  # has more digits than Python prints


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


@pytest.mark.parametrize("value", [None, "1", 1.0, np.float64(1), True, -1, HUGE, math.nan, [1], np.array([1, 2])])
def test_values_that_are_no_whole_numbers_raise(engine: Engine, value: Any) -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: engine.rewind(value),
        lambda: engine.decode(value),
        lambda: engine.decode(1, value),
        lambda: engine.copy(0, value),
        lambda: engine.decode_sequences([1, 2], [0, value]),
        lambda: engine.firing(value),
        lambda: engine.timing(value),
        lambda: SamplingParams(top_k=value),
        lambda: Sampler(SamplingParams(), value),
        lambda: StreamDecoder(byte_level()).push(value),
    ]
    if value is not None:
        wrong += [
            lambda: load(engine.artifact.folder, threads=value),
            lambda: SamplingParams(seed=value),
            lambda: generate(engine, byte_level(), [1], max_tokens=value),
            lambda: perplexity(engine, [1, 2], value),
        ]
    for use in wrong:
        with pytest.raises(RequestError) as caught:
            use()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert engine.positions == (3, 0)


def test_numbers_of_numpy_are_numbers(engine: Engine, make_artifact: Callable[..., Path]) -> None:
    one = np.int64(1)
    engine.rewind(one)
    assert engine.position == 1 and type(engine.position) is int
    engine.decode(np.uint8(2), np.int32(0))
    engine.copy(np.int8(0), one)
    engine.decode_sequences(np.array([1, 2]), np.array([1, 0]))
    assert engine.positions == (3, 3)
    assert load(make_artifact("other", toy=TOY), threads=np.int64(2)).threads == 2  # type: ignore[arg-type]
    SamplingParams(np.float32(0.5), np.int64(3), np.float64(0.9), 0, np.float32(1.1), np.int64(7))  # type: ignore[arg-type]


def test_a_rejected_generation_keeps_the_sequence(engine: Engine) -> None:
    for wrong in ([50], [1] * 41, None, [1.0]):
        with pytest.raises(RequestError):
            generate(engine, byte_level(), wrong)  # type: ignore[arg-type]
    for stop in (None, 5, [5], "", [""]):
        with pytest.raises(RequestError, match="stop"):
            generate(engine, byte_level(), [1], stop=stop)  # type: ignore[arg-type]
    assert engine.position == 3


@pytest.mark.filterwarnings("error")
def test_extremes_are_distributions() -> None:
    largest = np.finfo(np.float32).max
    for penalty, temperature in itertools.product((1e-6, 1e6), (1e-320, 1e-6, 1e308)):
        for logits in ([0.0, 1.0, -1.0], [largest, -largest, 0.0], [-largest, -largest, -largest]):
            sampler = Sampler(SamplingParams(temperature, repetition_penalty=penalty, seed=1), 3)
            sampler.observe([0, 1])
            _, probabilities = sampler.distribution(np.array(logits, np.float32))
            assert np.isfinite(probabilities).all() and probabilities.sum() == pytest.approx(1)
            assert sampler.sample(np.array(logits, np.float32)) in range(3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_values_that_are_no_logits_raise(temperature: float) -> None:
    wrong: list[Any] = [None, "abc", [1.0], [[1.0, 2.0, 3.0]], 1.0, ["a", "b", "c"], [None] * 3, object()]
    for logits in wrong:
        with pytest.raises(RequestError, match="logits must be 3 numbers, one for each token, not"):
            Sampler(SamplingParams(temperature), 3).sample(logits)


def test_threads_of_the_environment(make_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_artifact(toy=TOY)
    for value in ("9" * 5000, "2.0", "-1", "0", "257", "٣", "1e2", " 2", "0x2", "2\n"):
        monkeypatch.setenv("PICOMPILE_THREADS", value)
        with pytest.raises(RequestError, match="from 1 to 256") as caught:
            load(folder)
        assert len(str(caught.value)) < 200
    monkeypatch.setenv("PICOMPILE_THREADS", "0" * 5000 + "2")
    assert (load(folder).threads, load(folder, threads=5).threads) == (2, 5)
    for count in (0, 257):
        with pytest.raises(RequestError, match="number of threads must be a whole number from 1 to 256"):
            load(folder, threads=count)
    monkeypatch.setenv("PICOMPILE_ISA", "x" * 5000)
    with pytest.raises(RequestError, match="PICOMPILE_ISA is 'xxx") as caught:
        load(folder)
    assert len(str(caught.value)) < 300


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
