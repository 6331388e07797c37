"""Models that are loaded when they are asked for: once, beside those that answer, in place of those that are idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from helpers.fake_serving import FakeScheduler, fake_model
from picompile_runtime.errors import ArtifactError, DoesNotFitError
from picompile_server.http import demand
from picompile_server.http.app import make_app
from picompile_server.http.demand import OnDemand, Room
from picompile_server.http.models import ModelSet
from picompile_server.model import ServedModel

NAMES = ("a", "b", "c")
SIZES = {"a": 4, "b": 3, "c": 2}
Asks = Callable[["Served"], Awaitable[None]]


class Served:
    """A server of fake models that are loaded on demand, and what it did."""

    def __init__(self, room: Room) -> None:
        self.models = ModelSet(NAMES)
        self.done: list[str] = []
        self.loads: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.made: dict[str, ServedModel] = {}
        self.errors: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.models.demand = OnDemand(self.models, self.load, SIZES.__getitem__, room, self.done.append)
        self.client: httpx.AsyncClient

    def load(self, name: str) -> ServedModel:
        assert self.gate.wait(10)
        self.loads[name] += 1
        if self.errors:
            raise self.errors.pop()
        self.made[name] = fake_model(f"I am {name}.", name)
        return self.made[name]

    def scheduler(self, name: str) -> FakeScheduler:
        return self.made[name].scheduler  # type: ignore[return-value]

    async def ask(self, name: str | None, **fields: Any) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 20, "model": name, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def states(self) -> dict[str, str]:
        answer = await self.client.get("/v1/models")
        return {model["id"]: model["status"]["value"] for model in answer.json()["data"]}


def serve(asks: Asks, room: Room | None = None) -> Served:
    served = Served(room or Room(None, 7))

    async def run() -> None:
        app = make_app(served.models)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            served.client = client
            await asks(served)

    asyncio.run(run())
    return served


async def until(holds: Callable[[], object]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def test_a_model_is_loaded_when_it_is_asked_for_first() -> None:
    async def asks(served: Served) -> None:
        health = await served.client.get("/health")
        assert health.status_code == 200 and health.json() == {"status": "ok"}
        assert await served.states() == dict.fromkeys(NAMES, "unloaded")
        assert (await served.client.get("/slots")).json() == []
        shown = (await served.client.get("/v1/models/a")).json()
        assert shown["max_model_len"] is None and shown["status"] == {"value": "unloaded"}
        for name in (None, "a"):
            answer = await served.ask(name)
            assert answer.json()["choices"][0]["text"] == "I am a." and answer.json()["model"] == "a"
        assert await served.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        assert (await served.ask("d")).status_code == 404

    assert serve(asks).loads == {"a": 1, "b": 0, "c": 0}


def test_the_model_that_is_idle_for_longest_makes_room() -> None:
    async def asks(served: Served) -> None:
        for name in ("a", "b", "a", "c"):
            assert (await served.ask(name)).status_code == 200
        assert await served.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}

    served = serve(asks)
    assert served.done == ["loaded a", "loaded b", "unloaded b (to make room)", "loaded c"]
    assert served.scheduler("b").is_closed and not served.scheduler("a").is_closed


def test_a_model_without_requests_is_unloaded_and_comes_back() -> None:
    async def asks(served: Served) -> None:
        assert isinstance(served.models.demand, OnDemand)
        unloading = asyncio.ensure_future(served.models.demand.unload_idle(0.1))
        await served.ask("a")
        gate = served.scheduler("a").gate
        gate.clear()
        running = asyncio.ensure_future(served.ask("a"))
        await until(lambda: served.scheduler("a").running)
        await served.ask("b")
        await until(lambda: "unloaded b (not used)" in served.done)
        assert await served.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        gate.set()
        assert (await running).status_code == 200
        await until(lambda: "unloaded a (not used)" in served.done)
        assert (await served.ask("a")).status_code == 200
        unloading.cancel()

    assert serve(asks).done == ["loaded a", "loaded b", "unloaded b (not used)", "unloaded a (not used)", "loaded a"]


def test_a_number_of_models_may_be_loaded() -> None:
    async def asks(served: Served) -> None:
        for name in ("a", "b", "c"):
            assert (await served.ask(name)).status_code == 200

    room = Room(1, 100)
    assert serve(asks, room).done == [
        "loaded a",
        "unloaded a (to make room)",
        "loaded b",
        "unloaded b (to make room)",
        "loaded c",
    ]
    # One that is larger than the room is loaded alone.
    assert serve(asks, Room(None, 1)).done == [
        "loaded a",
        "unloaded a (to make room)",
        "loaded b",
        "unloaded b (to make room)",
        "loaded c",
    ]


def test_requests_that_come_together_load_a_model_once() -> None:
    async def asks(served: Served) -> None:
        served.gate.clear()
        together = [asyncio.ensure_future(served.ask("a")) for _ in range(5)]
        await until(lambda: served.models.state_of("a") == "loading")
        served.gate.set()
        assert [(await each).status_code for each in together] == [200] * 5

    assert serve(asks).loads["a"] == 1


def test_a_model_that_answers_is_not_unloaded() -> None:
    """The next one waits for it, and the answer, a stream, comes to its end."""

    async def asks(served: Served) -> None:
        await served.ask("a")
        gate = served.scheduler("a").gate
        gate.clear()
        first = asyncio.ensure_future(served.ask("a", stream=True))
        await until(lambda: served.scheduler("a").running)
        second = asyncio.ensure_future(served.ask("c"))
        await until(lambda: served.models.state_of("c") == "loading")
        await asyncio.sleep(0.05)
        assert not second.done() and "a" in served.models.loaded
        gate.set()
        assert (await first).text.endswith("data: [DONE]\n\n") and (await second).status_code == 200

    assert serve(asks, Room(1, 100)).done == ["loaded a", "unloaded a (to make room)", "loaded c"]


def test_a_model_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "PATIENCE_S", 0.05)

    async def asks(served: Served) -> None:
        await served.ask("a")
        served.scheduler("a").gate.clear()
        first = asyncio.ensure_future(served.ask("a"))
        await until(lambda: served.scheduler("a").running)
        error = await served.ask("b")
        assert error.status_code == 503 and error.headers["retry-after"] == "1"
        assert error.json()["error"]["code"] == "no_room" and "beside those that answer" in error.text
        served.scheduler("a").gate.set()
        assert (await first).status_code == 200 and (await served.ask("b")).status_code == 200

    serve(asks, Room(1, 100))


def test_a_model_that_cannot_be_loaded_can_be_tried_again() -> None:
    async def asks(served: Served) -> None:
        served.errors.append(ArtifactError("x: is not whole; compile the model again"))
        error = await served.ask("a")
        assert error.status_code == 500 and error.json()["error"]["code"] == "model_not_loaded"
        assert error.json()["error"]["message"].startswith("the model 'a' cannot be loaded: x: is not whole")
        assert (await served.states())["a"] == "unloaded"
        assert (await served.ask("a")).status_code == 200

    serve(asks)


def test_idle_models_go_until_the_next_one_can_be_allocated() -> None:
    """On a GPU it shows only there whether there is room."""

    async def asks(served: Served) -> None:
        await served.ask("b")
        await served.ask("c")
        served.errors += [DoesNotFitError("the GPU has too little memory")] * 2
        assert (await served.ask("a")).status_code == 200
        served.errors += [DoesNotFitError("the GPU has too little memory")] * 9
        assert (await served.ask("c")).status_code == 500

    served = serve(asks, Room(None, 100))
    assert served.done == [
        *("loaded b", "loaded c"),
        *("unloaded b (to make room)", "unloaded c (to make room)", "loaded a"),
        "unloaded a (to make room)",
    ]


def test_a_client_that_goes_away_does_not_stop_the_load() -> None:
    async def asks(served: Served) -> None:
        served.gate.clear()
        first = asyncio.ensure_future(served.ask("a"))
        await until(lambda: served.models.state_of("a") == "loading")
        first.cancel()
        served.gate.set()
        await until(lambda: "a" in served.models.loaded)
        assert served.models.longest_idle() is served.made["a"]

    serve(asks)


def test_another_name_of_a_model_is_the_same_model() -> None:
    async def asks(served: Served) -> None:
        served.models.aliases["a:Q4_0"] = "a"
        answers = [await served.ask(name) for name in ("a:Q4_0", "a")]
        assert [answer.json()["model"] for answer in answers] == ["a", "a"]
        assert [*await served.states()] == [*NAMES]

    assert serve(asks).loads == {"a": 1, "b": 0, "c": 0}
