"""The OpenAPI document is correct: it names every route, and what really comes back is what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import client_of, fake_model
from picompile_server.http.app import AppSettings
from picompile_server.http.openapi import OPERATIONS, document

HELLO = [{"role": "user", "content": "Hi"}]


def check(answer: Any, path: str) -> None:
    """Hold an answer to the document: its status, its type, and its content."""
    (operation,) = document()["paths"][path].values()
    responses = operation["responses"]
    assert str(answer.status_code) in responses, answer.text
    contents: Mapping[str, Any] = responses[str(answer.status_code)]["content"]
    media = answer.headers["content-type"].partition(";")[0]
    assert media in contents
    if media == "application/json":
        schema = {**contents[media]["schema"], "components": document()["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


def test_every_route_is_in_the_document(client: TestClient) -> None:
    routes = {route.path.replace(":path", ""): route.methods for route in client.app.routes}  # type: ignore[attr-defined]
    paths = client.get("/openapi.json").json()["paths"]
    assert paths.keys() == routes.keys() == {operation.path for operation in OPERATIONS}
    for path, methods in routes.items():
        assert {method.upper() for method in paths[path]} == methods - {"HEAD"}


def test_schemas_are_schemas_and_references_lead_somewhere() -> None:
    schemas = document()["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document()))
    assert named and set(named) <= schemas.keys()


COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        (COMPLETION, [{"logprobs": 2, "echo": True, "n": 2, "prompt_logprobs": 1}, {}, {"stream": True}]),
        (CHAT, [{"logprobs": True, "top_logprobs": 2, "n": 2}, {}, {"stream": True}]),
        (RESPONSE, [{"text": {"format": {"type": "text"}}}, {"max_output_tokens": 1}, {"stream": True}]),
        (MESSAGES, [{"max_tokens": 1}, {"max_tokens": 20, "stop_sequences": ["w"]}, {"max_tokens": 1, "stream": True}]),
        (f"{MESSAGES}/count_tokens", [{}]),
        ("/tokenize", [{"content": "Hé", "with_pieces": True}, {"prompt": "Hé", "return_token_strs": True}]),
        ("/detokenize", [{"tokens": [5]}]),
    ],
)
def test_answers_are_as_documented(client: TestClient, path: str, bodies: Any) -> None:
    chats = {key: {"messages": HELLO} for key in (CHAT, MESSAGES, f"{MESSAGES}/count_tokens")}
    asking = {COMPLETION: {"prompt": "Hi"}, RESPONSE: {"input": "Hi"}, **chats}
    for body in bodies:
        answer = client.post(path, json={**asking.get(path, {}), **body})
        assert answer.status_code == 200, answer.text
        check(answer, path)


def test_pages_are_as_documented(client: TestClient) -> None:
    for operation in OPERATIONS:
        if operation.body is None:
            answer = client.get(operation.path.format(model="fake"))
            assert answer.status_code == 200, answer.text
            check(answer, operation.path)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_errors_are_as_documented(operation: Any) -> None:
    path = operation.path
    method = "GET" if operation.body is None else "POST"
    ask = {"method": method, "url": path.format(model="fake"), "json": {} if method == "POST" else None}
    for settings in ({"hosts": ("here",)}, {"keys": ("key",)}):
        check(client_of(fake_model(), settings=AppSettings(**settings)).request(**ask), path)
    check(client_of(names=("fake",)).request(**ask), path)  # while the model is loaded
    if method == "GET":
        check(client_of(fake_model()).get(path.format(model="nothing")), path)
        return
    client = client_of(fake_model(), settings=AppSettings(most_body_bytes=100))
    for body in ({"json": {}}, {"content": b"{}"}, {"json": {"x": "y" * 100}}):
        check(client.post(path, **body), path)
    fields = {"model": "nothing", "prompt": "x", "input": "x", "messages": HELLO, "tokens": [], "max_tokens": 1}
    fields = {key: value for key, value in fields.items() if key in operation.body.model_fields}
    if path == "/tokenize":
        del fields["messages"]
    answer = client.post(path, json=fields)
    assert answer.status_code == 404
    check(answer, path)
