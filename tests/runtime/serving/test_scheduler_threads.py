"""The scheduler with its own thread: requests, cancellations and questions from many others."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.fake_engine import FakeEngine, Told, answer_alone
from picompile_runtime import SamplingParams
from picompile_runtime.serving.request import Event, Finished, ServingRequest, TokenChosen
from picompile_runtime.serving.scheduler import ClosedError, Scheduler, SchedulerOptions

PATIENCE_S = 60


def request(number: int) -> ServingRequest:
    prompt = [1 + (number * step) % 37 for step in range(1, 2 + number % 30)]
    return ServingRequest(prompt, SamplingParams(seed=number), 1 + number % 23, top_log_probabilities=number % 3)


def test_answers_to_many_threads_are_those_of_each_alone() -> None:
    """Every second thread cancels some of its answers, which leaves the others as they are."""
    scheduler = Scheduler(FakeEngine(4))  # type: ignore[arg-type]
    told = [Told() for _ in range(80)]

    def work(thread: int) -> None:
        for number in range(thread, 80, 8):
            answer = scheduler.submit(request(number), told[number])
            if thread % 2 and number % 3:
                answer.cancel()
            elif number % 3 == 0:
                assert told[number].ended.wait(PATIENCE_S)
            assert sum(slot.request is not None for slot in scheduler.slots()) <= 4
            assert scheduler.stats().waiting <= 80

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8), timeout=PATIENCE_S))
    scheduler.close()
    for number, each in enumerate(told):
        expected = answer_alone(FakeEngine(), request(number))
        if each.reason == "cancelled":
            assert number % 2 == 1 and number % 3 and each.is_beginning_of(expected)
        else:
            assert each.answer() == expected
    stats = scheduler.stats()
    assert (sum(stats.finished.values()), stats.reserved_tokens, stats.waiting) == (80, 0, 0)


def test_a_sleeping_scheduler_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, asleep = list[int](), threading.Event()

    class Watched(Scheduler):
        def step(self) -> bool:
            turns.append(1)
            done = super().step()
            if not done:
                asleep.set()
            return done

    scheduler, told = Watched(FakeEngine()), Told()  # type: ignore[arg-type]
    assert asleep.wait(PATIENCE_S)
    assert len(turns) == 1
    asleep.clear()
    scheduler.submit(request(5), told)
    assert asleep.wait(PATIENCE_S)
    count = len(turns)
    scheduler.stats()
    assert len(turns) == count
    scheduler.close()


@pytest.mark.parametrize("drain", [True, False])
def test_closing_from_another_thread_returns_when_all_have_ended(drain: bool) -> None:
    scheduler = Scheduler(FakeEngine(2))  # type: ignore[arg-type]
    told, started = [Told() for _ in range(10)], threading.Event()

    def first(event: Event) -> None:
        told[0](event)
        started.set()

    for number, each in enumerate(told):
        scheduler.submit(request(number), each if number else first)
    assert started.wait(PATIENCE_S)
    scheduler.close(drain)
    assert all(each.ended.is_set() for each in told)
    assert drain <= all(each.reason != "cancelled" for each in told)
    with pytest.raises(ClosedError):
        scheduler.submit(request(1), Told())


def test_a_listener_may_close_its_scheduler() -> None:
    scheduler, events = Scheduler(FakeEngine(1)), list[Event]()  # type: ignore[arg-type]
    second, refused = Told(), list[str]()

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, TokenChosen) and not refused:
            scheduler.close(drain=False)
            try:
                scheduler.submit(request(3), Told())
            except ClosedError as error:
                refused.append(str(error))

    scheduler.submit(request(22), listener)
    scheduler.submit(request(4), second)
    assert second.ended.wait(PATIENCE_S)
    scheduler.close()
    assert len(refused) == 1 and isinstance(events[-1], Finished)
    assert (events[-1].reason, second.reason) == ("cancelled", "cancelled")


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit, RuntimeError])
def test_listeners_and_engines_that_fail_do_not_end_the_thread(kind: type[BaseException]) -> None:
    engine = FakeEngine(2)
    scheduler = Scheduler(engine, SchedulerOptions(reread=False))  # type: ignore[arg-type]

    def fails(event: Event) -> None:
        raise kind

    for number in range(6):
        scheduler.submit(request(number), fails)
    told, broken, whole = Told(), Told(), Told()
    scheduler.submit(request(20), told)
    assert told.ended.wait(PATIENCE_S)
    engine.failures = 1
    scheduler.submit(request(21), broken)
    assert broken.ended.wait(PATIENCE_S)
    scheduler.submit(request(22), whole)
    scheduler.close()
    assert broken.reason == "error"
    assert told.answer() == answer_alone(FakeEngine(), request(20))
    assert whole.answer() == answer_alone(FakeEngine(), request(22))
