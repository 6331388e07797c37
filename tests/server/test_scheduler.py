"""The scheduler on an engine without kernels: what is read when, who waits, and that answers are as if alone.

test_scheduler_machine.py holds random requests, cancellations and failures to the same: order, steps, reservations,
and every answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from helpers.fake_engine import (
    CHUNK,
    CONTEXT,
    END,
    NEURONS,
    VOCAB,
    Desk,
    FakeEngine,
    Told,
    alone,
    answer_alone,
    request,
)
from helpers.speculation import WrongDrafts
from picompile_runtime import RequestError, SamplingParams
from picompile_server.request import Event, Finished, PromptRead, ServingRequest, TokenChosen
from picompile_server.scheduler import ClosedError, QueueFullError, SchedulerOptions

# Long enough to be worth a copy, with a part of a chunk at the end.
SYSTEM = [2 + number % 30 for number in range(3 * CHUNK + 3)]

REQUESTS = [
    request([5, 6, 7], 12, 1),
    request(SYSTEM, 9, 2, top_log_probabilities=3),
    request([9] * CHUNK, 1, 3),
    request([END, 4] * CHUNK, 30, 4, ignore_end=False),
    request(SYSTEM[:20], 8, 5, top_log_probabilities=0, with_prompt=True),
    ServingRequest([8], SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={3: 2.0}), 10),
    ServingRequest([8, 9], SamplingParams(top_k=0, repetition_penalty=1.2, frequency_penalty=0.5, seed=1), 20),
    request([1, 2, 3, 4], 0, top_log_probabilities=1, with_prompt=True),
    request([7], None, 6),
]


@pytest.mark.parametrize("sequences", [1, 3])
def test_answers_with_drafts_are_those_without(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer alone has its tokens drafted, among others none; wrong drafts leave nothing behind."""
    each_alone = [answer_alone(FakeEngine(), each) for each in REQUESTS]
    texts = [[*each.prompt, *answer.tokens] for each, answer in zip(REQUESTS, each_alone, strict=True)]
    drafts = WrongDrafts(*texts, seed=sequences)
    drafts.install(monkeypatch)
    desk = Desk(sequences, draft="ngram")
    told = [desk.submit(each) for each in REQUESTS]
    desk.finish()
    assert [listener.answer() for listener in told] == each_alone
    assert drafts.drafted > 10 and any(call.name == "each" for call in desk.engine.calls)
    stats = desk.scheduler.stats()
    assert stats.decoded_tokens == sum(max(len(each.tokens) - 1, 0) for each in each_alone)
    assert stats.drafted_tokens == drafts.drafted > stats.accepted_tokens > 0
    if sequences == 1:  # the last draft of an answer may be right, and is not read behind
        assert 0 <= stats.accepted_tokens - (stats.decoded_tokens - stats.decode_steps) <= len(each_alone)


def test_a_long_prompt_delays_the_others_by_one_chunk() -> None:
    desk = Desk()
    first = desk.submit([5], 40)
    desk.steps(1)
    desk.submit(SYSTEM, 1)
    desk.submit([3] * 2 * CHUNK, 1)
    desk.finish()
    names = [call.name for call in desk.engine.steps()]
    assert names[:2] == ["last", "decode"]
    # Four chunks of one prompt, the next prompt's two behind it, and a token of the first answer after each.
    chunks = ["chunk", "chunk", "chunk", "last", "chunk", "last"]
    assert names[2:14] == [name for chunk in chunks for name in (chunk, "decode")]
    assert len(first.tokens) == 40


def test_a_prompt_without_an_answer_is_read_without_scores() -> None:
    desk = Desk()
    told = desk.ask(SYSTEM, 0)
    assert [type(event) for event in told.events] == [PromptRead, Finished]
    assert told.reason == "max_tokens"
    assert [call.name for call in desk.engine.steps()] == ["chunk"] * 4
    # A prompt as long as the context can be read.
    options: Any = {"top_log_probabilities": 0, "with_prompt": True}
    assert desk.ask([3] * CONTEXT, 0, **options).answer() == alone([3] * CONTEXT, 0, **options)
    last = desk.ask([3] * (CONTEXT - 1), None)
    assert len(last.tokens) == 2 and last.reason == "context"


def test_why_answers_end() -> None:
    desk, forced = Desk(), SamplingParams(logit_bias={END: 100})
    ended = desk.submit(ServingRequest([4], forced, 10))
    ignored = desk.submit(ServingRequest([4], forced, 10, ignore_end=True))
    full = desk.submit(SYSTEM, None)
    desk.finish()
    assert (ended.tokens, ended.reason) == ([END], "eos")
    assert (ignored.tokens, ignored.reason) == ([END] * 10, "max_tokens")
    assert (len(full.tokens), full.reason) == (CONTEXT - len(SYSTEM) + 1, "context")
    counts = dict.fromkeys(("eos", "max_tokens", "context"), 1) | dict.fromkeys(("grammar", "cancelled", "error"), 0)
    assert desk.scheduler.stats().finished == counts


def test_times_are_in_order() -> None:
    desk = Desk(1)
    ended, waiting = desk.submit([5]), desk.submit([6])
    desk.answers[1].cancel()
    desk.finish()
    times = ended.end.times
    assert times.submitted_s <= times.admitted_s <= times.first_token_s < times.finished_s
    times = waiting.end.times
    assert times.submitted_s < times.admitted_s == times.first_token_s == times.finished_s


def test_a_first_token_is_told_before_the_others_get_theirs() -> None:
    desk, steps = Desk(), list[str]()
    desk.submit([5], 20)
    desk.steps(1)
    desk.scheduler.submit(request([6], 3), lambda event: steps.append(desk.engine.steps()[-1].name))
    desk.finish()
    assert steps == ["last", "last", "decode", "decode", "decode"]


# Cancellation.


def test_a_listener_may_cancel_its_answer_and_submit() -> None:
    desk, events, second = Desk(2), list[Event](), Told()

    def listener(event: Event) -> None:
        events.append(event)
        if len(events) == 4:
            answer.cancel()
        if isinstance(event, Finished):
            desk.scheduler.submit(request([9], 3), second)

    answer = desk.scheduler.submit(request([5], 30), listener)
    other = desk.submit([6], 10)
    desk.finish()
    assert [type(event) for event in events] == [PromptRead, *[TokenChosen] * 3, Finished]
    assert len(other.tokens) == 10 and second.answer() == alone([9], 3)


def test_a_cancellation_counts_before_the_step_that_follows() -> None:
    """Also one that comes while a chunk of another prompt is read."""
    desk = Desk(2)
    first = desk.submit([5], 20)
    desk.steps(1)
    desk.scheduler.submit(request([6], 4), lambda event: desk.answers[0].cancel())
    count = len(first.tokens)
    desk.steps(1)
    assert first.reason == "cancelled" and len(first.tokens) == count
    assert [call.slots for call in desk.engine.steps()[-2:]] == [(1,), (1,)]


# The queue.


def test_the_queue_is_bounded() -> None:
    desk = Desk(2, max_waiting=1)
    told = [desk.submit([5 + number], 3) for number in range(3)]  # two for the slots, one that waits
    with pytest.raises(QueueFullError, match="3 requests are waiting already"):
        desk.submit([9])
    desk.steps(1)
    with pytest.raises(QueueFullError):  # one has a slot, another may have the other
        desk.submit([9])
    desk.finish()
    told.append(desk.ask([9], 3))
    assert [len(each.tokens) for each in told] == [3] * 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (request([]), "there are no tokens to read"),
        (request([VOCAB]), f"tokens must be integers from 0 to {VOCAB - 1}"),
        (request([1] * (CONTEXT + 1)), f"a prompt of {CONTEXT + 1} tokens does not fit the context of {CONTEXT}"),
        (request([1] * CONTEXT, 1), "leaves no room for an answer in the context of 96"),
        (request([1] * CONTEXT, None), "leaves no room for an answer"),
        (request([1], -1), "max_tokens must be"),
        (request([1], 1.5), "max_tokens must be"),  # type: ignore[arg-type]
        (request([1], top_log_probabilities=VOCAB + 1), "top_log_probabilities must be a whole number from 0 to 40"),
        (request([1], with_prompt=True), "log-probabilities of the prompt need top_log_probabilities"),
        (ServingRequest([1], SamplingParams(logit_bias={VOCAB: 1})), "logit_bias has token 40"),
        (ServingRequest([1], "greedy"), "SamplingParams, not 'greedy'"),  # type: ignore[arg-type]
        ("hello", "ServingRequest, not 'hello'"),
    ],
)
def test_requests_that_make_no_sense_are_refused_at_once(given: Any, text: str) -> None:
    desk = Desk()
    with pytest.raises(RequestError, match=text):
        desk.scheduler.submit(given, Told())
    assert not desk.scheduler.step() and not desk.engine.calls
    assert desk.scheduler.stats().waiting == 0


def test_options_that_make_no_sense_raise() -> None:
    for options in ({"max_waiting": -1}, {"max_waiting": 1.5}, {"kv_tokens": 0}, {"draft": "x"}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} must be "):
            SchedulerOptions(**options)  # type: ignore[arg-type]


def test_closing_finishes_what_runs_and_waits() -> None:
    desk = Desk(1)
    told = [desk.submit(SYSTEM[number:], 30) for number in range(3)]
    desk.steps(1)
    desk.scheduler.close()
    assert [each.reason for each in told] == ["max_tokens"] * 3
    with pytest.raises(ClosedError, match="takes no requests any more"):
        desk.submit([5])
    # It reads nothing again.
    assert desk.scheduler.stats().reread_tokens == 0
    assert desk.engine.steps()[-1].name == "decode"
    desk.scheduler.close(drain=False)


def test_closing_at_once_cancels_what_runs_and_waits() -> None:
    desk = Desk(2)
    told = [desk.submit([5 + number], 4) for number in range(4)]
    desk.steps(2)
    desk.scheduler.close(drain=False)
    assert [each.reason for each in told] == ["cancelled"] * 4
    assert [len(each.tokens) for each in told] == [3, 2, 0, 0]
    assert desk.scheduler.stats().reserved_tokens == 0


# Failures.


def test_an_engine_that_stays_broken_ends_each_request() -> None:
    desk = Desk(2)
    desk.engine.failures = 10**6
    told = [desk.submit([5 + number], 4) for number in range(5)]
    desk.finish()
    assert {(each.reason, each.end.error) for each in told} == {("error", "the kernel broke")}


def test_a_kernel_that_fails_while_nothing_runs_harms_nobody() -> None:
    desk = Desk(1)
    desk.ask(SYSTEM, 30)
    desk.engine.failures = 1
    assert desk.scheduler.step()  # reads the answer again
    assert not desk.scheduler.step()
    assert desk.scheduler.stats().held_tokens == 0
    assert desk.ask(SYSTEM, 4).answer() == alone(SYSTEM, 4)


@pytest.mark.parametrize("with_prompt", [True, False])
def test_scores_that_are_no_numbers_end_their_own_answer(with_prompt: bool) -> None:
    class Overflowing(FakeEngine):
        """Has no scores behind token 33."""

        def _logits(self, slot: int) -> np.ndarray:
            overflows = 33 in [token for token, _ in self.caches[slot]]
            return np.full(self.vocab, np.nan, np.float32) if overflows else super()._logits(slot)

    desk = Desk(Overflowing(3))
    whole = desk.submit([5], 12)
    options = {"top_log_probabilities": 1, "with_prompt": True} if with_prompt else {}
    broken = desk.submit([33, *SYSTEM], 12, **options)
    other = desk.submit([6], 12, 2)
    desk.finish()
    assert broken.reason == "error" and "logits contain NaN" in broken.end.error
    assert [type(event) for event in broken.events] == ([] if with_prompt else [PromptRead]) + [Finished]
    assert (whole.answer(), other.answer()) == (alone([5], 12), alone([6], 12, 2))
    assert desk.scheduler.stats().reserved_tokens == 0
    # Its slot is not reused.
    assert desk.ask([33, *SYSTEM], 0).prompt.cached_tokens == 0


# Numbers.


def shares(told: Told) -> list[float | None]:
    return [event.fired_share for event in told.events if isinstance(event, TokenChosen)]


def test_the_share_of_neurons_that_fire_is_told_with_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    assert shares(desk.ask([5], 4)) == [None, 0.2, 0.2, 0.2]
    assert desk.scheduler.stats().fired_share == 0.2
    # An accelerator is asked for its counters once in sixteen steps.
    engine = FakeEngine()
    engine.artifact.program.has_accelerator = True
    found = shares(Desk(engine).ask([5], 40))
    assert [number for number, share in enumerate(found) if share is not None] == [16, 32]
    # Neurons that are not counted have no share.
    counted = {"neurons": 0}

    def totals(function: str) -> tuple[int, int, int]:
        if function == "decode":
            raise RequestError("neurons of 'decode' are not counted")
        counted["neurons"] += NEURONS
        return 0, 0, counted["neurons"]

    desk = Desk()
    monkeypatch.setattr(desk.engine, "firing_totals", totals)
    assert set(shares(desk.ask([5], 4))) == {None} == {desk.scheduler.stats().fired_share}


def test_counts_and_states() -> None:
    desk = Desk(2, reread=False)
    told = [desk.submit(SYSTEM, 6, number) for number in range(3)]
    desk.steps(5)
    stats, slots = desk.scheduler.stats(), desk.scheduler.slots()
    assert (stats.waiting, stats.reading, stats.decoding) == (1, 0, 2)
    assert [(slot.slot, slot.activity, slot.request) for slot in slots] == [(0, "decoding", 1), (1, "decoding", 2)]
    assert stats.held_tokens == sum(slot.tokens for slot in slots) == 2 * len(SYSTEM) + 3
    assert stats.reserved_tokens == 2 * (len(SYSTEM) + 6)
    desk.finish()
    stats = desk.scheduler.stats()
    assert stats.prompt_tokens == 3 * len(SYSTEM)
    assert stats.cached_tokens == 2 * (len(SYSTEM) - 1) == sum(each.prompt.cached_tokens for each in told)
    assert (stats.generated_tokens, stats.decoded_tokens, stats.prompt_steps) == (18, 15, 6)
    assert 0 < stats.decode_steps <= 15 and stats.decode_s > 0 and stats.prompt_s > 0
    assert stats.capacity_tokens == 2 * CONTEXT


# Grammars restrict what is chosen; one that fails ends its own answer and no other.


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


def restricted(grammar: Callable[[], Any] | None, seed: int = 0, **options: Any) -> ServingRequest:
    params = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=seed)
    return ServingRequest([3, 4], params, 12, grammar=grammar, **{"ignore_end": True, **options})


def answer_all(*requests: ServingRequest) -> list[Told]:
    desk = Desk()
    told = [desk.submit(each) for each in requests]
    desk.finish()
    assert desk.scheduler.slots()[0].activity == "idle" and desk.scheduler.stats().reserved_tokens == 0
    return told


def test_tokens_follow_their_grammar_until_it_is_complete() -> None:
    requests = [restricted(lambda: Rising(3), seed, top_log_probabilities=VOCAB) for seed in range(6)]
    for each, told in zip(requests, answer_all(*requests), strict=True):
        assert told.tokens == sorted(set(told.tokens)) and len(told.tokens) == 3
        assert told.reason == "grammar"
        assert told.answer() == answer_alone(FakeEngine(), each)
        # Log-probabilities are those of the model without its grammar.
        for one in told.answer().log_probabilities:
            assert one is not None and len(one.top) == VOCAB
            assert sum(np.exp(value) for _, value in one.top) == pytest.approx(1)


def test_an_end_token_ends_an_answer_that_its_grammar_lets_end() -> None:
    class MayEnd(Rising):
        def allowed(self) -> np.ndarray | None:
            return np.arange(VOCAB) == END if len(self.tokens) == 2 else np.arange(VOCAB) != END

    ended, ignored = answer_all(restricted(lambda: MayEnd(10), ignore_end=False), restricted(lambda: MayEnd(4)))
    assert (ended.reason, len(ended.tokens), ended.tokens[-1]) == ("eos", 3, END)
    assert (ignored.reason, len(ignored.tokens), ignored.tokens[2]) == ("grammar", 4, END)


@pytest.mark.parametrize("error", [RuntimeError("no such rule"), PanicException("no such rule")])
@pytest.mark.parametrize("where", ["allowed", "accept", "nothing"])
def test_a_grammar_that_fails_ends_its_answer(where: str, error: BaseException) -> None:
    for at in (0, 2):
        others = [restricted(None, 1), restricted(lambda: Rising(5), 2)]
        failing = restricted(lambda at=at: Failing(where, at, error))
        first, broken, last = answer_all(others[0], failing, others[1])
        assert broken.reason == "error" and len(broken.tokens) == at
        expected = f"{type(error).__name__}: no such rule" if where != "nothing" else "no token is left to choose"
        assert broken.end.error.startswith(expected) and "\n" not in broken.end.error
        assert [told.answer() for told in (first, last)] == [answer_alone(FakeEngine(), each) for each in others]


def test_a_grammar_that_cannot_be_made_ends_its_answer_before_the_prompt_is_read() -> None:
    def make() -> Rising:
        raise ValueError("the schema has a hole\nin line 3")

    told = answer_all(restricted(make), restricted(None, 1), restricted(make))
    for number in (0, 2):
        assert told[number].events == [told[number].end]
        assert told[number].end.error == "ValueError: the schema has a hole?in line 3"
    assert told[1].answer() == answer_alone(FakeEngine(), restricted(None, 1))


def test_a_grammar_is_made_once_and_not_before_its_turn() -> None:
    made = list[int]()

    def make(number: int) -> Callable[[], Rising]:
        return lambda: (made.append(number), Rising(4))[1]

    desk = Desk(1)
    told = [desk.submit(restricted(make(number))) for number in range(2)]
    assert made == []
    while not told[0].ended.is_set():
        desk.steps(1)
        assert made == [0]
    desk.finish()
    assert made == [0, 1]


def test_an_interrupt_is_no_failure_of_a_grammar() -> None:
    desk = Desk(1)
    told = desk.submit(restricted(lambda: Failing("allowed", 0, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        desk.steps(1)
    assert not any(isinstance(event, PromptRead | Finished) for event in told.events)
