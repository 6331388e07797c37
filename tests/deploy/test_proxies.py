"""The configurations of nginx and Caddy in deploy/, run before two replicas on this machine."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from helpers.proxies import DEPLOY, caddy, caddyfile, nginx, program
from helpers.serving_process import ServingProcess, serving, serving_thread

pytestmark = pytest.mark.slow("starts servers and proxies")

PROXIES = {"nginx": nginx, "caddy": caddy}
BODY = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 900, "stream": True}
PATIENCE_S = 60

Start = Callable[..., AbstractContextManager[str]]


@contextmanager
def two_servers(artifact: Path) -> Iterator[list[ServingProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving("--model", f"tiny={artifact}")) for _ in range(2)]


@pytest.fixture(scope="module")
def replicas(artifact: Path) -> Iterator[list[ServingProcess]]:
    with two_servers(artifact) as servers:
        yield servers


@pytest.fixture(params=PROXIES)
def start(request: pytest.FixtureRequest) -> Start:
    """Starts a proxy."""
    program(request.param)
    found: Start = PROXIES[request.param]
    return found


@pytest.fixture
def client(start: Start, replicas: list[ServingProcess], tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a proxy before the two replicas."""
    urls = [server.url for server in replicas]
    with start(tmp_path, urls) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client


def counted(replicas: list[ServingProcess], what: str) -> list[int]:
    """Return a count that each replica tells."""
    texts = (httpx.get(f"{server.url}/metrics").text for server in replicas)
    return [sum(int(count) for count in re.findall(re.escape(what) + r" (\d+)", text)) for text in texts]


def answered(replicas: list[ServingProcess]) -> list[int]:
    """Return how many completions each replica has answered."""
    return counted(replicas, 'http_responses_total{path="/v1/completions",status="200"}')


def running(server: ServingProcess) -> int:
    return sum(slot["is_processing"] for slot in httpx.get(f"{server.url}/slots").json())


def test_both_replicas_answer_as_one_does(client: httpx.Client, replicas: list[ServingProcess]) -> None:
    alone = httpx.post(f"{replicas[0].url}/v1/completions", json=BODY).json()["choices"][0]["text"]
    before = answered(replicas)
    for session in range(24):  # all with one replica: once in ten million runs
        made = client.post("/v1/completions", json=BODY, headers={"X-Session-Id": f"session {session}"})
        assert made.status_code == 200 and made.json()["choices"][0]["text"] == alone
    shares = [now - then for now, then in zip(answered(replicas), before, strict=True)]
    assert sum(shares) == 24 and min(shares) > 0


def test_a_conversation_stays_with_one_replica_and_is_reused(
    client: httpx.Client, replicas: list[ServingProcess]
) -> None:
    """Also where requests name no session."""
    for headers in ({"X-Session-Id": "conversation 1"}, {"X-Session-Id": "conversation 2"}, {}):
        before, prompt = answered(replicas), secrets.token_hex(100)
        for turn in range(4):
            made = client.post("/v1/completions", json={**BODY, "prompt": prompt}, headers=headers).json()
            cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 100 if turn else cached < 100
            prompt += made["choices"][0]["text"]
        assert sorted(now - then for now, then in zip(answered(replicas), before, strict=True)) == [0, 4]


def test_pieces_come_one_by_one(start: Start, tmp_path: Path) -> None:
    """Each event is read before the next one is sent."""
    go = threading.Event()

    async def events(request: Request) -> Response:
        async def pieces() -> AsyncIterator[str]:
            for number in range(3):
                yield f"data: {number}\n\n"
                await asyncio.to_thread(go.wait, PATIENCE_S)
                go.clear()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return Response("ok")

    app = Starlette(routes=[Route("/events", events), Route("/health", health)])
    with serving_thread(app) as replica, start(tmp_path, [replica, replica]) as url:
        with httpx.stream("GET", f"{url}/events", timeout=PATIENCE_S / 2) as answer:
            found = []
            for line in answer.iter_lines():
                if line:
                    found.append(line)
                    go.set()
        assert found == ["data: 0", "data: 1", "data: 2"]


def test_a_client_that_goes_away_frees_its_slots(client: httpx.Client, replicas: list[ServingProcess]) -> None:
    cancelled = 'answers_total{model="tiny",outcome="cancelled"}'
    before = counted(replicas, cancelled)
    with client.stream("POST", "/v1/completions", json={**LONG, "n": 32}) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + PATIENCE_S
    while counted(replicas, cancelled) == before or any(map(running, replicas)):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_passes_and_what_does_not(client: httpx.Client) -> None:
    headers, body = {"Cookie": "x" * 20_000}, {**BODY, "prompt": "x" * 3_000_000}
    refused = client.post("/v1/completions", json=body, headers=headers)
    assert refused.status_code == 400 and "1024" in refused.json()["error"]["message"]
    assert client.post("/v1/completions", json={**body, "prompt": "x" * 20_000_000}).status_code == 413
    # What each replica tells of itself is not passed on.
    assert [client.get(path).status_code for path in ("/metrics", "/slots", "/health")] == [404, 404, 200]


def test_another_replica_takes_over(start: Start, artifact: Path, tmp_path: Path) -> None:
    with (
        two_servers(artifact) as servers,
        start(tmp_path, [server.url for server in servers]) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        first = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        home = servers[0 if answered(servers)[0] else 1]
        home.process.kill()
        home.process.wait()
        for _ in range(3):
            made = client.post("/v1/completions", json=BODY)
            assert made.status_code == 200 and made.json()["choices"][0]["text"] == first


def test_nginx_asks_again_when_a_replica_is_killed_in_the_middle(artifact: Path, tmp_path: Path) -> None:
    """The client, which has got nothing yet, gets the text that the first replica was about to give."""
    program("nginx")
    body = {**LONG, "stream": False}
    with two_servers(artifact) as servers, nginx(tmp_path, [server.url for server in servers]) as url:
        expected = httpx.post(f"{servers[0].url}/v1/completions", json=body, timeout=PATIENCE_S).json()["choices"]
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
            end = time.monotonic() + PATIENCE_S
            while not (busy := [server for server in servers if running(server)]):
                assert time.monotonic() < end
            busy[0].process.kill()
        assert made.result().status_code == 200 and made.result().json()["choices"] == expected


@pytest.mark.parametrize("name", PROXIES)
def test_each_takes_its_file_as_it_is(name: str, tmp_path: Path) -> None:
    command = [program(name), *(("-t", "-q", "-c") if name == "nginx" else ("validate", "--config"))]
    file = DEPLOY / "nginx.conf"
    if name == "caddy":
        file = tmp_path / "Caddyfile"
        file.write_text(caddyfile(), encoding="utf-8")
    checked = subprocess.run([*command, str(file)], capture_output=True, text=True)
    assert checked.returncode == 0 and "not formatted" not in checked.stderr, checked.stderr
