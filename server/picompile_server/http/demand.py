"""Loading of models when they are asked for, and unloading of idle ones that are in the way of the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from picompile_runtime.errors import DoesNotFitError, PicompileRuntimeError
from picompile_server.http.errors import ApiError
from picompile_server.http.models import ModelSet
from picompile_server.model import ServedModel

Result = TypeVar("Result")
PATIENCE_S = 60.0  # for a model to become idle

_LEAST_SLEEP_S = 0.01
_FOR_ROOM = "to make room"


@dataclass(frozen=True)
class Room:
    """Limits of loaded models: how many there may be, None for any number, and their memory in bytes."""

    models: int | None
    size_bytes: int


class OnDemand:
    """Loads one model at a time, each once however many requests wait for it. Only for one event loop.

    A model that requests use is never unloaded: the next one waits for it.
    """

    def __init__(
        self,
        models: ModelSet,
        load: Callable[[str], ServedModel],
        size_bytes: Callable[[str], int],
        room: Room,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Make it.

        Args:
            models: the models of the server, which change.
            load: loads the model of a name.
            size_bytes: returns how much memory that will take.
            room: for models. One that needs more is loaded alone.
            say: is told what is loaded and unloaded.
        """
        self._models, self._load_model, self._size_bytes, self._room, self._say = models, load, size_bytes, room, say
        self._sizes: dict[str, int] = {}  # of models that are or were loaded
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._is_idle = asyncio.Event()
        models.when_idle = self._is_idle.set

    def is_loading(self, name: str) -> bool:
        """Whether a model is on its way."""
        return name in self._tasks

    async def load(self, name: str) -> None:
        """Load a model, or wait until it is loaded. A client that goes away does not stop it.

        Raises ApiError: it cannot be loaded (500), or the models that answer leave no room for it (503).
        """
        if name not in self._tasks:
            task = self._tasks[name] = asyncio.ensure_future(self._load(name))
            task.add_done_callback(lambda done: self._forget(name, done))
        await asyncio.shield(self._tasks[name])

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled():
            task.exception()  # nobody may be left who takes it

    async def _load(self, name: str) -> None:
        async with self._turn:
            if name in self._models.loaded:
                return
            try:
                size = await on_thread(lambda: self._size_bytes(name))
                await self._make_room(name, size)
                model = await self._loaded(name)
            except PicompileRuntimeError as error:
                raise ApiError(500, f"the model {name!r} cannot be loaded: {error}", code="model_not_loaded") from error
            if self._models.is_draining:
                await on_thread(lambda: model.close(drain=False))
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            self._sizes[name] = size
            self._models.add(model)
            self._say(f"loaded {name}")

    async def unload_idle(self, after_s: float) -> None:
        """Unload each model that no request has used for `after_s` seconds. It does not end."""
        while True:
            await asyncio.sleep(max(after_s - self._models.longest_idle_s(), _LEAST_SLEEP_S))
            async with self._turn:
                if self._models.longest_idle_s() >= after_s:
                    await self._unload_one("not used")

    async def _loaded(self, name: str) -> ServedModel:
        """Return a model that is loaded now; unload idle ones as long as it does not fit beside them."""
        while True:
            try:
                return await on_thread(lambda: self._load_model(name))
            except DoesNotFitError:
                if not await self._unload_one(_FOR_ROOM):
                    raise

    async def _make_room(self, name: str, size: int) -> None:
        end_s = asyncio.get_running_loop().time() + PATIENCE_S
        for each in self._models.loaded.keys() - self._sizes.keys():  # loaded before there was a demand
            self._sizes[each] = await on_thread(partial(self._size_bytes, each))
        while self._models.loaded and not self._fits(size):
            self._is_idle.clear()
            if await self._unload_one(_FOR_ROOM):
                continue
            try:
                await asyncio.wait_for(self._is_idle.wait(), end_s - asyncio.get_running_loop().time())
            except asyncio.TimeoutError as error:  # another class before Python 3.11
                told = f"there is no room for the model {name!r} beside those that answer; try again in a moment"
                raise ApiError(503, told, code="no_room") from error

    def _fits(self, size: int) -> bool:
        loaded = self._models.loaded
        if self._room.models is not None and len(loaded) >= self._room.models:
            return False
        return size + sum(self._sizes[name] for name in loaded) <= self._room.size_bytes

    async def _unload_one(self, why: str) -> bool:
        """Unload the model that was idle for longest, and return whether there was one. The log has `why`."""
        model = self._models.longest_idle()
        if model is None:
            return False
        del self._models.loaded[model.name]
        await on_thread(lambda: model.close(drain=True))
        self._say(f"unloaded {model.name} ({why})")
        return True


def on_thread(function: Callable[[], Result]) -> Awaitable[Result]:
    """Call a function on a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def put(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, function())
        except BaseException as error:
            outcome = (future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(put, *outcome)

    threading.Thread(target=run, name="loader", daemon=True).start()
    return future
