"""Tools: what the model is told, what its answers are held to, and how calls come back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler, text_tokens
from helpers.serving_process import ServingProcess

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'


@pytest.fixture
def calling(client: TestClient, scheduler: FakeScheduler) -> TestClient:
    """Its model says something and calls a tool."""
    scheduler.says = lambda request: text_tokens(f"Let me see. {CALL}")
    return client


def test_a_call_in_a_message(calling: TestClient) -> None:
    body = {"messages": HELLO, "tools": TOOLS}
    (choice,) = calling.post(PATH, json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert call["function"] == {"name": "add", "arguments": '{"n": 3}'}


def test_a_call_in_a_stream(calling: TestClient) -> None:
    answer = calling.post(PATH, json={"messages": HELLO, "tools": TOOLS, "stream": True}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    (first, *rest) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert first["function"]["name"] == "add" and first["id"] and first["type"] == "function"
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in rest)
    assert "".join(call["function"]["arguments"] for call in (first, *rest)) == '{"n": 3}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_an_offer_a_call_is_text(calling: TestClient) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = calling.post(PATH, json={"messages": HELLO, **fields}).json()["choices"]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == f"Let me see. {CALL}"
        assert "tool_calls" not in choice["message"]


def test_a_call_that_is_cut_off(calling: TestClient) -> None:
    cut = len(text_tokens("Let me see. " + CALL.partition("}")[0]))
    (choice,) = calling.post(PATH, json={"messages": HELLO, "tools": TOOLS, "max_tokens": cut}).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"n": 3'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools are called add"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice names 'mul'"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "an answer can have a form or call tools"),
    ],
)
def test_offers_that_make_no_sense(client: TestClient, fields: Any, message: str) -> None:
    answer = client.post(PATH, json={"messages": HELLO, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)


@pytest.fixture(scope="module")
def official(server: ServingProcess) -> Any:
    strict: Any = {"_strict_response_validation": True}
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **strict)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_model_that_must_call_does(official: Any, is_streamed: bool) -> None:
    options = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "seed": 5, "parallel_tool_calls": False}
    for choice, names in (("required", {"add", "sub"}), ({"type": "function", "function": {"name": "sub"}}, {"sub"})):
        if is_streamed:
            with official.chat.completions.stream(**options, tool_choice=choice) as stream:
                stream.until_done()
                made = stream.get_final_completion().choices[0]
        else:
            made = official.chat.completions.create(**options, tool_choice=choice).choices[0]
        assert made.finish_reason == "tool_calls"
        (call,) = made.message.tool_calls
        assert call.function.name in names and 0 <= json.loads(call.function.arguments)["n"] <= 9


def test_results_of_tools_go_on(official: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    made = official.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    assert made.choices[0].message.content is not None
    broken = {**call, "function": {"name": "add", "arguments": "{"}}
    with pytest.raises(openai.BadRequestError, match="arguments"):
        official.chat.completions.create(model="tiny", messages=[{"role": "assistant", "tool_calls": [broken]}])
