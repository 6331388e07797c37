"""The scheduler with its own thread: requests and cancellations from many others, and events for coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.fake_engine import FakeEngine, Told, answer_alone
from picompile_runtime import SamplingParams
from picompile_server.mailbox import Answers, Mailbox
from picompile_server.request import AnswerTimes, Event, Finished, Listener, ServingRequest, TokenChosen
from picompile_server.scheduler import ClosedError, Scheduler, SchedulerOptions

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


# Events on their way from threads to coroutines.


END = Finished("eos", AnswerTimes(0, 0, 0, 0))
REQUEST = ServingRequest([1])


def started(count: int) -> tuple[Answers, list[Listener]]:
    """Answers, and their listeners, which a test tells what it wants."""
    listeners = list[Listener]()
    mailbox = Mailbox(asyncio.get_running_loop())
    answers = Answers(lambda request, listener: listeners.append(listener), [REQUEST] * count, mailbox)  # type: ignore[arg-type]
    return answers, listeners


def test_events_of_threads_come_in_order() -> None:
    tokens = [TokenChosen(number) for number in range(2000)]

    def tell(listener: Listener) -> None:
        for event in [*tokens, END]:
            listener(event)

    async def run() -> list[tuple[int, Event]]:
        found, (answers, listeners) = list[tuple[int, Event]](), started(3)
        with ThreadPoolExecutor(3) as pool:
            pool.map(tell, listeners)
            while answers.is_running:
                found += await answers.batch()
        return found

    found = asyncio.run(run())
    for index in range(3):
        assert [event for place, event in found if place == index] == [*tokens, END]


def test_what_has_come_is_one_batch() -> None:
    async def run() -> list[Sequence[tuple[int, Event]]]:
        answers, listeners = started(2)
        asyncio.get_running_loop().call_soon(answers.wake)  # a batch that waits can be woken up
        batches = [await answers.batch()]
        for listener in listeners:
            listener(TokenChosen(1))
            listener(END)
        return [*batches, await answers.batch()]

    assert asyncio.run(run()) == [[], [(0, TokenChosen(1)), (0, END), (1, TokenChosen(1)), (1, END)]]
