"""A server that speaks the protocol of `picompile serve` and says what a test wants said: for tests of its page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from helpers.support import ROOT

PAGE = ROOT / "runtime/picompile_runtime/serving/http/page.html"


@dataclass(frozen=True)
class Reply:
    """An answer to one request.

    Attributes:
        pieces: the text, token by token.
        delay_s: the pause before each token.
        status, error: an error in place of the stream, if the status is not 200; an error within it, if it is.
        is_cut: whether the stream ends without its last events.
        shares: the shares of neurons that fired, from the second token on, repeated; None where they are not known.
    """

    pieces: Sequence[str] = ("Hello", ",", " world", ".")
    delay_s: float = 0
    status: int = 200
    error: str = ""
    is_cut: bool = False
    shares: Sequence[float | None] | None = (0.08, 0.12, 0.1)
    prompt_tokens: int = 20
    cached_tokens: int = 0
    finish: str = "stop"


def content_security_policy(page: str) -> str:
    """Return the policy that allows the page's own style and script, and nothing else."""
    hashes = {
        tag: [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        ]
        for tag in ("style", "script")
    }
    assert all(len(found) == 1 for found in hashes.values())
    return (
        f"default-src 'none'; style-src {hashes['style'][0]}; script-src {hashes['script'][0]}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


@dataclass
class FakeChatServer:
    """The state of a running server: its next replies, each used once and the last one for ever, and what it was asked.

    Attributes:
        loading: how many requests of /health are answered by 503 before the model is loaded.
        asked: bodies of requests for a chat that had the key, if there is one.
        left: for each stream that its reader left, how many tokens it had got.
        stop: ends the server.
    """

    url: str = ""
    replies: list[Reply] = field(default_factory=lambda: [Reply()])
    models: Sequence[str] = ("tiny",)
    key: str = ""
    loading: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    def application(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _page(self, request: Request) -> Response:
        page = PAGE.read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"content-security-policy": content_security_policy(page)})

    async def _health(self, request: Request) -> Response:
        self.loading -= 1
        return JSONResponse({}, 503 if self.loading >= 0 else 200)

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(
            {"object": "list", "data": [{"id": name} for name in self.models]}
        )

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self.asked.append(await request.json())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply.status != 200:
            content = {"error": {"message": reply.error}} if reply.error else {}
            return JSONResponse(content, reply.status)
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
    begin_s = time.monotonic()
    yield ": a comment, as some proxies send to keep a connection\r\n\r\n"
    yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
    *pieces, last = reply.pieces
    for count, piece in enumerate(pieces, 1):
        await asyncio.sleep(reply.delay_s)
        shares = _shares(reply, count)
        choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
        yield _event({"choices": [choice], "timings": _timings(reply, count, begin_s, shares[-1])})
    if reply.is_cut:
        return
    if reply.error:
        yield _event({"error": {"message": reply.error}})
        return
    # The last text comes with the reason and the mean of all.
    count, shares = len(reply.pieces), _shares(reply, len(reply.pieces))
    known = [share for share in shares if share is not None]
    mean = sum(known) / len(known) if known else None
    choice = {"index": 0, "delta": {"content": last}, "finish_reason": reply.finish}
    yield _event({"choices": [choice], "timings": _timings(reply, count, begin_s, mean)})
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
    yield _event({"choices": [], "usage": usage, "timings": _timings(reply, count, begin_s, mean)})
    yield "data: [DONE]\n\n"


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _shares(reply: Reply, count: int) -> list[float | None]:
    """Return the shares of the first `count` tokens. The first has none: its step has read the prompt."""
    every = reply.shares or [None]
    return [None, *(every[place % len(every)] for place in range(count - 1))]


def _timings(reply: Reply, count: int, begin_s: float, share: float | None) -> dict[str, float | None]:
    taken_s = time.monotonic() - begin_s
    return {
        "prompt_n": reply.prompt_tokens - reply.cached_tokens,
        "cache_n": reply.cached_tokens,
        "prompt_ms": 5.0,
        "predicted_n": count,
        "predicted_ms": 1000 * taken_s,
        "predicted_per_second": (count - 1) / max(taken_s, 1e-3),
        "fired_share": share,
    }


@contextmanager
def fake_chat_server() -> Iterator[FakeChatServer]:
    """Serve at a free port of this machine until the block ends."""
    fake = FakeChatServer()
    server = uvicorn.Server(
        uvicorn.Config(fake.application(), port=0, log_level="warning", timeout_graceful_shutdown=1, access_log=False)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise OSError("the server did not start")
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"

    def stop() -> None:
        server.should_exit = True
        thread.join()

    fake.stop = stop
    try:
        yield fake
    finally:
        stop()
