"""An application over a model without an engine, and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler, client_of, fake_model
from helpers.serving_process import ServingProcess, serving
from helpers.support import BuildOnce, compile_for_test, save_tiny_llama
from picompile_runtime.serving.model import ServedModel


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
    """A model of random weights, with a token for each byte, for four sequences of 1024 tokens."""

    def make(folder: Path) -> None:
        model = folder.with_name("serving-model")
        save_tiny_llama(model, max_position_embeddings=1024)
        compile_for_test(model, folder, quant="f16", context=1024, sequences=4)

    return build_once("serving-artifact", make)


@pytest.fixture(scope="session")
def server(serving_artifact: Path) -> Iterator[ServingProcess]:
    """A server of it that tests share, under the name `tiny`."""
    with serving("--model", f"tiny={serving_artifact}") as found:
        yield found
