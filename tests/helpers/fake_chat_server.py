"""A server that speaks the protocol of `picompile serve` and says what a test wants said: for tests of its page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from helpers.serving_process import serving_thread
from picompile_server.http.page import load_page, page


@dataclass(frozen=True)
class Reply:
    """An answer to one request.

    Attributes:
        pieces: the text, token by token.
        delay_s: the pause before each token.
        status, error: an error in place of the stream, if the status is not 200; an error within it, if it is.
        is_cut: whether the stream ends without its last events.
        reasoning: what comes before the text, apart from it.
        shares: the shares of neurons that fired, from the second token on, repeated; None where they are not known.
    """

    pieces: Sequence[str] = ("Hello", ",", " world", ".")
    delay_s: float = 0
    status: int = 200
    error: str = ""
    is_cut: bool = False
    reasoning: str = ""
    shares: Sequence[float | None] = (0.08, 0.12, 0.1)
    prompt_tokens: int = 20
    cached_tokens: int = 0
    finish: str = "stop"


@dataclass
class FakeChatServer:
    """The state of a running server: its next replies, each used once and the last one for ever, and what it was asked.

    Attributes:
        loading: how many requests of /health are answered by 503 before the model is loaded.
        asked: bodies of requests for a chat that had the key, if there is one.
        left: for each stream that its reader left, how many tokens it had got.
    """

    url: str = ""
    replies: list[Reply] = field(default_factory=lambda: [Reply()])
    models: Sequence[str] = ("tiny",)
    key: str = ""
    loading: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def application(self) -> Starlette:
        """Return the ASGI application."""
        paths = {"/": page, "/health": self._health, "/v1/models": self._models}
        routes = [Route(path, endpoint) for path, endpoint in paths.items()]
        app = Starlette(routes=[*routes, Route("/v1/chat/completions", self._chat, methods=["POST"])])
        app.state.page = load_page()
        return app

    async def _health(self, request: Request) -> Response:
        self.loading -= 1
        return JSONResponse({}, 503 if self.loading >= 0 else 200)

    async def _models(self, request: Request) -> Response:
        listed = {"object": "list", "data": [{"id": name} for name in self.models]}
        return self._refusal(request) or JSONResponse(listed)

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self.asked.append(await request.json())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply.status != 200:
            return JSONResponse({"error": {"message": reply.error}} if reply.error else {}, reply.status)
        return StreamingResponse(self._events(reply), media_type="text/event-stream")

    def _refusal(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "wrong key"}}, 401)

    async def _events(self, reply: Reply) -> AsyncIterator[str]:
        told = 0
        try:
            async for event in _stream(reply):
                yield event
                told += '"content"' in event
        # starlette cancels the stream when its reader has left.
        except asyncio.CancelledError:
            self.left.append(told)
            raise


async def _stream(reply: Reply) -> AsyncIterator[str]:
    begin_s, count = time.monotonic(), 0
    # The first token has no share: its step has read the prompt.
    shares = [None, *(reply.shares[place % len(reply.shares)] for place in range(len(reply.pieces) - 1))]

    def event(share: float | None = None, **content: Any) -> str:
        taken_s = time.monotonic() - begin_s
        timings = {"prompt_n": reply.prompt_tokens - reply.cached_tokens, "cache_n": reply.cached_tokens}
        timings |= {"prompt_ms": 5, "predicted_n": count, "predicted_ms": 1000 * taken_s}
        speed = (count - 1) / max(taken_s, 1e-3)
        content["timings"] = {**timings, "predicted_per_second": speed, "fired_share": share}
        return f"data: {json.dumps(content)}\n\n"

    def choice(finish: str | None = None, **delta: str) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "finish_reason": finish}]

    yield ": a comment, as some proxies send to keep a connection\r\n\r\n"
    yield event(choices=choice(role="assistant"))
    if reply.reasoning:
        yield event(choices=choice(reasoning_content=reply.reasoning))
    *pieces, last = reply.pieces
    for count, piece in enumerate(pieces, 1):
        await asyncio.sleep(reply.delay_s)
        yield event(shares[count - 1], choices=choice(content=piece))
    if reply.is_cut:
        return
    if reply.error:
        yield event(error={"message": reply.error})
        return
    # The last text comes with the reason and the mean of all.
    count, known = len(reply.pieces), [share for share in shares if share is not None]
    mean = sum(known) / len(known) if known else None
    yield event(mean, choices=choice(reply.finish, content=last))
    details = {"prompt_tokens_details": {"cached_tokens": reply.cached_tokens}}
    usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": count, **details}
    yield event(mean, choices=[], usage=usage)
    yield "data: [DONE]\n\n"


@contextmanager
def fake_chat_server() -> Iterator[FakeChatServer]:
    """Serve at a free port of this machine until the block ends."""
    fake = FakeChatServer()
    with serving_thread(fake.application()) as url:
        fake.url = f"{url}/"
        yield fake
