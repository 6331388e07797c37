"""Two replicas of the example behind Ray Serve, on a cluster of this machine alone."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import psutil
import pytest

from helpers.proxies import free_port
from helpers.serving_process import serving
from helpers.support import ROOT

pytestmark = pytest.mark.slow("starts a Ray cluster")

EXAMPLE = ROOT / "examples" / "ray_serve"
BODY = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
PATIENCE_S = 120
KEY = "sesame"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """examples/ray_serve/app.py, imported as `serve run app:application` does."""
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'ray[serve]'", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield importlib.import_module("app")
        del sys.modules["app"]


@pytest.fixture(scope="module")
def client(example: ModuleType, artifact: Path) -> Iterator[httpx.Client]:
    """A client of a cluster with two replicas."""
    import ray
    from ray import serve

    port = free_port()
    paths = os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=2,
        # Not every network lets another address of this machine be reached.
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
        # Ray gives its workers a low priority; beside other tests they would need minutes to start.
        _system_config={"worker_niceness": 0},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PICOMPILE_API_KEY", KEY)
            application = example.application(example.Arguments(artifact=str(artifact), name="tiny"))
        serve.run(application, route_prefix="/")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=PATIENCE_S) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def test_both_replicas_answer_as_a_server_does(client: httpx.Client, artifact: Path) -> None:
    with serving("--model", f"tiny={artifact}") as server:
        expected = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S).json()["choices"]
    replicas = set()
    for _ in range(40):
        answer = client.post("/v1/completions", json=BODY)
        replicas.add(answer.headers["x-replica"])
        assert answer.json()["choices"] == expected
    assert len(replicas) == 2


def test_a_conversation_stays_with_one_replica(client: httpx.Client) -> None:
    for session in ("one", "another"):
        answers = [
            client.post("/v1/completions", json={**BODY, "prompt": session * 60}, headers={"X-Session-Id": session})
            for _ in range(4)
        ]
        assert len({answer.headers["x-replica"] for answer in answers}) == 1
        assert answers[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_stream_comes_in_pieces_to_whoever_has_the_key(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 3 and lines[-1] == "data: [DONE]"
    refused = client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def test_a_replica_that_is_killed_is_replaced(client: httpx.Client) -> None:
    """Meanwhile the other one answers. Last, since it changes the cluster."""
    before = seen(client, lambda found: len(found) == 2)
    (victim, *_) = [each for each in psutil.Process().children(recursive=True) if "ServeReplica" in each.name()]
    victim.kill()
    after = seen(client, lambda found: len(found - before) == 1)
    assert len(after & before) >= 1


def seen(client: httpx.Client, is_enough: Callable[[set[str]], bool]) -> set[str]:
    """Ask until enough replicas have answered; return which."""
    found: set[str] = set()
    end = time.monotonic() + PATIENCE_S
    while not is_enough(found):
        assert time.monotonic() < end, found
        answer = client.post("/v1/completions", json=BODY)
        if answer.status_code == 200:  # until Ray knows that the other replica is gone, requests to it fail
            found.add(answer.headers["x-replica"])
        time.sleep(0.05)
    return found
