"""An application over a model without an engine, and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from helpers.chat_page import chromium, open_page
from helpers.fake_chat_server import FakeChatServer, fake_chat_server
from helpers.fake_serving import FakeScheduler, client_of, fake_model
from helpers.serving_process import ServingProcess, build_serving_artifact, serving
from helpers.support import BuildOnce
from picompile_server.model import ServedModel


@pytest.fixture
def fake() -> ServedModel:
    """A model that says "Hello, world."."""
    return fake_model()


@pytest.fixture
def scheduler(fake: ServedModel) -> FakeScheduler:
    return cast(FakeScheduler, fake.scheduler)


@pytest.fixture
def client(fake: ServedModel) -> TestClient:
    return client_of(fake)


@pytest.fixture(scope="session")
def serving_artifact(build_once: BuildOnce) -> Path:
    return build_serving_artifact(build_once)


@pytest.fixture(scope="session")
def server(serving_artifact: Path) -> Iterator[ServingProcess]:
    """A server of it that tests share, under the name `tiny`."""
    with serving("--model", f"tiny={serving_artifact}") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each module: while it is there, tests of this process cannot run an event loop of their own."""
    with chromium() as started:
        yield started


@pytest.fixture
def chat_server() -> Iterator[FakeChatServer]:
    """A server of the page that says what a test wants said."""
    with fake_chat_server() as started:
        yield started


@pytest.fixture
def refusals() -> set[int]:
    """The statuses that the page may be refused with: a test adds some."""
    return set()


@pytest.fixture
def page(browser: Any, chat_server: FakeChatServer, refusals: set[int]) -> Iterator[Any]:
    with open_page(browser, chat_server.url, refusals) as opened:
        yield opened
