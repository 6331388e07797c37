"""Answers that do not end as they should: clients that go away, models that fail, streams without a word for long."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler, streamed, text_tokens
from helpers.serving_process import serving_thread
from picompile_runtime.serving.http import stream

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


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
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


@pytest.mark.parametrize("behind", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_goes_away_before_the_first_token(
    url: str, scheduler: FakeScheduler, is_streamed: bool, behind: bytes
) -> None:
    """It may have sent more than its request."""
    scheduler.gate.clear()
    connection = ask(url, "/v1/completions", {"stream": is_streamed, "prompt": "Hi"})
    wait_until(lambda: scheduler.asked)
    if behind:
        connection.sendall(behind)
        time.sleep(0.1)
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
