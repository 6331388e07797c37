from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

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

    def submit(self, request: ServingRequest, listener: Listener) -> Any:
        if len(self.listeners) == self.most:
            raise RuntimeError("no more")
        self.listeners.append(listener)
        return SimpleNamespace(cancel=partial(self.cancelled.append, len(self.listeners) - 1))


def started(engine: Engine, count: int) -> Answers:
    return Answers(engine.submit, [REQUEST] * count, Mailbox(asyncio.get_running_loop()))


def test_events_of_threads_come_in_order() -> None:
    tokens = [TokenChosen(number) for number in range(2000)]

    def tell(listener: Listener) -> None:
        for event in [*tokens, END]:
            listener(event)

    async def run() -> list[tuple[int, Event]]:
        engine, found = Engine(), list[tuple[int, Event]]()
        answers = started(engine, 3)
        with ThreadPoolExecutor(3) as pool:
            pool.map(tell, engine.listeners)
            while answers.is_running:
                found += await answers.batch()
        return found

    found = asyncio.run(run())
    for index in range(3):
        assert [event for place, event in found if place == index] == [*tokens, END]


def test_what_has_come_is_one_batch() -> None:
    async def run() -> list[Sequence[tuple[int, Event]]]:
        engine = Engine()
        answers = started(engine, 2)
        asyncio.get_running_loop().call_soon(answers.wake)  # a batch that waits can be woken up
        batches = [await answers.batch()]
        for listener in engine.listeners:
            listener(TokenChosen(1))
            listener(END)
        return [*batches, await answers.batch()]

    assert asyncio.run(run()) == [[], [(0, TokenChosen(1)), (0, END), (1, TokenChosen(1)), (1, END)]]


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
    engine.listeners[0](END)  # dropped: the loop has ended
