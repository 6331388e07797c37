"""Grammars restrict what a scheduler chooses; one that fails ends its own answer and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from helpers.fake_engine import END, VOCAB, Desk, FakeEngine, Told, answer_alone
from picompile_runtime import SamplingParams
from picompile_runtime.serving.request import Finished, PromptRead, ServingRequest


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


class Failing(Rising):
    """Fails in one of its methods, or allows nothing, when it has so many tokens."""

    def __init__(self, where: str, at: int, error: BaseException) -> None:
        super().__init__(9)
        self.where, self.at, self.error = where, at, error

    def allowed(self) -> np.ndarray | None:
        self._fail("allowed")
        return np.zeros(VOCAB, bool) if self.where == "nothing" and len(self.tokens) == self.at else None

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
    desk = Desk()
    told = [desk.submit(each) for each in requests]
    desk.finish()
    assert desk.scheduler.slots()[0].activity == "idle" and desk.scheduler.stats().reserved_tokens == 0
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

    ended, ignored = answer_all(request(lambda: MayEnd(10), ignore_end=False), request(lambda: MayEnd(4)))
    assert (ended.reason, len(ended.tokens), ended.tokens[-1]) == ("eos", 3, END)
    assert (ignored.reason, len(ignored.tokens), ignored.tokens[2]) == ("grammar", 4, END)


@pytest.mark.parametrize("error", [RuntimeError("no such rule"), PanicException("no such rule")])
@pytest.mark.parametrize("where", ["allowed", "accept", "nothing"])
def test_a_grammar_that_fails_ends_its_answer(where: str, error: BaseException) -> None:
    for at in (0, 2):
        others = [request(None, 1), request(lambda: Rising(5), 2)]
        failing = request(lambda at=at: Failing(where, at, error))
        first, broken, last = answer_all(others[0], failing, others[1])
        assert broken.reason == "error" and len(broken.tokens) == at
        expected = f"{type(error).__name__}: no such rule" if where != "nothing" else "no token is left to choose"
        assert broken.end.error.startswith(expected) and "\n" not in broken.end.error
        assert [told.answer() for told in (first, last)] == [answer_alone(FakeEngine(), each) for each in others]


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

    desk = Desk(1)
    told = [desk.submit(request(make(number))) for number in range(2)]
    assert made == []
    while not told[0].ended.is_set():
        desk.steps(1)
        assert made == [0]
    desk.finish()
    assert made == [0, 1]


def test_an_interrupt_is_no_failure_of_a_grammar() -> None:
    desk = Desk(1)
    told = desk.submit(request(lambda: Failing("allowed", 0, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        desk.steps(1)
    assert not any(isinstance(event, PromptRead | Finished) for event in told.events)
