"""Delivery of answers to a client, as server-sent events or collected. Both end when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from picompile_server.http.access_log import log_usage
from picompile_server.http.errors import ApiError, as_api_error, json_response
from picompile_server.mailbox import Answers
from picompile_server.request import Event

# Proxies close a connection on which nothing comes for a minute or less.
PING_S = 15.0
_PING = b": ping\n\n"
# A client that takes nothing for so long has gone, for all that one knows.
STALLED_S = 60.0
DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
_LOG = logging.getLogger(__name__)


def sse(content: Any, name: str | None = None) -> bytes:
    """Return one server-sent event with `content` as JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, to_json(content))


class Writer(Protocol):
    """A writer that turns events of answers into a client's data."""

    def begin(self) -> bytes:
        """Return the data before the first event."""

    def take(self, index: int, event: Event) -> bytes:
        """Return the data for an event of the answer at `index`, often nothing."""

    def end(self) -> bytes:
        """Return the data after the last event."""

    def fail(self, error: ApiError) -> bytes:
        """Return the data for a failed answer; nothing follows."""

    def note(self, index: int, event: Event) -> None:
        """Take an event of an answer that is not streamed."""

    def whole(self) -> Any:
        """Return the reply to a request that is not streamed."""

    def usage(self) -> Mapping[str, Any]:
        """Return the tokens of the answers, as OpenAI's API counts them."""

    def close(self) -> None:
        """Note the end of the answers, whatever the reason."""


async def deliver(
    request: Request, answers: Answers, writer: Writer, is_streamed: bool | None, is_large: bool = False
) -> Response:
    """Return a stream of the answers, or the reply with all of them, which is written on a thread if it `is_large`.

    Raises as `collect` does.
    """
    log_usage(request, writer.usage)
    if is_streamed:
        return EventStream(answers, writer)
    try:
        await collect(request, answers, writer.note)
    finally:
        writer.close()
    return await asyncio.to_thread(lambda: json_response(writer.whole())) if is_large else json_response(writer.whole())


class EventStream(Response):
    """Server-sent events, made by a `Writer`. Those that come at a time are sent at once."""

    def __init__(self, answers: Answers, writer: Writer) -> None:
        super().__init__(None, 200, _HEADERS)
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._answers, self._writer = answers, writer
        self._has_failed = False
        self._writing_s: float | None = None  # since when the client has not taken what is written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until there are no more, or the client has gone."""

        async def write(data: bytes) -> None:
            self._writing_s = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._writing_s = None

        try:
            async with _until_gone(receive, self._answers, self._is_stalled) as is_gone:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await write(self._writer.begin())
                while self._answers.is_running and not is_gone() and not self._has_failed:
                    batch = await self._answers.batch()
                    if data := self._written(batch) if batch else _PING:
                        await write(data)
                last = self._writer.end() if not self._has_failed else b""
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except asyncio.CancelledError:
            if not self._is_stalled():
                raise
            # The response is not complete: the server closes the connection.
        finally:
            self._writer.close()

    def _is_stalled(self) -> bool:
        return self._writing_s is not None and time.monotonic() - self._writing_s > STALLED_S

    def _written(self, batch: list[tuple[int, Event]]) -> bytes:
        """Return the data for some events. If one is an error, the stream ends with it."""
        parts = []
        for index, event in batch:
            if self._has_failed:
                break
            try:
                parts.append(self._writer.take(index, event))
            except Exception as error:
                parts.append(self._writer.fail(_told(error)))
                self._has_failed = True
                self._answers.close()
        return b"".join(parts)


class ClientGoneError(Exception):
    """The client has gone away before it was answered."""


async def collect(request: Request, answers: Answers, take: Callable[[int, Event], object]) -> None:
    """Have `take` called with each event of the answers: its answer's index, and the event.

    Raises:
        ApiError: an answer has failed.
        ClientGoneError: nobody waits any more.
    """
    async with _until_gone(request.receive, answers) as is_gone:
        while answers.is_running:
            batch = await answers.batch()
            if is_gone():
                raise ClientGoneError
            for index, event in batch:
                take(index, event)


@asynccontextmanager
async def _until_gone(
    receive: Receive, answers: Answers, is_stalled: Callable[[], bool] = lambda: False
) -> AsyncIterator[Callable[[], bool]]:
    """Cancel the answers when the client goes away, or the block ends. Yield whether the client has gone.

    Meanwhile, wake the answers up every 15 s, and cancel the task that runs the block if it `is_stalled`.
    """
    has_gone, task_of_block = False, asyncio.current_task()

    async def watch() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        has_gone = True
        answers.close()
        answers.wake()

    async def tick() -> None:
        while True:
            await asyncio.sleep(PING_S)
            answers.wake()
            if is_stalled() and task_of_block is not None:
                task_of_block.cancel()

    tasks = [asyncio.ensure_future(watch()), asyncio.ensure_future(tick())]
    try:
        yield lambda: has_gone
    finally:
        for task in tasks:
            task.cancel()
        answers.close()


def _told(error: Exception) -> ApiError:
    """Return the client's error. An unexpected error goes to the log as well."""
    told = as_api_error(error)
    if told.code == "internal_error":
        _LOG.error("an answer failed", exc_info=error)
    return told
