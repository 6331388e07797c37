"""A line for each request when it is answered: path, status, model, tokens, seconds, and what was wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from picompile_server.http.models import used_models

# Monitoring asks for these every few seconds.
_UNLOGGED = frozenset(("/health", "/metrics"))
_MOST_LETTERS = 200
_MOST_BODY_BYTES = 1 << 14
_USAGE = "picompile.usage"  # the key of a function that returns the tokens of a request's answers


def log_usage(request: Request, usage: Callable[[], Mapping[str, Any]]) -> None:
    """Have the line of a request name the tokens that `usage` returns at its end, as `counts.usage` does."""
    request.scope[_USAGE] = usage


class AccessLog:
    """Middleware that writes the lines. Failed requests have one, too."""

    def __init__(self, app: ASGIApp, write: Callable[[str], object]) -> None:
        """Make the middleware; `write` takes each line."""
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in _UNLOGGED:
            await self._app(scope, receive, send)
            return
        begun_s, status, body = time.monotonic(), 500, b""

        async def noted(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and len(body) < _MOST_BODY_BYTES:
                body += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._write(_line(scope, status, time.monotonic() - begun_s) + _reason(body))


def _line(scope: Scope, status: int, took_s: float) -> str:
    # Clients write both, and a line must stay one. The query is left out: it may hold a secret.
    method, path = (ascii(scope[key][:_MOST_LETTERS])[1:-1] for key in ("method", "path"))
    models = used_models(scope)
    named = f" {', '.join(models)}:" if models else ""
    tokens = f" {_tokens(scope[_USAGE]())}," if _USAGE in scope else ""
    return f"{time.strftime('%H:%M:%S')} {method} {path} {status}{named}{tokens} {took_s:.2f} s"


def _reason(body: bytes) -> str:
    """Return what an answer with an error says, behind a colon; nothing for other contents."""
    with suppress(ValueError, KeyError, TypeError):
        text = " ".join(str(json.loads(body)["error"]["message"]).split())[:_MOST_LETTERS]
        return ": " + "".join(letter if letter.isprintable() else "?" for letter in text)
    return ""


def _tokens(usage: Mapping[str, Any]) -> str:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f"{usage['prompt_tokens']} tokens in ({cached} cached), {usage['completion_tokens']} out"
