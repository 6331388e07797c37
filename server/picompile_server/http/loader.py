"""When a server's models are loaded: all at the start, or each when it is asked for first."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable

from picompile_runtime.artifact.size import loaded_bytes
from picompile_runtime.devices.machine import memory_bytes
from picompile_runtime.errors import DoesNotFitError, PicompileRuntimeError
from picompile_server.http.demand import OnDemand, Room
from picompile_server.http.models import ModelSet
from picompile_server.model import ServedModel, load_model
from picompile_server.options import ServeOptions
from picompile_server.scheduler import SchedulerOptions

# The rest is for the KV cache, as far as it is not counted, and for other programs.
_SHARE_FOR_MODELS = 0.9


class Loader:
    """Loads the models of a server.

    At the start it loads them one after the other, on a thread that does not keep the process from ending.

    Attributes:
        error: why the server cannot start; None if it can.
    """

    def __init__(self, options: ServeOptions, models: ModelSet, url: str, end: Callable[[], None]) -> None:
        """Make a loader; `end` ends the server that listens at `url`, if a model cannot be loaded at the start."""
        self._options, self._models, self._url, self._end = options, models, url, end
        self.error: BaseException | None = None
        self._unloading: asyncio.Future[None] | None = None  # kept, since the loop does not

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load; `loop`, which runs, gets each loaded model."""
        names = ", ".join(self._options.models)
        if self._options.load == "demand" or (self._options.load == "auto" and not self._fit_together()):
            say(f"loading models when they are asked for; {self._url}/health answers 200")
            self._load_on_demand()
            say(f"serving {names} at {self._url}")
            return
        say(f"loading {names}; {self._url}/health answers 503 until then")
        threading.Thread(target=self._load_all, args=(loop,), name="loader", daemon=True).start()

    @property
    def _room(self) -> Room:
        given = self._options.model_bytes
        return Room(self._options.most_loaded, int(memory_bytes() * _SHARE_FOR_MODELS) if given is None else given)

    def _fit_together(self) -> bool:
        """Return whether all models fit; a single one always does, and one that cannot be opened is said so later."""
        names, room = list(self._options.models), self._room
        if len(names) == 1:
            return True
        if room.models is not None and len(names) > room.models:
            return False
        try:
            return sum(map(self._size_bytes, names)) <= room.size_bytes
        except PicompileRuntimeError:
            return True

    def _size_bytes(self, name: str) -> int:
        return loaded_bytes(self._options.models[name], self._options.kv_bytes)

    def _load(self, name: str) -> ServedModel:
        options = self._options
        scheduling = SchedulerOptions(max_waiting=options.max_waiting, reread=options.reread, draft=options.draft)
        folder = options.models[name]
        return load_model(name, folder, options.threads, options.replan, options=scheduling, kv_bytes=options.kv_bytes)

    def _load_on_demand(self) -> None:
        def load(name: str) -> ServedModel:
            model = self._load(name)
            _say_notes(model)
            return model

        def log(line: str) -> None:
            say(f"{time.strftime('%H:%M:%S')} {line}")

        demand = OnDemand(self._models, load, self._size_bytes, self._room, log)
        self._models.demand = demand
        if self._options.keep_s is not None:
            self._unloading = asyncio.ensure_future(demand.unload_idle(self._options.keep_s))

    def _load_all(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for name in self._options.models:
                model = self._load(name)
                try:
                    loop.call_soon_threadsafe(self._add, model)
                except RuntimeError:  # the server has ended meanwhile
                    model.close(drain=False)
                    continue
                if (note := model.tool_note()) is not None:
                    say(note)
        except DoesNotFitError as error:
            if self._options.load == "auto" and name != next(iter(self._options.models)):
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._change_to_demand, error)
                return
            self._fail(error)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._end()

    def _change_to_demand(self, error: DoesNotFitError) -> None:
        """Load the models that do not fit beside those that are loaded when they are asked for."""
        say(f"the models do not fit together ({error}); others are loaded when they are asked for")
        self._load_on_demand()
        say(f"serving {', '.join(self._options.models)} at {self._url}")

    def _add(self, model: ServedModel) -> None:
        self._models.add(model)
        if not model.tokenizer.has_chat_template:
            say(_plain_note(model))
        if self._models.state == "ok":
            say(f"serving {', '.join(self._options.models)} at {self._url}")
            if self._options.keep_s is not None:  # what is unloaded comes back on demand
                self._load_on_demand()


def _plain_note(model: ServedModel) -> str:
    return f"{model.name} has no chat template: chats are written as a plain dialogue"


def _say_notes(model: ServedModel) -> None:
    if not model.tokenizer.has_chat_template:
        say(_plain_note(model))
    if (note := model.tool_note()) is not None:
        say(note)


def say(line: str) -> None:
    """Tell whoever started the server."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(line, file=sys.stderr, flush=True)
