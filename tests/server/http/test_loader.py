"""When models are loaded, by the options: at the start if they fit together, else when they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_serving import fake_model
from picompile_runtime.errors import ArtifactError, DoesNotFitError
from picompile_server.http import loader
from picompile_server.http.loader import Loader
from picompile_server.http.models import ModelSet
from picompile_server.options import LoadTime, ServeOptions


class Start:
    """A start of a server of two models, each of 3 bytes, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: dict[str, Exception] | None = None) -> None:
        self.lines: list[str] = []
        self.has_ended = False
        failures = failures or {}

        def load(name: str, *arguments: Any, **named: Any) -> Any:
            if name in failures:
                raise failures[name]
            return fake_model(name=name)

        monkeypatch.setattr(loader, "load_model", load)
        monkeypatch.setattr(loader, "loaded_bytes", lambda folder, kv_bytes: 3)
        monkeypatch.setattr(loader, "say", self.lines.append)

    def run(self, until: Callable[[Start], bool], names: str = "ab", **options: Any) -> ModelSet:
        models = ModelSet(tuple(names))
        given = ServeOptions({name: Path(name) for name in names}, **options)

        async def started() -> None:
            self.loader = Loader(given, models, "http://here", self.end)
            self.loader.start(asyncio.get_running_loop())
            for _ in range(500):
                if until(self):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"it did not happen: {self.lines}")

        asyncio.run(started())
        return models

    def end(self) -> None:
        self.has_ended = True

    def serves(self) -> bool:
        return any(line.startswith("serving ") for line in self.lines)


@pytest.mark.parametrize(
    ("options", "at_start"),
    [
        ({}, True),
        ({"model_bytes": 6}, True),
        ({"model_bytes": 5}, False),
        ({"most_loaded": 1}, False),
        ({"most_loaded": 2}, True),
        ({"load": "start"}, True),
        ({"load": "demand"}, False),
        ({"model_bytes": 1, "names": "a"}, True),
    ],
)
def test_models_are_loaded_at_the_start_if_they_fit(
    monkeypatch: pytest.MonkeyPatch, options: Any, at_start: bool
) -> None:
    start = Start(monkeypatch)
    models = start.run(Start.serves, **options)
    assert list(models.loaded) == (list(options.get("names", "ab")) if at_start else [])
    assert (models.demand is None) == at_start and models.state == "ok"
    assert start.lines[0].startswith("loading ") and "http://here/health" in start.lines[0]


def test_models_are_unloaded_if_they_are_kept_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    models = start.run(
        lambda start: all(any(f"unloaded {name}" in line for line in start.lines) for name in "ab"), keep_s=0.05
    )
    assert not models.loaded and models.state == "ok" and models.state_of("a") == "unloaded"


def test_what_does_not_fit_at_the_start_is_loaded_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, {"b": DoesNotFitError("the GPU has too little memory")})
    models = start.run(Start.serves)
    assert list(models.loaded) == ["a"] and models.demand is not None and start.loader.error is None
    assert any("do not fit together (the GPU has too little memory)" in line for line in start.lines)


@pytest.mark.parametrize(
    ("name", "error", "load"),
    [("a", DoesNotFitError("x"), "auto"), ("b", DoesNotFitError("x"), "start"), ("b", ArtifactError("x"), "auto")],
)
def test_a_model_that_cannot_be_loaded_at_the_start_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, load: LoadTime
) -> None:
    start = Start(monkeypatch, {name: error})
    start.run(lambda start: start.has_ended, load=load)
    assert start.loader.error is error and not start.serves()
