"""The scheduler on an engine without kernels: what is read when, who waits, and that answers are as if alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.fake_engine import CHUNK, CONTEXT, END, NEURONS, VOCAB, FakeEngine, answer_alone
from helpers.speculation import WrongDrafts
from helpers.told_answers import Told
from picompile_runtime import RequestError, SamplingParams
from picompile_runtime.serving.request import Event, Finished, PromptRead, ServingRequest, TokenChosen
from picompile_runtime.serving.scheduler import ClosedError, QueueFullError, Scheduler, SchedulerOptions

# Long enough to be worth a copy, with a part of a chunk at the end.
SYSTEM = [2 + number % 30 for number in range(3 * CHUNK + 3)]


def make(engine: FakeEngine, **options: Any) -> Scheduler:
    return Scheduler(engine, SchedulerOptions(**options), start=False)  # type: ignore[arg-type]


def finish(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


def request(prompt: list[int], max_tokens: int | None = 5, seed: int = 0, **options: Any) -> ServingRequest:
    """A request whose answer the model does not end."""
    return ServingRequest(prompt, SamplingParams(seed=seed), max_tokens, **{"ignore_end": True, **options})


def ask(scheduler: Scheduler, *args: Any, **options: Any) -> Told:
    told = Told()
    scheduler.submit(request(*args, **options), told)
    return told


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


@pytest.mark.parametrize("sequences", [1, 2, 4, 9])
def test_answers_are_those_of_each_request_alone(sequences: int) -> None:
    engine = FakeEngine(sequences)
    scheduler = make(engine)
    told = [Told() for _ in REQUESTS]
    for each, listener in zip(REQUESTS, told, strict=True):
        scheduler.submit(each, listener)
    finish(scheduler)
    for each, listener in zip(REQUESTS, told, strict=True):
        assert listener.answer() == answer_alone(FakeEngine(), each)
    assert {slot.activity for slot in scheduler.slots()} == {"idle"}


@pytest.mark.parametrize("sequences", [1, 3])
def test_answers_with_drafts_are_those_without(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer alone has its tokens drafted, among others none; wrong drafts leave nothing behind."""
    alone = [answer_alone(FakeEngine(), each) for each in REQUESTS]
    texts = [[*each.prompt, *answer.tokens] for each, answer in zip(REQUESTS, alone, strict=True)]
    drafts = WrongDrafts(*texts, seed=sequences)
    drafts.install(monkeypatch)
    engine = FakeEngine(sequences)
    scheduler = make(engine, draft="ngram")
    told = [Told() for _ in REQUESTS]
    for each, listener in zip(REQUESTS, told, strict=True):
        scheduler.submit(each, listener)
    finish(scheduler)
    assert [listener.answer() for listener in told] == alone
    assert drafts.drafted > 10 and any(call.name == "each" for call in engine.calls)
    stats = scheduler.stats()
    assert stats.decoded_tokens == sum(max(len(each.tokens) - 1, 0) for each in alone)
    assert stats.drafted_tokens == drafts.drafted > stats.accepted_tokens > 0
    if sequences == 1:  # the last draft of an answer may be right, and is not read behind
        assert 0 <= stats.accepted_tokens - (stats.decoded_tokens - stats.decode_steps) <= len(alone)
    with pytest.raises(RequestError, match="draft must be ngram or none, not 'x'"):
        SchedulerOptions(draft="x")


def test_a_long_prompt_delays_the_others_by_one_chunk() -> None:
    engine = FakeEngine()
    scheduler = make(engine)
    first = ask(scheduler, [5], 40)
    scheduler.step()
    ask(scheduler, SYSTEM, 1)
    ask(scheduler, [3] * 2 * CHUNK, 1)
    finish(scheduler)
    names = [call.name for call in engine.steps()]
    assert names[:2] == ["last", "decode"]
    # Four chunks of one prompt, the next prompt's two behind it, and a token of the first answer after each.
    chunks = ["chunk", "chunk", "chunk", "last", "chunk", "last"]
    assert names[2:14] == [name for chunk in chunks for name in (chunk, "decode")]
    assert len(first.tokens) == 40


def test_all_answers_share_a_step() -> None:
    engine = FakeEngine(3)
    scheduler = make(engine)
    for seed in range(3):
        ask(scheduler, [5 + seed], 10, seed)
    finish(scheduler)
    assert [call.slots for call in engine.steps() if len(call.slots) == 3] == [(0, 1, 2)] * 7
    assert scheduler.stats().decoded_tokens == 27


def test_requests_are_admitted_in_their_order() -> None:
    engine = FakeEngine(2)
    scheduler, order = make(engine), list[int]()

    def listener(number: int) -> Any:
        return lambda event: order.append(number) if isinstance(event, PromptRead) else None

    for number in range(6):
        scheduler.submit(request([3] * (20 - 3 * number), 2 + number % 3), listener(number))
    finish(scheduler)
    assert order == list(range(6))


def test_a_prompt_without_an_answer_is_read_without_scores() -> None:
    engine = FakeEngine()
    scheduler = make(engine)
    told = ask(scheduler, SYSTEM, 0)
    finish(scheduler)
    assert [type(event) for event in told.events] == [PromptRead, Finished]
    assert told.reason == "max_tokens"
    assert [call.name for call in engine.steps()] == ["chunk"] * 4


def test_why_answers_end() -> None:
    engine = FakeEngine()
    scheduler = make(engine)
    forced = SamplingParams(logit_bias={END: 100})
    ended, ignored = Told(), Told()
    scheduler.submit(ServingRequest([4], forced, 10), ended)
    scheduler.submit(ServingRequest([4], forced, 10, ignore_end=True), ignored)
    full = ask(scheduler, SYSTEM, None)
    finish(scheduler)
    assert (ended.tokens, ended.reason) == ([END], "eos")
    assert (ignored.tokens, ignored.reason) == ([END] * 10, "max_tokens")
    assert (len(full.tokens), full.reason) == (CONTEXT - len(SYSTEM) + 1, "context")
    assert scheduler.stats().finished == {
        "eos": 1, "max_tokens": 1, "context": 1, "grammar": 0, "cancelled": 0, "error": 0,
    }  # fmt: skip


def test_times_are_in_order() -> None:
    scheduler = make(FakeEngine(1))
    ended, waiting = ask(scheduler, [5]), Told()
    answer = scheduler.submit(request([6]), waiting)
    answer.cancel()
    finish(scheduler)
    times = ended.end.times
    assert times.submitted_s <= times.admitted_s <= times.first_token_s <= times.finished_s
    assert times.first_token_s < times.finished_s
    times = waiting.end.times
    assert times.submitted_s < times.admitted_s == times.first_token_s == times.finished_s


def test_a_first_token_is_told_before_the_others_get_theirs() -> None:
    engine = FakeEngine()
    scheduler, steps = make(engine), list[str]()
    ask(scheduler, [5], 20)
    scheduler.step()
    scheduler.submit(request([6], 3), lambda event: steps.append(engine.steps()[-1].name))
    finish(scheduler)
    assert steps == ["last", "last", "decode", "decode", "decode"]


# Cancellation.


def test_a_cancelled_answer_ends_within_a_step() -> None:
    engine = FakeEngine(2)
    scheduler = make(engine)
    told = [Told() for _ in range(4)]
    prompts = [[5], SYSTEM, [6], [7]]
    answers = [scheduler.submit(request(p, 30), t) for p, t in zip(prompts, told, strict=True)]
    scheduler.step()
    scheduler.step()
    assert [slot.activity for slot in scheduler.slots()] == ["decoding", "reading"]
    answers[2].cancel()  # waits
    scheduler.step()
    assert told[2].events == [told[2].end] and told[2].reason == "cancelled"
    answers[1].cancel()  # is being read
    scheduler.step()
    assert told[1].events == [told[1].end] and told[1].reason == "cancelled"
    assert [slot.request for slot in scheduler.slots()] == [1, 4]
    count = len(told[0].tokens)
    answers[0].cancel()  # is being generated
    answers[0].cancel()
    scheduler.step()
    assert len(told[0].tokens) == count and told[0].reason == "cancelled"
    finish(scheduler)
    answers[3].cancel()  # has ended
    assert not scheduler.step()
    assert told[3].answer() == answer_alone(FakeEngine(), request([7], 30))
    assert scheduler.stats().finished["cancelled"] == 3


def test_a_listener_may_cancel_its_answer() -> None:
    engine = FakeEngine(2)
    scheduler, events = make(engine), list[Event]()

    def listener(event: Event) -> None:
        events.append(event)
        if len(events) == 4:
            answer.cancel()

    answer = scheduler.submit(request([5], 30), listener)
    other = ask(scheduler, [6], 10)
    finish(scheduler)
    assert [type(event) for event in events] == [PromptRead, *[TokenChosen] * 3, Finished]
    assert len(other.tokens) == 10


def test_a_listener_may_submit() -> None:
    scheduler, second = make(FakeEngine(1)), Told()

    def listener(event: Event) -> None:
        if isinstance(event, Finished):
            scheduler.submit(request([9], 3), second)

    scheduler.submit(request([5], 2), listener)
    finish(scheduler)
    assert second.answer() == answer_alone(FakeEngine(), request([9], 3))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_answer_whose_listener_fails_is_dropped(at: int) -> None:
    """Also when it fails at the first event, which comes before the first token."""
    engine = FakeEngine(2)
    scheduler, events = make(engine), list[Event]()

    def listener(event: Event) -> None:
        events.append(event)
        if len(events) == at + 1:
            raise RuntimeError("the client has gone")

    scheduler.submit(request([5], 20), listener)
    other = ask(scheduler, [6], 10)
    finish(scheduler)
    assert len(events) == at + 1
    assert other.answer() == answer_alone(FakeEngine(), request([6], 10))
    stats = scheduler.stats()
    assert (stats.finished["cancelled"], stats.finished["max_tokens"], stats.reserved_tokens) == (1, 1, 0)


def test_a_listener_that_fails_at_the_end_changes_nothing() -> None:
    scheduler = make(FakeEngine(1))

    def listener(event: Event) -> None:
        if isinstance(event, Finished):
            raise RuntimeError

    scheduler.submit(request([5], 2), listener)
    finish(scheduler)
    assert scheduler.stats().finished["max_tokens"] == 1
    assert scheduler.stats().finished["cancelled"] == 0


def test_a_cancellation_counts_before_the_step_that_follows() -> None:
    """Also one that comes while a chunk of another prompt is read."""
    engine = FakeEngine(2)
    scheduler, first = make(engine), Told()
    answer = scheduler.submit(request([5], 20), first)
    scheduler.step()
    scheduler.submit(request([6], 4), lambda event: answer.cancel())
    count = len(first.tokens)
    scheduler.step()
    assert first.reason == "cancelled" and len(first.tokens) == count
    assert [call.slots for call in engine.steps()[-2:]] == [(1,), (1,)]


# The queue.


def test_the_queue_is_bounded() -> None:
    scheduler = make(FakeEngine(2), max_waiting=1)
    told = [ask(scheduler, [5 + number], 3) for number in range(3)]  # two for the slots, one that waits
    with pytest.raises(QueueFullError, match="3 requests are waiting already; try again later"):
        ask(scheduler, [9])
    scheduler.step()
    with pytest.raises(QueueFullError):  # one has a slot, another may have the other
        ask(scheduler, [9])
    finish(scheduler)
    told.append(ask(scheduler, [9], 3))
    finish(scheduler)
    assert [len(each.tokens) for each in told] == [3] * 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (request([]), "there are no tokens to read"),
        (request([VOCAB]), f"tokens must be integers from 0 to {VOCAB - 1}"),
        (request([1] * (CONTEXT + 1)), f"a prompt of {CONTEXT + 1} tokens does not fit the context of {CONTEXT}"),
        (request([1] * CONTEXT, 1), "leaves no room for an answer in the context of 96; shorten it"),
        (request([1] * CONTEXT, None), "leaves no room for an answer"),
        (request([1], -1), "max_tokens must be 0 or more, not -1"),
        (request([1], 1.5), "max_tokens must be 0 or more, not 1.5"),  # type: ignore[arg-type]
        (request([1], top_log_probabilities=VOCAB + 1), "top_log_probabilities must be a whole number from 0 to 40"),
        (request([1], with_prompt=True), "log-probabilities of the prompt need top_log_probabilities"),
        (ServingRequest([1], SamplingParams(logit_bias={VOCAB: 1})), "logit_bias has token 40"),
        (ServingRequest([1], "greedy"), "a sampler takes SamplingParams, not 'greedy'"),  # type: ignore[arg-type]
        ("hello", "a scheduler takes a ServingRequest, not 'hello'"),
    ],
)
def test_requests_that_make_no_sense_are_refused_at_once(given: Any, text: str) -> None:
    engine = FakeEngine()
    scheduler = make(engine)
    with pytest.raises(RequestError, match=text):
        scheduler.submit(given, Told())
    assert not scheduler.step() and not engine.calls
    assert scheduler.stats().waiting == 0


def test_a_prompt_as_long_as_the_context_can_be_read() -> None:
    scheduler = make(FakeEngine())
    told = ask(scheduler, [3] * CONTEXT, 0, top_log_probabilities=0, with_prompt=True)
    last = ask(scheduler, [3] * (CONTEXT - 1), None)
    finish(scheduler)
    assert told.answer() == answer_alone(
        FakeEngine(), request([3] * CONTEXT, 0, top_log_probabilities=0, with_prompt=True)
    )
    assert len(last.tokens) == 2 and last.reason == "context"


def test_options_that_make_no_sense_raise() -> None:
    for options in ({"max_waiting": -1}, {"max_waiting": 1.5}, {"kv_tokens": 0}):
        with pytest.raises(RequestError, match=" must be "):
            SchedulerOptions(**options)  # type: ignore[arg-type]


def test_closing_finishes_what_runs_and_waits() -> None:
    scheduler = make(FakeEngine(1))
    told = [ask(scheduler, [5 + number], 4) for number in range(3)]
    scheduler.step()
    scheduler.close()
    assert [each.reason for each in told] == ["max_tokens"] * 3
    with pytest.raises(ClosedError, match="takes no requests any more"):
        ask(scheduler, [5])
    scheduler.close(drain=False)


def test_a_closed_scheduler_reads_nothing_again() -> None:
    engine = FakeEngine(1)
    scheduler = make(engine)
    ask(scheduler, SYSTEM, 30)
    scheduler.close()
    assert scheduler.stats().reread_tokens == 0
    assert engine.steps()[-1].name == "decode"


def test_closing_at_once_cancels_what_runs_and_waits() -> None:
    scheduler = make(FakeEngine(2))
    told = [ask(scheduler, [5 + number], 4) for number in range(4)]
    scheduler.step()
    scheduler.step()
    scheduler.close(drain=False)
    assert [each.reason for each in told] == ["cancelled"] * 4
    assert [len(each.tokens) for each in told] == [3, 2, 0, 0]
    assert scheduler.stats().reserved_tokens == 0


# Failures.


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_kernel_that_fails_ends_what_runs_and_nothing_else(steps: int) -> None:
    engine = FakeEngine(2)
    scheduler = make(engine)
    told = [ask(scheduler, SYSTEM[: 3 + 9 * number], 8, number) for number in range(4)]
    for _ in range(steps):
        scheduler.step()
    running = [slot.request for slot in scheduler.slots() if slot.request is not None]
    engine.failures = 1
    scheduler.step()
    failed = [number for number, each in enumerate(told, 1) if each.events and each.ended.is_set()]
    assert set(running) <= set(failed) and len(failed) <= 2
    assert {(told[number - 1].reason, told[number - 1].end.error) for number in failed} == {
        ("error", "the kernel broke")
    }
    finish(scheduler)
    for number, each in enumerate(told, 1):
        if number not in failed:
            assert each.answer() == answer_alone(FakeEngine(), request(SYSTEM[: 3 + 9 * (number - 1)], 8, number - 1))
    # What the cache held then is not reused.
    again = ask(scheduler, SYSTEM, 4)
    finish(scheduler)
    assert again.answer() == answer_alone(FakeEngine(), request(SYSTEM, 4))


def test_a_kernel_that_fails_while_nothing_runs_harms_nobody() -> None:
    engine = FakeEngine(1)
    scheduler = make(engine)
    ask(scheduler, SYSTEM, 30)
    while scheduler.stats().finished["max_tokens"] == 0:
        scheduler.step()
    engine.failures = 1
    assert scheduler.step()  # reads the answer again
    assert not scheduler.step()
    assert scheduler.stats().held_tokens == 0
    told = ask(scheduler, SYSTEM, 4)
    finish(scheduler)
    assert told.answer() == answer_alone(FakeEngine(), request(SYSTEM, 4))


@pytest.mark.parametrize("with_prompt", [True, False])
def test_scores_that_are_no_numbers_end_their_own_answer(with_prompt: bool) -> None:
    class Overflowing(FakeEngine):
        """Has no scores behind token 33."""

        def _logits(self, slot: int) -> np.ndarray:
            overflows = 33 in [token for token, _ in self.caches[slot]]
            return np.full(self.vocab, np.nan, np.float32) if overflows else super()._logits(slot)

    engine = Overflowing(3)
    scheduler = make(engine)
    whole = ask(scheduler, [5], 12)
    options = {"top_log_probabilities": 1, "with_prompt": True} if with_prompt else {}
    broken = ask(scheduler, [33, *SYSTEM], 12, **options)
    other = ask(scheduler, [6], 12, 2)
    finish(scheduler)
    assert broken.reason == "error" and "logits contain NaN" in broken.end.error
    assert [type(event) for event in broken.events] == ([] if with_prompt else [PromptRead]) + [Finished]
    assert whole.answer() == answer_alone(FakeEngine(), request([5], 12))
    assert other.answer() == answer_alone(FakeEngine(), request([6], 12, 2))
    assert scheduler.stats().reserved_tokens == 0
    # Its slot is not reused.
    again = ask(scheduler, [33, *SYSTEM], 0)
    finish(scheduler)
    assert again.prompt.cached_tokens == 0


def test_an_engine_that_stays_broken_ends_each_request() -> None:
    engine = FakeEngine(2)
    scheduler = make(engine)
    engine.failures = 10**6
    told = [ask(scheduler, [5 + number], 4) for number in range(5)]
    finish(scheduler)
    assert [each.reason for each in told] == ["error"] * 5


# Numbers.


def test_the_share_of_neurons_that_fire_is_told_with_each_token() -> None:
    scheduler = make(FakeEngine())
    told = ask(scheduler, [5], 4)
    finish(scheduler)
    shares = [event.fired_share for event in told.events if isinstance(event, TokenChosen)]
    assert shares == [None, 0.2, 0.2, 0.2]
    assert scheduler.stats().fired_share == 0.2


def test_an_accelerator_is_asked_for_its_counters_once_in_sixteen_steps() -> None:
    engine = FakeEngine()
    engine.artifact.program.has_accelerator = True
    scheduler = make(engine)
    told = ask(scheduler, [5], 40)
    finish(scheduler)
    shares = [event.fired_share for event in told.events if isinstance(event, TokenChosen)]
    assert [number for number, share in enumerate(shares) if share is not None] == [16, 32]


def test_neurons_that_are_not_counted_have_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    counted = {"neurons": 0}

    def totals(function: str) -> tuple[int, int, int]:
        if function == "decode":
            raise RequestError("neurons of 'decode' are not counted")
        counted["neurons"] += NEURONS
        return 0, 0, counted["neurons"]

    monkeypatch.setattr(engine, "firing_totals", totals)
    scheduler = make(engine)
    told = ask(scheduler, [5], 4)
    finish(scheduler)
    assert {event.fired_share for event in told.events if isinstance(event, TokenChosen)} == {None}
    assert scheduler.stats().fired_share is None


def test_counts_and_states() -> None:
    scheduler = make(FakeEngine(2), reread=False)
    told = [ask(scheduler, SYSTEM, 6, number) for number in range(3)]
    stats = scheduler.stats()
    assert (stats.waiting, stats.reading, stats.decoding, stats.reserved_tokens) == (3, 0, 0, 0)
    for _ in range(5):
        scheduler.step()
    stats, slots = scheduler.stats(), scheduler.slots()
    assert (stats.waiting, stats.reading, stats.decoding) == (1, 0, 2)
    assert [(slot.slot, slot.activity, slot.request) for slot in slots] == [(0, "decoding", 1), (1, "decoding", 2)]
    assert stats.held_tokens == sum(slot.tokens for slot in slots) == 2 * len(SYSTEM) + 3
    assert stats.reserved_tokens == 2 * (len(SYSTEM) + 6)
    finish(scheduler)
    stats = scheduler.stats()
    assert stats.prompt_tokens == 3 * len(SYSTEM)
    assert stats.cached_tokens == 2 * (len(SYSTEM) - 1) == sum(each.prompt.cached_tokens for each in told)
    assert (stats.generated_tokens, stats.decoded_tokens, stats.prompt_steps) == (18, 15, 6)
    assert 0 < stats.decode_steps <= 15 and stats.decode_s > 0 and stats.prompt_s > 0
    assert stats.capacity_tokens == 2 * CONTEXT
    assert (stats.waiting, stats.reading, stats.decoding, stats.reserved_tokens) == (0, 0, 0, 0)


def test_scores_are_taken_before_the_next_step() -> None:
    """The engine's memory is overwritten by then; the fake one writes NaN there."""
    scheduler = make(FakeEngine(4))
    told = [ask(scheduler, SYSTEM, 6, number, top_log_probabilities=2, with_prompt=True) for number in range(4)]
    finish(scheduler)
    values = [event.log_probability for each in told for event in each.events if isinstance(event, TokenChosen)]
    assert not any(value is None or np.isnan(value.log_probability) for value in values)
