"""A line for each request: what was asked, of which model, how it was answered, and how much it took."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import client_of, fake_model
from picompile_server.http.app import AppSettings

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def client(lines: list[str]) -> TestClient:
    return client_of(fake_model(), settings=AppSettings(keys=["sesame"], log=lines.append))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "n": 2}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_has_its_model_and_tokens(
    client: TestClient, lines: list[str], path: str, body: dict[str, object], is_streamed: bool
) -> None:
    headers = {"x-api-key": "sesame"}
    answer = client.post(path, json={**body, "stream": is_streamed}, headers=headers)
    assert answer.status_code == 200
    (line,) = lines
    found = re.fullmatch(
        rf"\d\d:\d\d:\d\d POST {path} 200 fake: (\d+) tokens in \(0 cached\), (\d+) out, \d+\.\d\d s", line
    )
    assert found is not None, line
    if not is_streamed:
        usage = answer.json()["usage"]
        read, made = (usage.get(f"{old}_tokens", usage.get(f"{new}_tokens")) for old, new in
                      (("prompt", "input"), ("completion", "output")))  # fmt: skip
        assert found.groups() == (str(read), str(made))


def test_other_requests_have_a_line_and_probes_have_none(client: TestClient, lines: list[str]) -> None:
    headers = {"x-api-key": "sesame"}
    client.get("/health")
    client.get("/metrics", headers=headers)
    assert lines == []
    client.get("/v1/models?key=secret", headers=headers)
    client.get("/v1/models")
    client.post("/v1/completions", json={"model": "other", "prompt": "x"}, headers=headers)
    client.post("/tokenize", json={"content": "x"}, headers=headers)
    client.get("/a%0Ab%1B", headers=headers)
    said = [re.sub(r"^\d\d:\d\d:\d\d (.*) \d\.\d\d s(.{,28}).*$", r"\1\2", line) for line in lines]
    assert said == [
        "GET /v1/models 200",
        "GET /v1/models 401: give an API key, in the he",
        "POST /v1/completions 404: The model 'other' does not",
        "POST /tokenize 200 fake:",
        r"GET /a\nb\x1b 404: GET /ab?: Not Found",
    ]


def test_an_error_has_a_line(lines: list[str]) -> None:
    model = fake_model()
    model.scheduler.failure = "it broke"  # type: ignore[attr-defined]
    client = client_of(model, settings=AppSettings(log=lines.append))
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 500
    assert " POST /v1/chat/completions 500 fake: " in lines[0] and lines[0].endswith(" s: the model failed: it broke")


def test_what_was_wrong_is_one_short_line(client: TestClient, lines: list[str]) -> None:
    name = "a\n\x1b[31m" + "x" * 1000
    client.post("/v1/completions", json={"model": name, "prompt": "x"}, headers={"x-api-key": "sesame"})
    assert lines[0].isprintable() and len(lines[0]) < 300
