"""Anthropic's Messages API: the chat that the model gets, whole messages, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers import fake_serving
from helpers.fake_serving import agent_model, client_of, prompt_of, text_tokens

PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "Hi"}]
ADD: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'
ALL = f"<think>\nHm.\n</think>\n\nLet me see.\n{WRITTEN}\n{WRITTEN.replace('3', '4')}"


def made(says: str, **body: Any) -> Any:
    return fake_serving.made(client_of(agent_model(says)), PATH, **{"messages": HELLO, "max_tokens": 500, **body})


def prompt(**body: Any) -> str:
    model = agent_model("x")
    fake_serving.made(client_of(model), PATH, **{"messages": HELLO, "max_tokens": 5, **body})
    return prompt_of(model)


def test_a_message_has_a_block_for_each_part() -> None:
    message = made(ALL, tools=[ADD])
    thinking, text, *uses = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(use["type"], use["name"], use["input"]) for use in uses] == [
        ("tool_use", "add", {"n": 3}),
        ("tool_use", "add", {"n": 4}),
    ]
    assert message["stop_reason"] == "tool_use" and message["stop_sequence"] is None
    assert message["usage"]["output_tokens"] == len(text_tokens(ALL)) + 1


@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["w", "d."]}, "stop_sequence", "w"),
    ],
)
def test_why_a_message_ended(fields: Any, reason: str, stop: str | None) -> None:
    message = made("Hello, world.", **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_the_events_of_a_stream() -> None:
    body = {"messages": HELLO, "max_tokens": 500, "stream": True, "tools": [ADD]}
    answer = client_of(agent_model(ALL)).post(PATH, json=body)
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    first, *blocks, ended, last = found
    assert first["type"] == "message_start" and first["message"]["content"] == [] and last == {"type": "message_stop"}
    assert first["message"]["usage"]["output_tokens"] == 0 and first["message"]["stop_reason"] is None
    assert ended["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == len(text_tokens(ALL)) + 1
    texts = []
    for index, kind in enumerate(("thinking", "text", "tool_use", "tool_use")):
        block = [event for event in blocks if event["index"] == index]
        assert block[0]["type"] == "content_block_start" and block[0]["content_block"]["type"] == kind
        assert block[-1] == {"type": "content_block_stop", "index": index}
        parts = [next(text for key, text in event["delta"].items() if key != "type") for event in block[1:-1]]
        texts.append("".join(parts))
    assert texts == ["Hm.", "Let me see.", '{"n": 3}', '{"n": 4}']


def test_a_stream_that_fails() -> None:
    model = agent_model("x")
    model.scheduler.failure = "a kernel"  # type: ignore[attr-defined]
    answer = client_of(model).post(PATH, json={"messages": HELLO, "max_tokens": 5, "stream": True})
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and error["type"] == "error" and "a kernel" in error["error"]["message"]


def test_blocks_become_messages() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 3}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "So."}, use]},
        {"role": "user", "content": [{"type": "text", "text": "And?"}, result]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use]},
        {"role": "user", "content": [{**result, "content": None, "is_error": True}]},
    ]
    system = [billing, {"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]
    assert prompt(messages=messages, system=system) == (
        '[system:Be\n\nkind.][user:Hi][assistant:<think>Hm.</think>So.!add{"n": 3}][tool:4][user:And?]'
        '[assistant:!add{"n": 3}][tool:]'
    )
    assert prompt(system="Be kind.", thinking={"type": "disabled"}) == "[system:Be kind.][user:Hi]False"
    assert prompt(thinking={"type": "enabled", "budget_tokens": 1024}) == "[user:Hi]True"
    assert prompt(thinking={"type": "adaptive"}) == "[user:Hi]"


def test_what_the_model_may_or_must_call() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert made(ALL, tools=[search])["stop_reason"] == "end_turn"  # it is left out
    assert made(ALL, tools=[ADD], tool_choice={"type": "none"})["stop_reason"] == "end_turn"
    for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
        model = agent_model(WRITTEN)
        fake_serving.made(
            client_of(model), PATH, messages=HELLO, max_tokens=100, tools=[ADD, search], tool_choice=choice
        )
        mask = model.scheduler.asked[0].request.grammar().allowed()  # type: ignore[attr-defined]
        assert mask[text_tokens("<")[0]] and not mask[text_tokens("H")[0]]


def test_a_call_that_is_cut_off_has_no_arguments() -> None:
    message = made(ALL, tools=[ADD], max_tokens=len(text_tokens(ALL)) - len(text_tokens("4}}\n</tool_call>")))
    assert message["stop_reason"] == "max_tokens" and message["content"][-1]["input"] == {}


def test_tokens_of_a_chat_are_counted() -> None:
    model = agent_model("x")
    body = {"messages": HELLO, "system": "Be kind.", "tools": [ADD]}
    counted = fake_serving.made(client_of(model), f"{PATH}/count_tokens", **body)
    fake_serving.made(client_of(model), PATH, max_tokens=5, **body)
    assert counted == {"input_tokens": len(model.scheduler.asked[0].request.prompt)}  # type: ignore[attr-defined]
