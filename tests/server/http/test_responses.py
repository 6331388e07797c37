"""The Responses API as agents use it: items in, items out, the events of a stream, and what is refused or left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers import fake_serving
from helpers.fake_serving import agent_model, client_of, prompt_of, text_tokens
from picompile_server.http.response_input import sealed, unsealed

PATH = "/v1/responses"
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": NUMBER, "strict": False}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'
ALL = f"<think>\nHm.\n</think>\n\nLet me see.\n{WRITTEN}\n{WRITTEN.replace('3', '4')}"


def made(says: str, **body: Any) -> Any:
    return fake_serving.made(client_of(agent_model(says)), PATH, **{"input": "Hi", **body})


def events(says: str, **body: Any) -> list[Any]:
    answer = client_of(agent_model(says)).post(PATH, json={"input": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = []
    for text in answer.text.strip().split("\n\n"):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def prompt(items: Any, **body: Any) -> str:
    model = agent_model("x")
    fake_serving.made(client_of(model), PATH, input=items, **body)
    return prompt_of(model)


def test_the_output_has_reasoning_text_and_calls() -> None:
    response = made(ALL, tools=[ADD])
    reasoning, message, *calls = response["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == [] and reasoning["encrypted_content"] is None
    assert message["content"][0]["text"] == "Let me see." and message["role"] == "assistant"
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "add", '{"n": 3}'),
        ("function_call", "add", '{"n": 4}'),
    ]
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert {item["status"] for item in response["output"]} == {"completed"} and response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(text_tokens("<think>\nHm.\n</think>"))
    assert response["tools"] == [ADD] and response["tool_choice"] == "auto" and response["parallel_tool_calls"] is True


def test_the_events_of_a_stream() -> None:
    found = events(ALL, tools=[ADD])
    kinds = [event["type"].removeprefix("response.") for event in found]
    kinds = [kind for place, kind in enumerate(kinds) if not place or kind != kinds[place - 1]]  # deltas once
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [[kind.format(name) for kind in text] for name in ("reasoning_text", "output_text")] + [call, call]
    expected = [kind for item in items for kind in ("output_item.added", *item, "output_item.done")]
    assert kinds == ["created", "in_progress", *expected, "completed"]
    response = found[-1]["response"]
    for place, item in enumerate(response["output"]):
        of_item = [event for event in found if event.get("output_index") == place]
        assert of_item[-1]["item"] == item and of_item[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in of_item[1:-1]} == {item["id"]}
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(event["delta"] for event in of_item if event["type"].endswith(".delta")) == whole
    assert response["usage"]["total_tokens"] > 0 and found[0]["response"]["usage"] is None


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    for says, kind in (("Hello, world.", "message"), ("<think>Hello, world.", "reasoning"), (WRITTEN, "function_call")):
        most = len(text_tokens(says)) - 5
        found = events(says, tools=[ADD], max_output_tokens=most)
        response = found[-1]["response"]
        assert found[-1]["type"] == "response.incomplete" and response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [(item["type"], item["status"]) for item in response["output"]] == [(kind, "incomplete")]


def test_an_answer_without_text_has_an_empty_message() -> None:
    (item,) = made("")["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == ""
    assert events("")[-1]["response"]["output"][0]["content"][0]["text"] == ""


CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"n": 3}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
USER = {"role": "user", "content": "Hi"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
REASONED = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


SEALED = {**REASONED, "content": None, "encrypted_content": sealed("Hm.")}
OTHERS_SEALED = {**SEALED, "encrypted_content": "gAAA"}
SUMMARY = {**REASONED, "content": None, "summary": [{"type": "summary_text", "text": "Hm."}]}
PARTS = {**OUTPUT, "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]}
CALLED, THOUGHT = '!add{"n": 3}', "<think>Hm.</think>"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([USER, CALL, OUTPUT], f"[user:Hi][assistant:{CALLED}][tool:4]"),
        ([USER, CALL, PARTS], f"[user:Hi][assistant:{CALLED}][tool:42]"),
        ([REASONED, SAID, CALL, CALL, OUTPUT], f"[assistant:{THOUGHT}So.{CALLED}{CALLED}][tool:4]"),
        ([USER, CALL, SAID, OUTPUT], f"[user:Hi][assistant:So.{CALLED}][tool:4]"),
        ([USER, SAID, SAID, USER], "[user:Hi][assistant:So.][assistant:So.][user:Hi]"),
        ([USER, SEALED, SAID], f"[user:Hi][assistant:{THOUGHT}So.]"),
        ([USER, OTHERS_SEALED, SAID], "[user:Hi][assistant:So.]"),
        ([USER, SUMMARY, SAID], f"[user:Hi][assistant:{THOUGHT}So.]"),
        ([{"role": "developer", "content": "Be kind."}, USER], "[system:Be brief.\n\nBe kind.][user:Hi]"),
    ],
)
def test_items_become_messages(items: Any, expected: str) -> None:
    instructions = "Be brief." if "Be brief" in expected else None
    assert prompt(items, instructions=instructions) == expected


def test_reasoning_comes_back_in_the_form_in_which_codex_keeps_it() -> None:
    (reasoning, *_) = made(ALL, include=["reasoning.encrypted_content"], store=False)["output"]
    kept = {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    assert prompt([USER, kept, SAID, USER]) == "[user:Hi][assistant:<think>Hm.</think>So.][user:Hi]"
    assert unsealed("picompile:%%%") == unsealed("picompile:/w==") == unsealed(None) == ""


def test_what_the_model_may_or_must_call() -> None:
    for choice, calls in (("auto", 2), ("none", 0), (None, 2)):
        response = made(ALL, tools=[ADD], tool_choice=choice)
        assert sum(item["type"] == "function_call" for item in response["output"]) == calls
        assert response["tool_choice"] == (choice or "auto")
    for choice in ("required", {"type": "function", "name": "add"}):
        model = agent_model(WRITTEN)
        body = {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
        response = fake_serving.made(client_of(model), PATH, input="Hi", **body)
        assert response["tool_choice"] == choice and response["parallel_tool_calls"] is False
        grammar = model.scheduler.asked[0].request.grammar()  # type: ignore[attr-defined]
        mask = grammar.allowed()
        assert mask[text_tokens("<")[0]] and not mask[text_tokens("H")[0]]


def test_some_of_the_tools_may_be_called() -> None:
    for mode in ("auto", "required"):
        chosen = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "add"}]}
        model = agent_model("Hi" if mode == "auto" else WRITTEN)
        body = {"tools": [ADD, {**ADD, "name": "take"}], "tool_choice": chosen}
        response = fake_serving.made(client_of(model), PATH, input="Hi", **body)
        assert response["tool_choice"] == chosen and [each["name"] for each in response["tools"]] == ["add", "take"]
        assert '"name": "take"' in prompt_of(model)
        grammar = model.scheduler.asked[0].request.grammar()  # type: ignore[attr-defined]
        for token in text_tokens('<tool_call>\n{"name": "'):
            grammar.accept(token)
        mask = grammar.allowed()
        assert mask[text_tokens("a")[0]] and not mask[text_tokens("t")[0]]
    # A tool that only OpenAI runs is the only one that may be called, so none can be.
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    response = made(ALL, tools=[ADD], tool_choice=chosen)
    assert response["tool_choice"] == chosen and all(item["type"] != "function_call" for item in response["output"])


def test_tools_of_other_kinds_are_left_out() -> None:
    others = [
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "mcp"},
    ]
    response = made("Hi", tools=[*others, ADD])
    assert response["tools"] == [ADD]
    assert made("Hi", tools=others)["tools"] == []


def test_functions_in_a_namespace_are_called_by_the_name_of_both() -> None:
    space = {
        "type": "namespace",
        "name": "sums",
        "description": "Sums.",
        "tools": [ADD, {"type": "custom", "name": "x"}],
    }
    says = WRITTEN.replace("add", "sums.add")
    (call,) = made(says, tools=[space])["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("sums", "add", '{"n": 3}')
    done = next(event for event in events(says, tools=[space]) if event["type"].endswith("arguments.done"))
    assert done["name"] == "add"
    assert "!sums.add" in prompt([USER, {**CALL, "namespace": "sums"}, OUTPUT], tools=[space])
    for name in ("two words", "x" * 61):
        answer = client_of(agent_model("")).post(PATH, json={"input": "Hi", "tools": [{**space, "name": name}]})
        assert answer.status_code == 400 and "is no name of a function" in answer.json()["error"]["message"]
    many = {**space, "tools": [{**ADD, "name": f"add{number}"} for number in range(128)]}
    answer = client_of(agent_model("")).post(PATH, json={"input": "Hi", "tools": [many, ADD]})
    assert answer.status_code == 400 and "128 functions, not 129" in answer.json()["error"]["message"]


def test_fields_of_agents_that_change_no_answer() -> None:
    fields = {"store": True, "service_tier": "auto", "prompt_cache_key": "k", "client_metadata": {"a": "b"}}
    fields |= {"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"}, "max_tool_calls": 3}
    fields |= {"include": ["file_search_call.results", "reasoning.encrypted_content"], "safety_identifier": "s"}
    response = made("Hi", **fields)
    assert response["store"] is False and response["reasoning"] == {"effort": "high", "summary": "auto"}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert prompt("Hi", reasoning={"effort": "high"}) == "[user:Hi]highTrue"


def test_a_stream_that_fails(client: TestClient) -> None:
    client.app.state.models.get(None).scheduler.failure = "a kernel"  # type: ignore[attr-defined]
    answer = client.post(PATH, json={"input": "Hi", "stream": True})
    last = json.loads(answer.text.strip().split("\n\n")[-1].partition("data: ")[2])
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "engine_error"
