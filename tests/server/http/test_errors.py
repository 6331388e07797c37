"""Requests that are refused: each has one readable error in OpenAI's form, and none is the server's fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from helpers.fake_serving import CONTEXT, FakeScheduler, client_of, fake_model
from picompile_server.http.app import AppSettings
from picompile_server.http.guard import allowed_hosts, is_loopback
from picompile_server.http.openapi import OPERATIONS

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
HELLO = [{"role": "user", "content": "Hi"}]
FITTING = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": HELLO}, RESPONSES: {"input": "x"}}
FITTING[MESSAGES] = {"messages": HELLO, "max_tokens": 5}
POSTS = [operation.path for operation in OPERATIONS if operation.body is not None]
JSON = {"content-type": "application/json"}


def error_of(answer: Any, status: int) -> Any:
    assert answer.status_code == status, answer.text
    (name,) = answer.json()
    assert name == "error"
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"] and "\n" not in error["message"]
    return error


ADD = {"type": "function", "function": {"name": "add"}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
OUTPUT = {"type": "function_call_output", "call_id": "c1"}
# The values of a field that are refused, by the path and the field that the error names.
WRONG: dict[tuple[str, str], list[Any]] = {
    (COMPLETIONS, "prompt"): [None, [], [1, "a"], [[]], [True], ["a"] * 129, "", [10**6], [-1]],
    (COMPLETIONS, "n"): [0, "5", 2.0, True],
    (COMPLETIONS, "temperature"): [2.1],
    (COMPLETIONS, "top_p"): [-0.1],
    (COMPLETIONS, "presence_penalty"): [3],
    (COMPLETIONS, "seed"): [2**63],
    (COMPLETIONS, "max_tokens"): [-2],
    (COMPLETIONS, "logprobs"): [21],
    (COMPLETIONS, "stop"): ["", ["a", 1], ["a"] * 17],
    (COMPLETIONS, "logit_bias"): [{"a": 1}, {"1": 101}],
    (COMPLETIONS, "suffix"): ["y"],
    (COMPLETIONS, "min_tokens"): [1],
    (COMPLETIONS, "n_predict"): ["5", -2],
    (CHAT, "max_tokens"): [0, -2],
    (COMPLETIONS, "response_format"): [{"type": "sound"}],
    (COMPLETIONS, "response_format.json_schema.schema"): [{"type": "json_schema", "json_schema": {}}],
    (COMPLETIONS, "structured_outputs"): [{}],
    (CHAT, "messages"): ["Hi", []],
    (CHAT, "messages[0]"): [[123], [{"role": "user"}]],
    (CHAT, "messages[0].role"): [[{}], [{"role": "cook", "content": "x"}]],
    (CHAT, "messages[0].content"): [[{"role": "user", "content": 1}], [{"role": "user", "content": [IMAGE]}]],
    (CHAT, "messages[1]"): [
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So", name: value}]
        for name, value in (("prefix", True), ("partial", True), ("function_call", {"name": "f"}))
    ],
    (CHAT, "enable_thinking"): [True],
    (CHAT, "thinking"): [{"type": "enabled"}],
    (CHAT, "messages[0].tool_calls[0]"): [[{"role": "assistant", "tool_calls": [0] * 1000}]],
    (CHAT, "logprobs"): [2],
    (CHAT, "modalities"): [["text", "audio"]],
    (CHAT, "functions"): [[{"name": "f"}]],
    (CHAT, "reasoning_effort"): ["enormous", 5],
    (CHAT, "reasoning_format"): ["xml"],
    (CHAT, "include_reasoning"): [False],
    (CHAT, "add_special_tokens"): [True],
    (CHAT, "adaptive_target"): [0.5, 0],
    (COMPLETIONS, "repetition_detection"): [{"max_pattern_size": 20, "min_count": 3}],
    (CHAT, "tools[0].type"): [[{"type": "x"}]],
    (CHAT, "tools[0].function.name"): [
        [{"type": "function", "function": {"name": name}}] for name in ("a b", "", "a" * 65, "a\n", None)
    ],
    (CHAT, "tools[0].function.description"): [[{"type": "function", "function": {"name": "a", "description": 5}}]],
    (CHAT, "tools[0].function.parameters"): [[{"type": "function", "function": {"name": "a", "parameters": []}}]],
    (CHAT, "tools"): ["abc", {"a": 1}, [ADD] * 129],
    (CHAT, "tool_choice"): ["sometimes"],
    (CHAT, "tool_choice.allowed_tools"): [{"type": "allowed_tools"}],
    (CHAT, "tool_choice.allowed_tools.mode"): [{"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}],
    (CHAT, "truncate_prompt_tokens"): [3],
    (CHAT, "return_token_ids"): [True],
    (RESPONSES, "input[0]"): [[{"type": kind, "id": "x"}] for kind in ("item_reference", "web_search_call", 5)],
    (RESPONSES, "input[0].call_id"): [[{"type": "function_call_output", "output": "x"}]],
    (RESPONSES, "input[1].output"): [[{"role": "user", "content": "x"}, {**OUTPUT, "output": [IMAGE]}]],
    (RESPONSES, "input[0].role"): [[{"role": "cook", "content": "x"}]],
    (RESPONSES, "input[0].content"): [[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]],
    (RESPONSES, "input[0].summary"): [[{"type": "reasoning", "summary": "x"}]],
    (RESPONSES, "previous_response_id"): ["resp_1"],
    (RESPONSES, "conversation"): ["conv_1"],
    (RESPONSES, "background"): [True],
    (RESPONSES, "truncation"): ["auto"],
    (RESPONSES, "include"): [["message.output_text.logprobs"], "x"],
    (RESPONSES, "reasoning.effort"): [{"effort": "enormous"}],
    (RESPONSES, "tools[0].name"): [[{"type": "function", "name": name}] for name in ("a b", "", None)],
    (RESPONSES, "tools[0].type"): [[{"type": 5}], [{"name": "add"}]],
    (RESPONSES, "tool_choice"): ["sometimes"],
    (RESPONSES, "tool_choice.type"): [{"type": "web_search", "name": "x"}],
    (RESPONSES, "tool_choice.mode"): [{"type": "allowed_tools", "tools": [{"type": "function", "name": "add"}]}],
    (RESPONSES, "tool_choice.tools"): [{"type": "allowed_tools", "mode": "auto", "tools": []}],
    (RESPONSES, "tool_choice.tools[0]"): [{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}],
    (RESPONSES, "seed"): [1],
    (MESSAGES, "messages[0].content[0].type"): [[{"role": "user", "content": [{"type": "image", "source": {}}]}]],
    (MESSAGES, "messages[0].role"): [[{"role": "cook", "content": "x"}]],
    (MESSAGES, "max_tokens"): [0, None],
    (MESSAGES, "stop_sequences"): [[""]],
    (MESSAGES, "tools[0].name"): [[{"name": "a b"}]],
    (MESSAGES, "mcp_servers"): [[{"type": "url"}]],
    (RESPONSES, "text.verbosity"): [{"verbosity": "endless"}],
    (RESPONSES, "text.format.schema"): [{"format": {"type": "json_schema", "name": "n"}}],
}


@pytest.mark.parametrize(("path", "param"), WRONG)
def test_a_wrong_value_is_refused_and_its_field_is_named(client: TestClient, path: str, param: str) -> None:
    field = param.partition("[")[0].partition(".")[0]
    for value in WRONG[path, param]:
        error = error_of(client.post(path, json={**FITTING[path], field: value}), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", param), value


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (COMPLETIONS, {"prompt": ["x"] * 65, "n": 2}, "128 answers"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options"),
        (COMPLETIONS, {"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty and repeat_penalty"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens, max_completion_tokens and n_predict"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [ADD], "response_format": {"type": "json_object"}}, "an answer can have a form or call tools"),
        (RESPONSES, {"input": ""}, ""),
        (MESSAGES, {"tool_choice": {"type": "any"}, "tools": [{"type": "web_search_1", "name": "s"}]}, "client's own"),
        (RESPONSES, {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "a tool of type function"),
        (
            RESPONSES,
            {"tools": [ADD["function"] | {"type": "function"}], "text": {"format": {"type": "json_object"}}},
            "",
        ),
        ("/tokenize", {"prompt": "x", "tools": [ADD]}, "tools"),
    ],
)
def test_fields_that_do_not_go_together(client: TestClient, path: str, fields: Any, named: str) -> None:
    error = error_of(client.post(path, json={**FITTING.get(path, {}), **fields}), 400)
    assert error["param"] is None and named in error["message"]


def test_a_field_that_is_needed_is_named(client: TestClient) -> None:
    for path, body in FITTING.items():
        assert error_of(client.post(path, json={}), 400)["param"] == next(iter(body))


def test_what_asks_for_nothing_is_ignored(client: TestClient) -> None:
    fields = {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "cache_prompt": False}
    fields |= {
        "suffix": "",
        "best_of": 1,
        "min_tokens": 0,
        "use_beam_search": False,
        "guided_json": None,
        "grammar": "",
    }
    fields |= {"a name that no server has": {"x": [1]}, "logit_bias": {}, "stop": [], "length_penalty": 1.0}
    assert client.post(COMPLETIONS, json={"prompt": "x", **fields}).status_code == 200


def test_what_asks_a_chat_for_nothing_is_ignored(client: TestClient) -> None:
    fields = {"include_reasoning": True, "add_special_tokens": False, "adaptive_target": -0.5, "reasoning_effort": None}
    fields |= {"repetition_detection": {"max_pattern_size": 0}}
    assert client.post(CHAT, json={"messages": HELLO, **fields}).status_code == 200


def test_an_unknown_model(client: TestClient) -> None:
    for path, body in FITTING.items():
        error = error_of(client.post(path, json={**body, "model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model") and "'fake'" in error["message"]
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_a_prompt_that_does_not_fit(client: TestClient) -> None:
    for length in (CONTEXT, 10**6):  # a text that is far too long is not even cut into tokens
        text = "x" * length
        described = {"type": "function", "function": {"name": "add", "description": text}}
        called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": f'"{text}"'}}
        for path, body in (
            (COMPLETIONS, {"prompt": text, "stream": True}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            (CHAT, {"messages": HELLO, "tools": [described]}),
            (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [called]}]}),
        ):
            error = error_of(client.post(path, json=body), 400)
            assert error["code"] == "context_length_exceeded" and error["n_ctx"] == CONTEXT <= error["n_prompt_tokens"]
    error = error_of(client.post(CHAT, json={"messages": HELLO, "chat_template_kwargs": {"text": "x" * 10**6}}), 400)
    assert error["code"] == "context_length_exceeded"
    # Without an answer, the whole context is for the prompt.
    fitting = {"prompt": "x" * CONTEXT, "max_tokens": 0, "echo": True}
    assert client.post(COMPLETIONS, json=fitting).status_code == 200


def test_a_full_queue(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.most_waiting = 1
    scheduler.gate.clear()
    answer = client.post(COMPLETIONS, json={"prompt": "x", "n": 2})
    error = error_of(answer, 429)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error") and answer.headers["retry-after"] == "1"
    # The one that was taken does not go on for nobody.
    assert scheduler.asked[0].cancelled.wait(10)


def test_a_server_that_ends(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.is_closed = True
    assert error_of(client.post(COMPLETIONS, json={"prompt": "x"}), 503)["code"] == "shutting_down"
    client.app.state.models.is_draining = True  # type: ignore[attr-defined]
    answer = client.post(CHAT, json={"messages": HELLO})
    assert error_of(answer, 503)["code"] == "shutting_down" and answer.headers["retry-after"] == "1"


NO_JSON = [b"", b"{", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"[" * 5000 + b"]" * 5000]
NO_JSON += [b'{"seed": 1' + b"0" * 9999 + b"}"]


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_json_object(client: TestClient, path: str) -> None:
    for body in (*NO_JSON, b"[]", b"null"):
        error = error_of(client.post(path, content=body, headers=JSON), 400)
        assert error["code"] == "invalid_json"
        assert error["message"].startswith("the body is not valid" if body in NO_JSON else "the body must be")


@pytest.mark.parametrize(
    "value",
    ["1e999", "-1e999", '{"a": {"b": [1e999]}}', '"' + "\\u0000" * 50 + '"', "9" * 400, '{"": ""}', "[[[[]]]]", "-0.0"],
)
def test_strange_values_are_never_the_servers_fault(client: TestClient, value: str) -> None:
    for field in ("temperature", "prompt", "logit_bias", "seed", "stop", "json_schema", "n", "model"):
        body = f'{{"prompt": "x", "max_tokens": 1, "{field}": {value}}}'
        answer = client.post(COMPLETIONS, content=body, headers=JSON)
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


@settings(max_examples=50)
@given(path=st.sampled_from(POSTS), body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5))
def test_no_body_is_the_servers_fault(path: str, body: Any) -> None:
    client = client_of(fake_model("ok"))
    fitting = {"prompt": "x", "messages": HELLO, "input": "x", "content": "x", "tokens": [1]}
    for each in (body, {**fitting, **body}):
        answer = client.post(path, json=each)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error_of(answer, answer.status_code)


def test_types_of_bodies(client: TestClient) -> None:
    body = b'{"prompt": "x"}'
    for media in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        answer = client.post(COMPLETIONS, content=body, headers={"content-type": media})
        assert "application/json" in error_of(answer, 415)["message"]
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post(COMPLETIONS, content=body, headers=headers).status_code == 200
    error_of(client.post(COMPLETIONS, content=body, headers={**headers, "content-encoding": "gzip"}), 415)


def test_bodies_that_are_too_large(fake: Any) -> None:
    client = client_of(fake, settings=AppSettings(most_body_bytes=1000))
    body = b'{"prompt": "' + b"x" * 200 + b'"}'
    assert client.post(COMPLETIONS, content=body, headers=JSON).status_code == 200
    large = body.replace(b"x", b"xxxxxx")
    for content in (large, iter([large[:500], large[500:]])):  # the second does not tell its length
        assert error_of(client.post(COMPLETIONS, content=content, headers=JSON), 413)["code"] == "body_too_large"


def test_paths_and_methods_that_there_are_not(client: TestClient) -> None:
    assert error_of(client.get("/v2/models"), 404)["code"] == "not_found"
    assert error_of(client.get("/v1/models/"), 404)["code"] == "model_not_found"
    answer = client.get(COMPLETIONS)
    assert error_of(answer, 405)["code"] == "method_not_allowed" and answer.headers["allow"] == "POST"
    assert error_of(client.delete("/v1/models"), 405)["code"] == "method_not_allowed"


# Keys, names of hosts, and pages of other origins.

KEYS = ("first-key", "second-key")
OPEN = ("/", "/health")


def guarded(**settings: object) -> TestClient:
    return client_of(fake_model(), settings=AppSettings(**settings))  # type: ignore[arg-type]


def test_all_but_the_page_and_health_need_a_key() -> None:
    client = guarded(keys=KEYS)
    assert {client.get(path).status_code for path in OPEN} == {200}
    paths = {operation.path.replace("{model}", "fake") for operation in OPERATIONS}
    for path in (paths | {"/nothing"}) - {*OPEN}:
        answer = client.get(path)
        error = answer.json()["error"]
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert (error["type"], error["code"]) == ("authentication_error", "missing_api_key")


def test_each_key_opens_and_others_do_not() -> None:
    client = guarded(keys=KEYS)
    for key in KEYS:
        for header in ({"Authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key} "}, {"X-Api-Key": key}):
            assert client.get("/v1/models", headers=header).status_code == 200
    for value in ("Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key", "Bearer é", "Bearer"):
        answer = client.get("/v1/models", headers={"authorization": value.encode()})
        assert answer.status_code == 401 and answer.json()["error"]["code"] in ("invalid_api_key", "missing_api_key")
        assert "first" not in answer.text


def test_only_names_of_this_machine_reach_a_local_server() -> None:
    client = guarded(hosts=allowed_hosts("127.0.0.1", ()))
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"):
        assert client.get("/health", headers={"host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", ""):
        answer = client.get("/health", headers={"host": host})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"


def test_names_that_are_allowed() -> None:
    assert allowed_hosts("0.0.0.0", ()) is None
    assert allowed_hosts("0.0.0.0", ("me.example",)) == ("localhost", "127.0.0.1", "::1", "me.example")
    assert set(allowed_hosts("localhost", ("me.example",)) or ()) == {"localhost", "127.0.0.1", "::1", "me.example"}


def test_addresses_that_only_this_machine_reaches() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not is_loopback("0.0.0.0") and not is_loopback("::")


def test_other_origins_may_ask_only_if_they_are_named() -> None:
    ask = {"origin": "http://page.example", "access-control-request-method": "POST"}
    closed = guarded().options("/v1/completions", headers=ask)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers

    client = guarded(origins=("http://page.example",), keys=KEYS)
    asked = {**ask, "access-control-request-headers": "authorization,content-type"}
    answer = client.options("/v1/completions", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page.example"
    other = client.options("/v1/completions", headers={**asked, "origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers
    # The page can read why it was refused.
    refused = client.get("/v1/models", headers={"origin": "http://page.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page.example"
