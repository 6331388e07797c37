"""Answers that do not end as they should, and requests that take more than their part of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import CONTEXT, FakeScheduler, client_of, fake_model, streamed, text_tokens
from helpers.serving_process import serving_thread
from picompile_server.http import body, stream
from picompile_server.http.app import AppSettings
from picompile_server.model import ServedModel
from picompile_server.text import TextAssembler
from picompile_server.workers import Workers

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "n": 2},
    "/v1/responses": {"input": "Hi"},
}


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def url(client: TestClient) -> Iterator[str]:
    with serving_thread(client.app) as found:
        yield found


def ask(url: str, path: str, body: Any) -> socket.socket:
    """Send a request, and return its connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_goes_away_ends_its_answers(
    url: str, scheduler: FakeScheduler, path: str, is_streamed: bool
) -> None:
    scheduler.says = lambda request: text_tokens("x" * 100)
    scheduler.delay_s = 0.01
    connection = ask(url, path, {"stream": is_streamed, **BODIES[path]})
    wait_until(lambda: scheduler.asked)
    if is_streamed:
        assert connection.recv(10)
    connection.close()
    wait_until(lambda: scheduler.asked and not scheduler.running)
    assert all(answer.cancelled.is_set() for answer in scheduler.asked)


def test_a_client_goes_away_before_the_first_token(url: str, scheduler: FakeScheduler) -> None:
    """It may have sent more than its request."""
    for is_streamed in (False, True):
        for behind in (b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            scheduler.gate.clear()
            scheduler.asked.clear()
            connection = ask(url, "/v1/completions", {"stream": is_streamed, "prompt": "Hi"})
            wait_until(lambda: scheduler.asked)
            connection.sendall(behind)
            time.sleep(0.1 * bool(behind))
            connection.close()
            wait_until(lambda: not scheduler.running)


def test_a_second_request_is_answered_after_the_first(url: str, scheduler: FakeScheduler) -> None:
    scheduler.gate.clear()
    connection = ask(url, "/v1/completions", {"prompt": "Hi"})
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    wait_until(lambda: scheduler.asked)
    scheduler.gate.set()
    received = b""
    while part := connection.recv(2**16):
        received += part
    connection.close()
    assert received.count(b"HTTP/1.1 200 OK") == 2 and received.endswith(b'{"status":"ok"}')


def test_a_body_that_ends_too_soon_is_no_error(url: str, scheduler: FakeScheduler, capfd: Any) -> None:
    connection = ask(url, "/v1/completions", {"prompt": "Hi"})
    host = url.removeprefix("http://")
    second = socket.create_connection(("127.0.0.1", int(host.partition(":")[2])))
    second.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    second.sendall(b"Content-Length: 100\r\n\r\n{")
    second.close()
    assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    assert httpx.get(f"{url}/health").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_stream_without_a_word_is_kept_alive(
    url: str, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PING_S", 0.02)
    scheduler.gate.clear()
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "Hi", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": ping"
        scheduler.gate.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]" and len(rest) > 2


def test_an_error_ends_an_answer(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.failure = "a kernel broke"
    whole = client.post("/v1/completions", json={"prompt": "Hi"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_error")
    told = {"message": "the model failed: a kernel broke", "type": "server_error", "param": None}
    for path in ("/v1/completions", "/v1/chat/completions"):
        *chunks, last = streamed(client, path, **BODIES[path])
        assert last["error"] == {**told, "code": "engine_error"}
        assert not any("error" in chunk for chunk in chunks)
    # Of a response it is an event.
    answer = client.post("/v1/responses", json={"input": "Hi", "stream": True})
    name, _, data = answer.text.strip().split("\n\n")[-1].partition("\ndata: ")
    response = json.loads(data)["response"]
    assert (name, response["status"]) == ("event: response.failed", "failed")
    assert "kernel" in response["error"]["message"]


def test_answers_that_the_server_cancels_say_so(client: TestClient, scheduler: FakeScheduler) -> None:
    submit = scheduler.submit

    def submit_and_cancel(request: Any, listener: Any) -> Any:
        scheduler.gate.clear()
        answer = submit(request, listener)
        answer.cancel()
        return answer

    scheduler.submit = submit_and_cancel  # type: ignore[method-assign]
    answer = client.post("/v1/completions", json={"prompt": "Hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


# One request takes no more than its part of the time and memory.

LONG = "a text that is cut into tokens on another thread, since it has more than so many letters. " * 4


def test_workers_tell_errors_and_are_free_after_them() -> None:
    workers = Workers("test", 1, 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(workers.run(lambda: 1 // 0))
    workers.close()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            asyncio.run(workers.run(int))


def test_a_request_whose_text_would_wait_too_long_is_told_so(fake: ServedModel) -> None:
    client, gate = client_of(fake), threading.Event()
    fake.text_workers = Workers("test", 1, 0)

    async def occupy() -> None:
        task = asyncio.ensure_future(fake.text_workers.run(gate.wait))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(occupy())
    refused = client.post("/v1/completions", json={"prompt": LONG})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"
    assert client.post("/v1/completions", json={"prompt": "short"}).status_code == 200
    gate.set()
    while client.post("/v1/completions", json={"prompt": LONG}).status_code == 429:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {"choice": [0] * 1000}}, "should be a valid string, not 0"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "may have 1024 tokens, not 1025"),
        ({"echo": True, "logprobs": 20, "n": 64}, "log-probabilities of prompts are too many"),
        ({"prompt_logprobs": 20, "n": 64}, "ask for fewer, at most 524288"),
    ],
)
def test_lists_that_are_too_long(client: TestClient, fields: dict[str, Any], named: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": [1] * (CONTEXT - 20), **fields})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert client.post("/detokenize", json={"tokens": [1] * (2**18 + 1)}).status_code == 400


def test_answers_to_one_prompt_share_its_bias(fake: ServedModel, scheduler: FakeScheduler) -> None:
    bias = {str(token): 1.0 for token in range(100)}
    client_of(fake).post("/v1/completions", json={"prompt": "x", "n": 3, "seed": 1, "logit_bias": bias})
    first, *others = [asked.request for asked in scheduler.asked]
    assert len(others) == 2
    for other in others:
        assert other.params.logit_bias is first.params.logit_bias and other.prompt is first.prompt
        assert other.params.seed != first.params.seed


def test_an_error_that_nobody_expected_is_counted_and_told_without_its_details(
    fake: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(assembler: TextAssembler, token: int) -> str:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(TextAssembler, "push", broken)
    client, ask = client_of(fake, settings=AppSettings(origins=["http://page"])), {"origin": "http://page"}
    for is_streamed in (False, True):
        answer = client.post("/v1/completions", json={"prompt": "x", "stream": is_streamed}, headers=ask)
        assert answer.status_code == (200 if is_streamed else 500)
        assert "internal_error" in answer.text and "secret" not in answer.text
        assert answer.headers["access-control-allow-origin"] == "http://page"
    assert "a secret" in caplog.text
    counted = 'picompile_http_responses_total{path="/v1/completions",status="500"} 1.0'
    assert counted in client.get("/metrics").text


def test_a_client_that_takes_nothing_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING_S", 0.05)
    monkeypatch.setattr(stream, "STALLED_S", 0.2)
    model = fake_model([72] * 10**6)
    scheduler: Any = model.scheduler
    scheduler.delay_s = 0.005
    request = {"prompt": "x", "stream": True, "max_tokens": 10**6, "n": 16, "logprobs": 20}
    with (
        serving_thread(client_of(model).app) as url,
        httpx.Client(base_url=url, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=request),
    ):
        while len(scheduler.asked) < 16 or scheduler.running:
            time.sleep(0.01)
        # Nobody has closed the connection, and no answer has come to its end.
        assert all(answer.cancelled.is_set() for answer in scheduler.asked)


def test_a_body_that_does_not_come_is_not_waited_for(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PATIENCE_S", 0.1)

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": '
        time.sleep(1)
        yield b'"x"}'

    headers = {"content-type": "application/json"}
    with serving_thread(client.app) as url:
        try:
            answer = httpx.post(f"{url}/v1/completions", content=parts(), headers=headers, timeout=30)
        except httpx.TransportError:  # it was closed while the rest was sent
            return
    assert answer.status_code == 408 and "did not come within" in answer.json()["error"]["message"]
