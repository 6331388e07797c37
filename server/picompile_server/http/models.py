"""The models of a server: those that are loaded, and those that are still loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from picompile_server.http.errors import ApiError
from picompile_server.model import ServedModel

State = Literal["loading", "ok", "draining"]


class ModelSet:
    """The models that a server has or will have, by name. Requests without a name get the first.

    Attributes:
        loaded: those that answer requests.
        is_draining: whether the server ends when the running answers are complete.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.loaded: dict[str, ServedModel] = {}
        self.is_draining = False

    @property
    def state(self) -> State:
        """The word that GET /health answers with."""
        if self.is_draining:
            return "draining"
        return "ok" if len(self.loaded) == len(self.names) else "loading"

    def add(self, model: ServedModel) -> None:
        """Note that a model is loaded."""
        self.loaded[model.name] = model

    def get(self, name: str | None) -> ServedModel:
        """Return a model, by default the first.

        Raises:
            ApiError: there is none of that name (404), or it answers no requests yet, or none any more (503).
        """
        wanted = self.names[0] if name is None else name
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
        if wanted not in self.loaded:
            raise ApiError(503, f"the model {wanted!r} is loading; try again in a moment", code="loading")
        return self.loaded[wanted]

    def all(self) -> Mapping[str, ServedModel]:
        """Return the models that answer requests. Raises ApiError while there is none (503)."""
        if not self.loaded:
            raise ApiError(503, "the models are loading; try again in a moment", code="loading")
        return self.loaded
