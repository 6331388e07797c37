"""Access checks: API keys, and `Host` names, against pages whose name was pointed to this host (DNS rebinding)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from picompile_server.http.errors import ApiError, as_api_error
from picompile_server.http.metrics import Metrics

# What a browser opens and what watches over the server need no key; they tell nothing that is secret.
_OPEN = frozenset(("/", "/health"))
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Middleware that lets a request through if it has a key and names this host, and counts all responses."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], hosts: Sequence[str] | None, metrics: Metrics, paths: Sequence[str]
    ) -> None:
        """Make the middleware.

        Args:
            app: the application behind it.
            keys: the API keys, each of which will do; with none, every request will.
            hosts: the names of this host that requests may have; None allows any.
            metrics: is told every response.
            paths: those of the application's routes; others count as one.
        """
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)
        self._digests = [_digest(key) for key in keys]
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.note_response(path, message["status"])
            await send(message)

        error = self._refusal(scope)
        if error is None:
            await self._answer(scope, receive, counted)
        else:
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
            await error.response(headers)(scope, receive, counted)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer. An error that nobody expected is answered here, so that it is counted, too, and
        raised again for the log.
        """
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if not has_begun:
                await as_api_error(error).response()(scope, receive, send)
            raise

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            return ApiError(
                403, "the Host header names another host; allow it with --allowed-host", code="host_not_allowed"
            )
        if not self._digests or scope["path"] in _OPEN:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            return ApiError(401, "give an API key, in the header Authorization: Bearer KEY", code="missing_api_key")
        if not self._is_known(given):
            return ApiError(401, "the API key is wrong", code="invalid_api_key")
        return None

    def _is_known(self, key: str) -> bool:
        """Return whether a key is right, in a time that does not depend on how much of it is."""
        given = _digest(key)
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _host_name(header: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Return whether a server that listens at `host` can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(host: str, more: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names that requests may have as Host, None for any.

    A page of a browser can have its own name point to this machine, and then read what is served for local use. Its
    requests never have a name of the machine itself, so those are always allowed. A server that others reach has names
    that it does not know, and should have a key.
    """
    if is_loopback(host):
        return (*_LOOPBACK_NAMES, host, *more)
    return (*_LOOPBACK_NAMES, *more) if more else None
