"""Tokens that are told of: those of a chat are what the chat's prompt has, and special ones have their text."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler, client_of, fake_model, text_tokens
from helpers.toys.toy_tokenizers import EOS, metaspace

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"messages": CALLED}, {"messages": CALLED, "tools": TOOLS}])
def test_a_chat_has_the_tokens_of_its_prompt(client: TestClient, scheduler: FakeScheduler, fields: Any) -> None:
    body = {"messages": HELLO, **fields}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert tokens == list(scheduler.asked[0].request.prompt)


def test_tools_need_messages(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "Hi", "tools": TOOLS})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tools can only be given with messages"


def test_special_tokens_have_a_text(client: TestClient) -> None:
    ids = [EOS, *text_tokens("né"), EOS, EOS]
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "<eos>né<eos><eos>"


def test_tools_and_calls_count_where_a_prompt_is_too_long_to_be_cut_into_tokens(client: TestClient) -> None:
    long = "x" * 1_000_000
    described = {"type": "function", "function": {"name": "add", "description": long}}
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": f'"{long}"'}}
    for body in (
        {"messages": HELLO, "tools": [described]},
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [called]}]},
        {"messages": HELLO, "chat_template_kwargs": {"text": long}},
    ):
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_texts_of_log_probabilities_are_the_text_of_the_answer() -> None:
    # Such a tokenizer leaves out the space of the first token.
    tokenizer = metaspace()
    says = tokenizer.encode("abe he", special_tokens=False)
    client = client_of(fake_model(says, tokenizer=tokenizer))
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    named = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "abe he" == "".join(token["token"] for token in named)
    assert bytes(byte for token in named for byte in token["bytes"]) == b"abe he"


def test_a_slot_may_be_named_and_changes_nothing(client: TestClient) -> None:
    answers = [client.post("/v1/completions", json={"prompt": "Hi", **more}) for more in ({}, {"id_slot": 0})]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
