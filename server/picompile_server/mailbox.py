"""A mailbox that carries events of answers from the engine's thread to coroutines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from picompile_server.request import Event, Finished, Listener, ServingRequest


class Cancellable(Protocol):
    """An answer as a scheduler returns it."""

    def cancel(self) -> None:
        """End the answer soon. It may be called from any thread, and again."""


Submit = Callable[[ServingRequest, Listener], Cancellable]


class Mailbox:
    """Carries calls from other threads to an event loop, many at a time: to wake a loop up costs a system call.

    A step of the engine makes an event for each running answer. The loop is woken up once for all of them, or for as
    many as come before it has had its turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[[int, Event], None], int, Event]] = deque()
        self._is_awake = False

    def put(self, call: Callable[[int, Event], None], index: int, event: Event) -> None:
        """Have the loop call `call(index, event)`, in order. It returns at once and raises nothing."""
        self._calls.append((call, index, event))
        if not self._is_awake:
            self._is_awake = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits for the event any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Set back first: what is put from here on is either seen below, or wakes the loop up again.
        self._is_awake = False
        while self._calls:
            call, index, event = self._calls.popleft()
            call(index, event)


class Answers:
    """Answers that were asked for together, and their events in the order in which they come. Only for one event loop.

    Close it when its events are not wanted any more: answers that still run are then cancelled.
    """

    def __init__(self, submit: Submit, requests: Sequence[ServingRequest], mailbox: Mailbox) -> None:
        """Ask for answers. Raises what `submit` raises, and then none of them runs."""
        self._events: deque[tuple[int, Event]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._running: dict[int, Cancellable] = {}
        self._finished: set[int] = set()
        try:
            for index, request in enumerate(requests):
                self._running[index] = submit(request, _listener(mailbox, self._arrived, index))
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Whether events are still to come, or to be taken."""
        return bool(self._running or self._events)

    async def batch(self) -> list[tuple[int, Event]]:
        """Return the events that have come since the last call, each with its answer's index.

        It waits for one if there is none, but returns an empty list if `wake` is called meanwhile.
        """
        if not self._events and self._running:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found = list(self._events)
        self._events.clear()
        return found

    def wake(self) -> None:
        """Have a call of `batch` that waits return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, index: int) -> None:
        """End one answer soon; its last event is still to come."""
        if (answer := self._running.get(index)) is not None:
            answer.cancel()

    def close(self) -> None:
        """Cancel all answers that still run."""
        for answer in self._running.values():
            answer.cancel()

    def _arrived(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        if isinstance(event, Finished):
            self._running.pop(index, None)
        self.wake()


def _listener(mailbox: Mailbox, arrived: Callable[[int, Event], None], index: int) -> Listener:
    return lambda event: mailbox.put(arrived, index, event)
