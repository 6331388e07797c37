"""Requests that make no sense: each has one readable error in OpenAI's form, and none is the server's fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from helpers.fake_serving import CONTEXT, FakeScheduler, client_of, fake_model
from picompile_runtime.serving.http.app import AppSettings
from picompile_runtime.serving.http.openapi import OPERATIONS

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hi"}]
POSTS = [operation.path for operation in OPERATIONS if operation.body is not None]


def error_of(answer: Any, status: int) -> Any:
    assert answer.status_code == status, answer.text
    (name,) = answer.json()
    assert name == "error"
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "Missing required parameter: 'prompt'."),
        ({"prompt": None}, "prompt", "prompt must be a text, a list of token ids, or a list of either, and not empty"),
        ({"prompt": []}, "prompt", "prompt must be"),
        ({"prompt": [1, "a"]}, "prompt", "prompt must be"),
        ({"prompt": [[]]}, "prompt", "prompt must be"),
        ({"prompt": [True]}, "prompt", "prompt must be"),
        ({"prompt": ["a"] * 129}, "prompt", "a request may have 128 prompts, not 129"),
        ({"prompt": ""}, "prompt", "the prompt is empty, and this model has no token that begins a text"),
        ({"prompt": [10**6]}, "prompt", "tokens must be integers from 0 to"),
        ({"prompt": [-1]}, "prompt", "tokens must be integers from 0 to"),
        ({"prompt": "x", "n": 0}, "n", "n: should be greater than or equal to 1, not 0"),
        ({"prompt": "x", "n": "5"}, "n", "n: should be a valid integer, not '5'"),
        ({"prompt": "x", "n": 2.0}, "n", "n: should be a valid integer, not 2.0"),
        ({"prompt": "x", "n": True}, "n", "n: should be a valid integer, not True"),
        ({"prompt": ["x"] * 65, "n": 2}, None, "a request may have 128 answers, not 65 × 2"),
        ({"prompt": "x", "best_of": 2}, None, "best_of must be n"),
        ({"prompt": "x", "temperature": 2.1}, "temperature", "temperature: should be less than or equal to 2, not 2.1"),
        ({"prompt": "x", "top_p": -0.1}, "top_p", "top_p: should be greater than or equal to 0"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "presence_penalty: should be less than"),
        ({"prompt": "x", "seed": 2**63}, "seed", "seed: should be less than"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "max_tokens: should be greater"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs: should be less than or equal to 20, not 21"),
        ({"prompt": "x", "stop": ""}, "stop", "stop must be a text or a list of at most 16 texts"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop", "stop must be a text or a list of at most 16 texts"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "stop must be a text or a list of at most 16 texts"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "logit_bias must map token ids to numbers"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "logit_bias must map token ids to numbers"),
        ({"prompt": "x", "stream_options": {}}, None, "stream_options can only be given with stream"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported; the model only continues texts"),
        ({"prompt": "x", "guided_json": {"a": 1}}, "guided_json", "guided_json is not supported; use response_format"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search", "use_beam_search is not supported; leave it out"),
        ({"prompt": "x", "min_tokens": 1}, "min_tokens", "min_tokens is not supported"),
        (
            {"prompt": "x", "max_completion_tokens": 1},
            "max_completion_tokens",
            "max_completion_tokens is not supported",
        ),
        (
            {"prompt": "x", "repetition_penalty": 1.1, "repeat_penalty": 1.2},
            None,
            "repetition_penalty and repeat_penalty",
        ),
        ({"prompt": "x", "response_format": {"type": "sound"}}, "response_format", "response_format: tag 'sound'"),
        (
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "Missing required parameter: 'response_format.json_schema.schema'.",
        ),
        (
            {"prompt": "x", "structured_outputs": {}},
            "structured_outputs",
            "structured_outputs must have exactly one of",
        ),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs are not streamed"),
    ],
)
def test_completions_that_make_no_sense(client: TestClient, fields: Any, param: str | None, message: str) -> None:
    error = error_of(client.post(COMPLETIONS, json=fields), 400)
    assert error["message"].startswith(message) and error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "messages", "Missing required parameter: 'messages'."),
        ({"messages": "Hi"}, "messages", "messages: should be a valid list, not 'Hi'"),
        ({"messages": []}, "messages", "messages: list should have at least 1 item"),
        ({"messages": [123]}, "messages[0]", "messages[0]: should be an object, not 123"),
        ({"messages": [{}]}, "messages[0].role", "Missing required parameter: 'messages[0].role'."),
        ({"messages": [{"role": "cook", "content": "x"}]}, "messages[0].role", "messages[0].role: should be 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "a message needs content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "the content of a message must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "a part of type 'image_url' is not supported: the model reads text alone",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, None, "top_logprobs can only be given with logprobs"),
        ({"messages": HELLO, "logprobs": 2}, "logprobs", "logprobs: should be a valid boolean, not 2"),
        (
            {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2},
            None,
            "max_tokens and max_completion_tokens",
        ),
        ({"messages": HELLO, "tool_choice": "required"}, None, "tool_choice can only be given with tools"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities", "modalities is not supported"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions", "functions is not supported; use tools"),
        ({"messages": HELLO, "web_search_options": {"a": 1}}, "web_search_options", "web_search_options is not"),
        ({"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort", "reasoning_effort is not supported"),
        ({"messages": HELLO, "tools": [{"type": "x"}]}, "tools[0].type", "tools[0].type: should be 'function'"),
    ],
)
def test_chats_that_make_no_sense(client: TestClient, fields: Any, param: str | None, message: str) -> None:
    error = error_of(client.post(CHAT, json=fields), 400)
    assert error["message"].startswith(message) and error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, None),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "seed": 1}, "seed"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ],
)
def test_responses_that_make_no_sense(client: TestClient, fields: Any, param: str | None) -> None:
    assert error_of(client.post(RESPONSES, json=fields), 400)["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "cache_prompt": False},
        {"suffix": "", "best_of": 1, "min_tokens": 0, "use_beam_search": False, "guided_json": None, "grammar": ""},
        {"a name that no server has": {"x": [1]}, "logit_bias": {}, "stop": [], "length_penalty": 1.0},
    ],
)
def test_what_asks_for_nothing_is_ignored(client: TestClient, fields: Any) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "x", **fields}).status_code == 200


def test_an_unknown_model(client: TestClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO}), (RESPONSES, {"input": "x"})):
        error = error_of(client.post(path, json={**body, "model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model") and "'fake'" in error["message"]
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_a_prompt_that_does_not_fit(client: TestClient) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * CONTEXT}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}),
    ):
        error = error_of(client.post(path, json={**body, "stream": True}), 400)
        assert error["code"] == "context_length_exceeded" and error["n_ctx"] == CONTEXT <= error["n_prompt_tokens"]
    # A text that is far too long is not even cut into tokens.
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * 10**6}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}),
    ):
        error = error_of(client.post(path, json=body), 400)
        assert error["message"].startswith("a prompt of 1000000 characters does not fit")
        assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > CONTEXT
    # Without an answer, the whole context is for the prompt.
    fitting = {"prompt": "x" * CONTEXT, "max_tokens": 0, "echo": True}
    assert client.post(COMPLETIONS, json=fitting).status_code == 200


def test_a_full_queue(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.most_waiting = 1
    scheduler.gate.clear()
    answer = client.post(COMPLETIONS, json={"prompt": "x", "n": 2})
    error = error_of(answer, 429)
    assert (
        error["code"] == "queue_full" and error["type"] == "rate_limit_error" and answer.headers["retry-after"] == "1"
    )
    # The one that was taken does not go on for nobody.
    assert scheduler.asked[0].cancelled.wait(10)


def test_a_server_that_ends(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.is_closed = True
    assert error_of(client.post(COMPLETIONS, json={"prompt": "x"}), 503)["code"] == "shutting_down"
    client.app.state.models.is_draining = True  # type: ignore[attr-defined]
    answer = client.post(CHAT, json={"messages": HELLO})
    assert error_of(answer, 503)["code"] == "shutting_down" and answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'{"prompt": NaN}', "the body is not valid JSON"),
        (b'{"prompt": "\\ud800"}', "the body is not valid JSON"),
        (b'{"prompt": "\xff"}', "the body is not valid JSON"),
        (b"[" * 5000 + b"]" * 5000, "the body is not valid JSON: recursion limit exceeded"),
        (b'{"seed": 1' + b"0" * 9999 + b"}", "the body is not valid JSON"),
    ],
)
def test_bodies_that_are_no_json_object(client: TestClient, path: str, body: bytes, message: str) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    error = error_of(answer, 400)
    assert error["code"] == "invalid_json" and error["message"].startswith(message)


@pytest.mark.parametrize(
    "value",
    ["1e999", "-1e999", '{"a": {"b": [1e999]}}', '"' + "\\u0000" * 50 + '"', "9" * 400, '{"": ""}', "[[[[]]]]", "-0.0"],
)
@pytest.mark.parametrize("field", ["temperature", "prompt", "logit_bias", "seed", "stop", "json_schema", "n", "model"])
def test_strange_values_are_never_the_servers_fault(client: TestClient, field: str, value: str) -> None:
    body = f'{{"prompt": "x", "max_tokens": 1, "{field}": {value}}}'
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    json.loads(answer.text)


FIELDS = [
    *("prompt", "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "echo"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("logit_bias", "presence_penalty", "ignore_eos", "input", "instructions", "text", "metadata", "content", "tokens"),
]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(path=st.sampled_from(POSTS), body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5))
def test_no_body_is_the_servers_fault(path: str, body: Any) -> None:
    client = client_of(fake_model("ok"))
    fitting = {"prompt": "x", "messages": HELLO, "input": "x", "content": "x", "tokens": [1]}
    for each in (body, {**fitting, **body}):
        answer = client.post(path, json=each)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error_of(answer, answer.status_code)


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_other_types_of_bodies(client: TestClient, media: str) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": media})
    assert "application/json" in error_of(answer, 415)["message"]


def test_types_with_parameters_are_json(client: TestClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers).status_code == 200
    headers["content-encoding"] = "gzip"
    error_of(client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 415)


@pytest.mark.parametrize("has_length", [True, False])
def test_bodies_that_are_too_large(fake: Any, has_length: bool) -> None:
    client = client_of(fake, settings=AppSettings(most_body_bytes=1000))
    body = b'{"prompt": "' + b"x" * 200 + b'"}'
    headers = {"content-type": "application/json"}
    assert client.post(COMPLETIONS, content=body, headers=headers).status_code == 200

    large = body.replace(b"x", b"xxxxxx")
    content = large if has_length else iter([large[:500], large[500:]])
    assert error_of(client.post(COMPLETIONS, content=content, headers=headers), 413)["code"] == "body_too_large"


def test_paths_and_methods_that_there_are_not(client: TestClient) -> None:
    assert error_of(client.get("/v2/models"), 404)["code"] == "not_found"
    assert error_of(client.get("/v1/models/"), 404)["code"] == "model_not_found"
    answer = client.get(COMPLETIONS)
    assert error_of(answer, 405)["code"] == "method_not_allowed" and answer.headers["allow"] == "POST"
    assert error_of(client.delete("/v1/models"), 405)["code"] == "method_not_allowed"
