"""Reasoning in answers of the API: apart from the content, whole and in streams, counted, and switched by requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient

from helpers import fake_serving
from helpers.chat_templates import TEMPLATES
from helpers.fake_serving import client_of, fake_model, text_tokens
from helpers.toys.toy_tokenizers import EOS, byte_level
from helpers.toys.toy_tool_models import tool_model
from picompile_runtime import Tokenizer
from picompile_server.model import ServedModel

PATH = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hi"}]
# As Qwen 3's: the model opens its reasoning itself, and a request can have the prompt close it.
SWITCHED = (
    "{% for m in messages %}[{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}]{% endfor %}"
    "{{ reasoning_effort }}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
# As DeepSeek R1's: the prompt opens it.
OPENED = "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}<think>\n"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def reasoning_model(says: str, template: str = SWITCHED) -> ServedModel:
    return fake_model(says, tokenizer=Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": template}))


def answered(says: str, template: str = SWITCHED, **body: Any) -> Any:
    return fake_serving.made(client_of(reasoning_model(says, template)), PATH, **{"messages": HELLO, **body})


def prompt(body: Any, template: str = SWITCHED) -> str:
    model = reasoning_model("x", template)
    fake_serving.made(client_of(model), PATH, **{"messages": HELLO, **body})
    return str(model.tokenizer.decode(model.scheduler.asked[0].request.prompt))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("says", "template"), [("<think>\nSo.\n</think>\n\nYes.", SWITCHED), ("So.</think>Yes.", OPENED)]
)
def test_reasoning_is_apart_from_the_content(says: str, template: str) -> None:
    made = answered(says, template)
    message = {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "So."}
    assert made["choices"][0]["message"] == message and made["choices"][0]["finish_reason"] == "stop"
    until = len(text_tokens(says.partition("</think>")[0] + "</think>"))
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": until}

    chunks = fake_serving.streamed(client_of(reasoning_model(says, template)), PATH, messages=HELLO)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    kinds = [name for delta in deltas for name in delta if delta[name] and name != "role"]
    assert kinds == sorted(kinds, reverse=True)  # reasoning comes first


def test_an_answer_without_reasoning_has_none() -> None:
    made = answered("Yes.")
    assert "reasoning_content" not in made["choices"][0]["message"]
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert answered("a <think>b</think>")["choices"][0]["message"]["content"] == "a <think>b</think>"


def test_an_answer_that_ends_in_its_reasoning_has_no_content() -> None:
    made = answered("<think>So, so", max_tokens=10)
    message = made["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"] == "So,"
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 10}


def test_calls_stand_behind_the_reasoning() -> None:
    """What looks like a call in the reasoning is none."""
    made = answered(f"<think>Maybe {CALL}?</think>\n\n{CALL}", tools=TOOLS)
    message = made["choices"][0]["message"]
    assert message["reasoning_content"] == f"Maybe {CALL}?" and message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert made["choices"][0]["finish_reason"] == "tool_calls"


def test_the_content_has_the_reasoning_where_a_request_says_so() -> None:
    text = "<think>So.</think>Yes."
    assert answered(text, reasoning_format="none")["choices"][0]["message"]["content"] == text
    assert answered(text, reasoning_format="auto")["choices"][0]["message"]["content"] == "Yes."


def test_requests_say_how_much_to_reason() -> None:
    closed = "<think>\n\n</think>\n\n"
    assert prompt({}) == "[user:Hi]"
    assert prompt({"reasoning_effort": "none"}) == prompt({"chat_template_kwargs": {"enable_thinking": False}})
    assert prompt({"reasoning_effort": "none"}) == f"[user:Hi]{closed}"
    assert prompt({"reasoning_effort": "high"}) == "[user:Hi]high"
    given = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}}
    assert prompt(given) == f"[user:Hi]low{closed}"  # what is given by name counts
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}
    assert prompt({"messages": [*HELLO, said, *HELLO]}) == "[user:Hi][assistant:<think>So.</think>Yes.][user:Hi]"


def test_a_form_is_of_what_follows_the_reasoning() -> None:
    model = reasoning_model("x")
    client = TestClient(client_of(model).app, "http://localhost")
    body = {"messages": HELLO, "response_format": {"type": "json_object"}}
    assert client.post(PATH, json=body).status_code == 200
    (answer,) = model.scheduler.asked  # type: ignore[attr-defined]
    grammar = answer.request.grammar()
    for token in text_tokens('<think>any { text</think>{"a": 1}'):
        assert grammar.allowed()[token]
        grammar.accept(token)
    grammar = answer.request.grammar()
    assert grammar.allowed()[text_tokens("{")[0]] and not grammar.allowed()[text_tokens("a")[0]]


def test_a_prompt_that_has_ended_the_reasoning_lets_none_come() -> None:
    model = reasoning_model("x")
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none"}
    fake_serving.made(client_of(model), PATH, **body)
    grammar = model.scheduler.asked[0].request.grammar()  # type: ignore[attr-defined]
    for token in text_tokens("<t"):
        grammar.accept(token)
    assert grammar.allowed()[text_tokens("o")[0]] and not grammar.allowed()[text_tokens("h")[0]]


def test_special_tokens_of_the_reasoning_have_their_text() -> None:
    made = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    made.add_special_tokens(names)
    template = "{% for m in messages %}{{ '<|channel|>analysis<|message|>' if false }}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(made.to_str(), {"chat_template": template})
    says = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    model = fake_model(tokenizer.encode(says, special_tokens=False), tokenizer=tokenizer)
    message = fake_serving.made(client_of(model), PATH, messages=HELLO)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")


def test_a_template_of_a_model_that_calls_tools_and_reasons() -> None:
    model = reasoning_model(f"<think>\nAdd.\n</think>\n\n{CALL}", TEMPLATES["hermes"])
    made = fake_serving.made(client_of(model), PATH, messages=HELLO, tools=TOOLS, tool_choice="required")
    message = made["choices"][0]["message"]
    assert (
        message["reasoning_content"] == "Add." and json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}
    )


def test_gpt_oss_reasons_in_one_channel_and_calls_in_another() -> None:
    tokenizer = tool_model("gpt-oss")
    says = (
        "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"n": 3}'
    )
    model = fake_model(tokenizer.encode(says, special_tokens=False), tokenizer=tokenizer)
    number = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": number}}]
    made = fake_serving.made(client_of(model), PATH, messages=HELLO, tools=tools)["choices"][0]
    message = made["message"]
    assert (message["reasoning_content"], message["content"], made["finish_reason"]) == ("Add.", None, "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n": 3}'}
    grammar = model.scheduler.asked[0].request.grammar()  # type: ignore[attr-defined]
    for token in tokenizer.encode(says, special_tokens=False):
        assert grammar.allowed()[token]
        complete = grammar.accept(token)
    assert complete or grammar.allowed()[EOS]
