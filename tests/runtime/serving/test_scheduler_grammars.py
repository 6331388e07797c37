"""Grammars restrict what a scheduler chooses; one that fails ends its own answer and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from helpers.fake_engine import END, VOCAB, FakeEngine, answer_alone
from helpers.told_answers import Told
from picompile_runtime import SamplingParams
from picompile_runtime.serving.request import Finished, PromptRead, ServingRequest
from picompile_runtime.serving.scheduler import Scheduler


class PanicException(BaseException):
    """Named like what Rust's panics are raised as, which is no Exception either."""


@dataclass
class Rising:
    """Tokens rise; after `length` of them the answer is complete."""

    length: int
    tokens: list[int] = field(default_factory=list)

    def allowed(self) -> np.ndarray | None:
        return np.arange(VOCAB) > self.tokens[-1] if self.tokens else None

    def accept(self, token: int) -> bool:
        self.tokens.append(token)
        return len(self.tokens) == self.length


@dataclass
class Failing(Rising):
    """Fails in one of its methods, or allows nothing, when it has so many tokens."""

    where: str = ""
    at: int = 2
    error: BaseException = field(default_factory=lambda: RuntimeError("no such rule"))

    def allowed(self) -> np.ndarray | None:
        self._fail("allowed")
        if self.where == "nothing" and len(self.tokens) == self.at:
            return np.zeros(VOCAB, bool)
        return None

    def accept(self, token: int) -> bool:
        self._fail("accept")
        return super().accept(token)

    def _fail(self, where: str) -> None:
        if self.where == where and len(self.tokens) == self.at:
            raise self.error


def request(grammar: Callable[[], Any] | None, seed: int = 0, **options: Any) -> ServingRequest:
    params = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=seed)
    return ServingRequest([3, 4], params, 12, grammar=grammar, **{"ignore_end": True, **options})


def answer_all(*requests: ServingRequest) -> list[Told]:
    scheduler = Scheduler(FakeEngine(3), start=False)  # type: ignore[arg-type]
    told = [Told() for _ in requests]
    for each, listener in zip(requests, told, strict=True):
        scheduler.submit(each, listener)
    while scheduler.step():
        pass
    assert scheduler.slots()[0].activity == "idle" and scheduler.stats().reserved_tokens == 0
    return told


def test_tokens_follow_their_grammar_until_it_is_complete() -> None:
    requests = [request(lambda: Rising(3), seed) for seed in range(6)]
    for each, told in zip(requests, answer_all(*requests), strict=True):
        assert told.tokens == sorted(set(told.tokens)) and len(told.tokens) == 3
        assert told.reason == "grammar"
        assert told.answer() == answer_alone(FakeEngine(), each)


def test_log_probabilities_are_those_of_the_model_without_its_grammar() -> None:
    each = request(lambda: Rising(3), top_log_probabilities=VOCAB)
    (told,) = answer_all(each)
    assert told.answer() == answer_alone(FakeEngine(), each)
    for one in told.answer().log_probabilities:
        assert one is not None and len(one.top) == VOCAB
        assert sum(np.exp(value) for _, value in one.top) == pytest.approx(1)


def test_an_end_token_ends_an_answer_that_its_grammar_lets_end() -> None:
    class MayEnd(Rising):
        def allowed(self) -> np.ndarray | None:
            return np.arange(VOCAB) == END if len(self.tokens) == 2 else np.arange(VOCAB) != END

    ended, ignored = answer_all(
        request(lambda: MayEnd(10), ignore_end=False), request(lambda: MayEnd(4), ignore_end=True)
    )
    assert (ended.reason, len(ended.tokens), ended.tokens[-1]) == ("eos", 3, END)
    assert (ignored.reason, len(ignored.tokens), ignored.tokens[2]) == ("grammar", 4, END)


@pytest.mark.parametrize("error", [RuntimeError("no such rule"), PanicException("no such rule")])
@pytest.mark.parametrize("where", ["allowed", "accept", "nothing"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_grammar_that_fails_ends_its_answer(where: str, at: int, error: BaseException) -> None:
    others = [request(None, 1), request(lambda: Rising(5), 2)]
    told = answer_all(others[0], request(lambda: Failing(9, where=where, at=at, error=error)), others[1])
    assert told[1].reason == "error" and len(told[1].tokens) == at
    expected = f"{type(error).__name__}: no such rule" if where != "nothing" else "no token is left to choose"
    assert told[1].end.error.startswith(expected) and "\n" not in told[1].end.error
    for each, listener in zip(others, (told[0], told[2]), strict=True):
        assert listener.answer() == answer_alone(FakeEngine(), each)


def test_a_grammar_that_cannot_be_made_ends_its_answer_before_the_prompt_is_read() -> None:
    def make() -> Rising:
        raise ValueError("the schema has a hole\nin line 3")

    told = answer_all(request(make), request(None, 1), request(make))
    for number in (0, 2):
        assert told[number].events == [told[number].end]
        assert told[number].end.error == "ValueError: the schema has a hole?in line 3"
    assert told[1].answer() == answer_alone(FakeEngine(), request(None, 1))


def test_a_grammar_is_made_once_and_not_before_its_turn() -> None:
    made = list[int]()

    def make(number: int) -> Callable[[], Rising]:
        return lambda: (made.append(number), Rising(4))[1]

    scheduler = Scheduler(FakeEngine(1), start=False)  # type: ignore[arg-type]
    told = [Told(), Told()]
    for number, listener in enumerate(told):
        scheduler.submit(request(make(number)), listener)
    assert made == []
    while not told[0].ended.is_set():
        scheduler.step()
        assert made == [0]
    while scheduler.step():
        pass
    assert made == [0, 1]


def test_an_interrupt_is_no_failure_of_a_grammar() -> None:
    scheduler = Scheduler(FakeEngine(1), start=False)  # type: ignore[arg-type]
    told = Told()
    scheduler.submit(request(lambda: Failing(9, where="allowed", at=0, error=KeyboardInterrupt())), told)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert not any(isinstance(event, PromptRead | Finished) for event in told.events)
