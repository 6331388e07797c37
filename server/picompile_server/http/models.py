"""The models of a server: those that are loaded, those that load, and those that wait to be asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from picompile_server.http.errors import ApiError
from picompile_server.model import ServedModel

State = Literal["loading", "ok", "draining"]
ModelState = Literal["loaded", "loading", "unloaded"]
_USED = "picompile.models"  # the key of a request's models


class Demand(Protocol):
    """Loads models when they are asked for."""

    async def load(self, name: str) -> None:
        """Load a model, or wait until it is loaded. Raises ApiError if it cannot be."""

    def is_loading(self, name: str) -> bool:
        """Whether a model is on its way."""


class ModelSet:
    """The models that a server has or will have, by name. Requests without a name get the first.

    Attributes:
        aliases: other names of models, which are not listed, and the listed names.
        loaded: those that answer requests.
        demand: what loads a model that is asked for; None where all are loaded at the start.
        is_draining: whether the server ends when the running answers are complete.
        made_s: when the set was made, in seconds since 1970.
        when_idle: called when a model that requests have used is idle.
    """

    def __init__(self, names: Sequence[str], aliases: Mapping[str, str] | None = None) -> None:
        self.names, self.aliases = tuple(names), dict(aliases or {})
        self.loaded: dict[str, ServedModel] = {}
        self.demand: Demand | None = None
        self.is_draining = False
        self.made_s = int(time.time())
        self.when_idle: Callable[[], object] = lambda: None
        self._requests = Counter[str]()  # that use a model or wait for it
        self._used_s: dict[str, float] = {}  # when a model was used last

    @property
    def state(self) -> State:
        """The word that GET /health answers with."""
        if self.is_draining:
            return "draining"
        return "ok" if self.demand is not None or len(self.loaded) == len(self.names) else "loading"

    def state_of(self, name: str) -> ModelState:
        """Return the state of one model."""
        if name in self.loaded:
            return "loaded"
        return "loading" if self.demand is None or self.demand.is_loading(name) else "unloaded"

    def add(self, model: ServedModel) -> None:
        """Note that a model is loaded."""
        self.loaded[model.name] = model
        self._used_s[model.name] = time.monotonic()

    def known(self, name: str | None) -> str:
        """Return the listed name of a model, by default of the first.

        Raises:
            ApiError: there is none of that name (404), or it answers no requests any more (503).
        """
        wanted = self.names[0] if name is None else self.aliases.get(name, name)
        if wanted not in self.names:
            known = ", ".join(repr(each) for each in self.names)
            raise ApiError(
                404,
                f"The model {wanted[:200]!r} does not exist; there is {known}.",
                param="model",
                code="model_not_found",
            )
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return wanted

    def get(self, name: str | None) -> ServedModel:
        """Return a loaded model, by default the first. Raises ApiError as `known` does, and while it loads (503)."""
        wanted = self.known(name)
        if wanted not in self.loaded:
            raise ApiError(503, f"the model {wanted!r} is loading; try again in a moment", code="loading")
        return self.loaded[wanted]

    async def use(self, request: Request, name: str | None) -> ServedModel:
        """Return a model that stays loaded until a request is answered; load it before that if it is on demand.

        Raises ApiError as `get` does, and if it cannot be loaded.
        """
        wanted = self.known(name)
        self._requests[wanted] += 1
        request.scope[_USED].append(wanted)
        if self.demand is not None and wanted not in self.loaded:
            await self.demand.load(wanted)
        return self.get(wanted)

    def release(self, name: str) -> None:
        """Note that a request does not use a model any more."""
        self._requests[name] -= 1
        self._used_s[name] = time.monotonic()
        if not self._requests[name]:
            self.when_idle()

    def longest_idle(self) -> ServedModel | None:
        """Return the loaded model that no request uses, the one that was used longest ago; None if all are used."""
        idle = [name for name in self.loaded if not self._requests[name]]
        return self.loaded[min(idle, key=self._used_s.__getitem__)] if idle else None

    def longest_idle_s(self) -> float:
        """Return for how many seconds no request has used the model of `longest_idle`; 0 if all are used."""
        model = self.longest_idle()
        return 0.0 if model is None else time.monotonic() - self._used_s[model.name]

    def all(self) -> Mapping[str, ServedModel]:
        """Return the models that answer requests. Raises ApiError while there is none and all are to be (503)."""
        if not self.loaded and self.demand is None:
            raise ApiError(503, "the models are loading; try again in a moment", code="loading")
        return self.loaded


def used_models(scope: Scope) -> Sequence[str]:
    """Return the names of the models that a request uses or has used."""
    return tuple(dict.fromkeys(scope.get(_USED, ())))


class ModelUse:
    """Middleware that releases a request's models when it is answered, its stream included."""

    def __init__(self, app: ASGIApp, models: ModelSet) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        used: list[str] = []
        scope[_USED] = used
        try:
            await self._app(scope, receive, send)
        finally:
            for name in used:
                self._models.release(name)
