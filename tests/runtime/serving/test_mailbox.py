from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from picompile_runtime.serving.mailbox import Answers, Mailbox
from picompile_runtime.serving.request import AnswerTimes, Event, Finished, Listener, ServingRequest, TokenChosen

END = Finished("eos", AnswerTimes(0, 0, 0, 0))
REQUEST = ServingRequest([1])


class Engine:
    """Takes requests; a test tells their listeners what it wants."""

    def __init__(self, most: int = 9) -> None:
        self.listeners: list[Listener] = []
        self.cancelled: list[int] = []
        self.most = most

    def submit(self, request: ServingRequest, listener: Listener) -> Engine.Answer:
        if len(self.listeners) == self.most:
            raise RuntimeError("no more")
        self.listeners.append(listener)
        return Engine.Answer(self, len(self.listeners) - 1)

    class Answer:
        def __init__(self, engine: Engine, number: int) -> None:
            self.engine, self.number = engine, number

        def cancel(self) -> None:
            self.engine.cancelled.append(self.number)


def started(engine: Engine, count: int) -> Answers:
    return Answers(engine.submit, [REQUEST] * count, Mailbox(asyncio.get_running_loop()))


async def all_events(answers: Answers) -> list[tuple[int, Event]]:
    events: list[tuple[int, Event]] = []
    while answers.is_running:
        events += await answers.batch()
    return events


def test_events_of_threads_come_in_order() -> None:
    tokens = [TokenChosen(number) for number in range(2000)]

    def tell(listener: Listener) -> None:
        for event in [*tokens, END]:
            listener(event)

    async def run() -> list[tuple[int, Event]]:
        engine = Engine()
        answers = started(engine, 3)
        threads = [threading.Thread(target=tell, args=(listener,)) for listener in engine.listeners]
        for thread in threads:
            thread.start()
        found = await all_events(answers)
        for thread in threads:
            thread.join()
        return found

    found = asyncio.run(run())
    for index in range(3):
        assert [event for place, event in found if place == index] == [*tokens, END]


def test_what_has_come_is_one_batch() -> None:
    async def run() -> Sequence[tuple[int, Event]]:
        engine = Engine()
        answers = started(engine, 2)
        for listener in engine.listeners:
            listener(TokenChosen(1))
            listener(END)
        return await answers.batch()

    assert asyncio.run(run()) == [(0, TokenChosen(1)), (0, END), (1, TokenChosen(1)), (1, END)]


def test_a_batch_that_waits_can_be_woken_up() -> None:
    async def run() -> Sequence[tuple[int, Event]]:
        answers = started(Engine(), 1)
        asyncio.get_running_loop().call_soon(answers.wake)
        return await answers.batch()

    assert asyncio.run(run()) == []


def test_closing_cancels_what_still_runs() -> None:
    async def run() -> list[int]:
        engine = Engine()
        answers = started(engine, 3)
        engine.listeners[1](END)
        await answers.batch()
        answers.cancel(1)
        answers.cancel(2)
        answers.close()
        return engine.cancelled

    assert asyncio.run(run()) == [2, 0, 2]


def test_nothing_runs_if_one_request_is_refused() -> None:
    async def run(engine: Engine) -> None:
        started(engine, 3)

    engine = Engine(most=2)
    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(run(engine))
    assert engine.cancelled == [0, 1]


def test_events_behind_the_end_of_the_loop_are_dropped() -> None:
    async def run(engine: Engine) -> None:
        started(engine, 1)

    engine = Engine()
    asyncio.run(run(engine))
    engine.listeners[0](END)
