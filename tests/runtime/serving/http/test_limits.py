"""One request takes no more than its part of the server's time and memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import CONTEXT, FakeScheduler, client_of, fake_model
from helpers.serving_process import serving_thread
from picompile_runtime.serving.http import body, stream
from picompile_runtime.serving.http.app import AppSettings
from picompile_runtime.serving.model import ServedModel
from picompile_runtime.serving.scheduler import QueueFullError
from picompile_runtime.serving.text import TextAssembler
from picompile_runtime.serving.workers import Workers

LONG = "a text that is cut into tokens on another thread, since it has more than so many letters. " * 4


def test_workers_do_what_they_are_given_and_refuse_what_would_wait_too_long() -> None:
    workers, gate = Workers("test", 1, 2), threading.Event()

    async def run() -> list[Any]:
        waiting = [asyncio.ensure_future(workers.run(gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait to be prepared already"):
            await workers.run(gate.wait)
        gate.set()
        found = await asyncio.gather(*waiting)
        return [*found, await workers.run(max, 1, 2)]

    assert asyncio.run(run()) == [True, True, True, 2]
    workers.close()


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
