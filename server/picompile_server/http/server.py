"""A server's lifetime: it binds, loads its models while it answers, and drains at the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from picompile_runtime.errors import RequestError
from picompile_server.http.app import AppSettings, make_app
from picompile_server.http.guard import allowed_hosts, is_loopback
from picompile_server.http.loader import Loader, say
from picompile_server.http.models import ModelSet
from picompile_server.http.protocol import WatchfulProtocol
from picompile_server.options import ServeOptions

_BACKLOG = 2048
_KEEP_ALIVE_S = 65  # more than proxies keep connections without a request
# Answers that are cancelled when time is up still tell their clients.
_AFTER_DRAIN_S = 5


def serve(options: ServeOptions) -> None:
    """Serve until a signal asks to end, and the running answers are complete.

    Raises:
        PicompileRuntimeError: a model cannot be loaded, or the address cannot be listened at.
    """
    listener = bind(options.host, options.port)
    models = ModelSet(tuple(options.models), options.aliases)
    app = make_app(
        models,
        AppSettings(
            options.keys,
            allowed_hosts(options.host, options.hosts),
            options.origins,
            options.most_body_bytes,
            log=None if options.is_quiet else say,
        ),
    )
    config = uvicorn.Config(
        app,
        # Not what happens to be installed: a server behaves alike everywhere.
        loop="asyncio",
        http=WatchfulProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(options.drain_s) + _AFTER_DRAIN_S,
    )
    server = _Server(config, models, options.drain_s)
    loader = Loader(options, models, _url(options.host, listener), server.end)
    if not options.keys and not is_loopback(options.host):
        say(f"warning: everybody who reaches {options.host} can use this server; give it an --api-key")
    try:
        with contextlib.closing(listener):
            asyncio.run(_run(server, loader, listener))
    finally:
        for model in models.loaded.values():
            model.close(drain=False)
    if loader.error is not None:
        raise loader.error


async def _run(server: _Server, loader: Loader, listener: socket.socket) -> None:
    loader.start(asyncio.get_running_loop())
    await server.serve([listener])


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises RequestError if that is not possible."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Clients try IPv4 first where a name has both.
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--host: {host!r} is no address of this machine ({error})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RequestError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port") from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Uvicorn's server, which ends by a signal as if it had come to its end, and gives answers time to be complete."""

    def __init__(self, config: uvicorn.Config, models: ModelSet, drain_s: float) -> None:
        super().__init__(config)
        self._models, self._drain_s = models, drain_s

    def end(self) -> None:
        """Come to an end soon. It may be called from any thread."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have SIGINT and SIGTERM end the server while the block runs. Uvicorn's own raises them again after that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end(number: int, frame: FrameType | None) -> None:
            if self.should_exit:  # asked for a second time: do not wait for answers
                self._cancel_answers()
            else:
                self.handle_exit(number, frame)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for the running answers; cancel them when their time is up."""
        self._models.is_draining = True
        found = [model.scheduler.stats() for model in self._models.loaded.values()]
        if running := sum(each.waiting + each.reading + each.decoding for each in found):
            say(
                f"ending when the answers that are being made ({running}) are complete, in at most "
                f"{self._drain_s:.0f} s; Ctrl-C cancels them"
            )
        timer = asyncio.ensure_future(self._cancel_later())
        await super().shutdown(sockets)
        timer.cancel()

    async def _cancel_later(self) -> None:
        await asyncio.sleep(self._drain_s)
        self._cancel_answers()

    def _cancel_answers(self) -> None:
        for model in self._models.loaded.values():
            threading.Thread(target=model.scheduler.close, args=(False,), name="cancel", daemon=True).start()
