"""Answers that must have a form, against a real server; and whose fault it is if one cannot go on."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler
from helpers.serving_process import ServingProcess
from picompile_runtime import RequestError
from picompile_runtime.serving.http import grammars

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
HELLO = [{"role": "user", "content": "Hi"}]


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"a", "b"} and value["b"] in ("x", "y") and 0 <= value["a"] <= 99


def post(server: ServingProcess, path: str, **body: Any) -> Any:
    seed = {} if path == "/v1/responses" else {"seed": 3}
    answer = httpx.post(f"{server.url}{path}", json={**seed, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NAMED},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_json_of_a_schema(server: ServingProcess, fields: Any) -> None:
    made = post(server, "/v1/completions", prompt="x", max_tokens=100, **fields)["choices"][0]
    assert made["finish_reason"] == "stop" and is_of_schema(made["text"])
    chat = post(server, "/v1/chat/completions", messages=HELLO, **fields)["choices"][0]
    assert chat["finish_reason"] == "stop" and is_of_schema(chat["message"]["content"])


def test_other_forms(server: ServingProcess) -> None:
    for fields, pattern in (
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a"~3'}}, "a{3}"),
        ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ):
        made = post(server, "/v1/completions", prompt="x", n=3, max_tokens=40, **fields)
        assert all(re.fullmatch(pattern, choice["text"]) for choice in made["choices"]), pattern
    form = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    assert post(server, "/v1/responses", input="Hi", text=form)["text"]["format"]["schema"] == SCHEMA


def test_forms_that_make_no_sense(server: ServingProcess) -> None:
    for fields in (
        {"structured_outputs": {"regex": "[.*"}},
        {"structured_outputs": {"grammar": "root ::= nothing"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 123}}}},
        {"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}},
        {"grammar": "root ::= ("},
        {"structured_outputs": {"json": {"properties": {"foo": "bar"}}}},
    ):
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **fields})
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"], fields


def test_an_answer_that_its_grammar_ends_is_the_requests_fault(
    client: TestClient, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def allowed(self) -> None:
            raise RequestError("no token continues the grammar")

        def accept(self, token: int) -> bool:
            return False

    monkeypatch.setattr(grammars, "_compile", lambda body, compiler: Broken)
    said = scheduler.says

    def fail(request: Any) -> Any:
        with pytest.raises(RequestError):
            request.grammar().allowed()
        scheduler.failure = "no token continues the grammar"
        return said(request)

    scheduler.says = fail
    answer = client.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"regex": "a"}})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "grammar_failed"
    assert error["message"] == "no token continues the grammar"
