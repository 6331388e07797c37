"""Chats, calls of tools and responses: the prompt that the model gets, and the form of what comes back.

That the official client parses calls is in test_openai_client.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers import fake_serving
from helpers.fake_serving import FakeScheduler, client_of, default_params, fake_model, text_tokens
from helpers.toys.toy_tokenizers import byte_level, metaspace
from picompile_runtime import Tokenizer
from picompile_server.model import ServedModel

PATH = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
CALLED = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]


def templated(says: Any = "Hello, world.", template: str = TEMPLATE) -> ServedModel:
    return fake_model(says, tokenizer=Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": template}))


def chat(client: TestClient, **body: Any) -> Any:
    return fake_serving.made(client, PATH, **{"messages": HELLO, **body})


def streamed(client: TestClient, **body: Any) -> list[Any]:
    return fake_serving.streamed(client, PATH, messages=HELLO, **body)


def asked(client: TestClient, messages: Any) -> str:
    """The text that the model is asked to continue."""
    model = client.app.state.models.get(None)  # type: ignore[attr-defined]
    chat(client, messages=messages)
    return str(model.tokenizer.decode(model.scheduler.asked[-1].request.prompt))


def test_a_message_is_the_answer(client: TestClient, scheduler: FakeScheduler) -> None:
    made = chat(client)
    assert made["object"] == "chat.completion" and made["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello, world.", "refusal": None}
    assert made["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    # An answer may be as long as the context allows.
    assert (scheduler.asked[0].request.max_tokens, scheduler.asked[0].request.params) == (None, default_params())
    for field in ("max_tokens", "max_completion_tokens", "n_predict"):
        chat(client, **{"max_tokens": -1, field: -1})
        assert scheduler.asked[-1].request.max_tokens is None
        made = chat(client, **{field: 2})
        assert made["usage"]["completion_tokens"] == 2 and made["choices"][0]["finish_reason"] == "length"


def test_chunks_of_a_stream(client: TestClient) -> None:
    first, *pieces, last = streamed(client)
    assert {chunk["object"] for chunk in (first, *pieces, last)} == {"chat.completion.chunk"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None} and "timings" not in first
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in pieces)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == "Hello, world."
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_n"] == len(text_tokens("Hello, world.")) + 1
    # The last text comes before the reason.
    *_, piece, last = streamed(client, max_tokens=2, timings_per_token=True)
    assert piece["choices"][0]["delta"]["content"] and piece["timings"]["fired_share"]
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"


def test_the_models_template_writes_the_chat() -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert asked(client_of(templated()), messages) == "[system:Be kind.][user:ab][assistant:c][user:d]>"
    rejecting = client_of(templated(template="{{ raise_exception('no system') }}"))
    answer = rejecting.post(PATH, json={"messages": HELLO})
    assert answer.status_code == 400 and "no system" in answer.json()["error"]["message"]


def test_a_model_without_a_template_gets_plain_text(client: TestClient) -> None:
    messages = [{"role": "system", "content": " Be kind.\n"}, *HELLO]
    assert asked(client, messages) == "Be kind.\n\nUser: Hi\n\nAssistant:"
    # What it answers stands in the next question just as it was written.
    answered = [*messages, {"role": "assistant", "content": " Hello."}, *HELLO]
    assert asked(client, answered).startswith("Be kind.\n\nUser: Hi\n\nAssistant: Hello.")
    # The answer ends before the next question.
    assert chat(client_of(fake_model(" Yes.\n\nUser: And?")))["choices"][0]["message"]["content"] == " Yes.\n"
    assert chat(client_of(templated("Yes.\nUser: And?")))["choices"][0]["message"]["content"] == "Yes.\nUser: And?"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"messages": CALLED}, {"messages": CALLED, "tools": TOOLS}])
def test_tokenize_has_the_tokens_of_the_chats_prompt(client: TestClient, scheduler: FakeScheduler, fields: Any) -> None:
    chat(client, **fields)
    tokens = fake_serving.made(client, "/tokenize", **{"messages": HELLO, **fields})["tokens"]
    assert tokens == list(scheduler.asked[0].request.prompt)


def test_log_probabilities_join_to_the_text() -> None:
    client = client_of(fake_model("né"))
    (choice,) = chat(client, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "né"
    assert [token["token"] for token in content] == ["n", "\\xc3", "\\xa9"]
    assert all(token["logprob"] == -0.5 for token in content)
    assert [top["bytes"] for top in content[0]["top_logprobs"]] == [[33], [34]]
    pieces = [piece["choices"][0]["logprobs"]["content"] for piece in streamed(client, logprobs=True)[1:-1]]
    assert [[token["token"] for token in piece] for piece in pieces] == [["n"], ["\\xc3", "\\xa9"]]
    # Such a tokenizer leaves out the space of the first token.
    tokenizer = metaspace()
    says = tokenizer.encode("abe he", special_tokens=False)
    (choice,) = chat(client_of(fake_model(says, tokenizer=tokenizer)), logprobs=True, top_logprobs=1)["choices"]
    named = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "abe he" == "".join(token["token"] for token in named)
    assert bytes(byte for token in named for byte in token["bytes"]) == b"abe he"


def test_several_answers(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.says = lambda request: text_tokens(f"{request.params.seed}")
    made = chat(client, n=3, seed=10)
    assert [choice["message"]["content"] for choice in made["choices"]] == ["10", "11", "12"]
    *chunks, last = streamed(client, n=3, seed=10, stream_options={"include_usage": True})
    texts = ["", "", ""]
    for choice in (chunk["choices"][0] for chunk in chunks):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["10", "11", "12"] and last["usage"] == made["usage"]


PART = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": "Hi"}, "[user:Hi]>"),
        ({"input": "Hi", "instructions": "Be kind."}, "[system:Be kind.][user:Hi]>"),
        ({"input": [PART], "instructions": None}, "[user:Hi]>"),
    ],
)
def test_the_input_of_a_response(body: Any, expected: str) -> None:
    model = templated()
    made = fake_serving.made(client_of(model), "/v1/responses", **body, temperature=0, max_output_tokens=5)
    request = model.scheduler.asked[0].request  # type: ignore[attr-defined]
    assert model.tokenizer.decode(request.prompt) == expected
    assert (request.params.temperature, request.max_tokens) == (0, 5)
    assert made["status"] == "incomplete" and made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["store"] is False and made["usage"]["output_tokens"] == 5


def test_a_response_that_is_complete(client: TestClient) -> None:
    made = fake_serving.made(client, "/v1/responses", input="Hi", metadata={"a": "b"})
    assert made["status"] == "completed" and made["metadata"] == {"a": "b"}
    assert made["output"][0]["content"][0]["text"] == "Hello, world."


# Tools.

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
OFFERED = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}},
]
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'


@pytest.fixture
def calling(client: TestClient, scheduler: FakeScheduler) -> TestClient:
    """Its model says something and calls a tool."""
    scheduler.says = lambda request: text_tokens(f"Let me see. {WRITTEN}")
    return client


def test_a_call_in_a_message(calling: TestClient) -> None:
    (choice,) = chat(calling, tools=OFFERED)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert call["function"] == {"name": "add", "arguments": '{"n": 3}'}
    # A call that is cut off has what there is of its arguments.
    cut = len(text_tokens("Let me see. " + WRITTEN.partition("}")[0]))
    (choice,) = chat(calling, tools=OFFERED, max_tokens=cut)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"n": 3'


def test_a_call_in_a_stream(calling: TestClient) -> None:
    chunks = streamed(calling, tools=OFFERED)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    (first, *rest) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert first["function"]["name"] == "add" and first["id"] and first["type"] == "function"
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in rest)
    assert "".join(call["function"]["arguments"] for call in (first, *rest)) == '{"n": 3}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_a_format_that_is_not_known_are_content() -> None:
    """The template describes the tools, so nothing else does, and nothing restricts or parses the answer."""
    model = templated("<call to=add>3</call>", "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE)
    client = client_of(model)
    (choice,) = chat(client, tools=OFFERED)["choices"]
    assert choice["message"]["content"] == "<call to=add>3</call>" and choice["finish_reason"] == "stop"
    (request,) = model.scheduler.asked  # type: ignore[attr-defined]
    assert request.request.grammar is None
    prompt = str(model.tokenizer.decode(request.request.prompt))
    assert prompt.startswith('[{"type": "function"') and "# Tools" not in prompt
    refused = client.post(PATH, json={"messages": HELLO, "tools": OFFERED, "tool_choice": "required"})
    assert refused.status_code == 400 and "none can be required" in refused.json()["error"]["message"]
    note = model.tool_note()
    assert note is not None and note.endswith("calls come as the content of answers")
    assert templated().tool_note() is None


def test_the_reasoning_of_earlier_turns_is_the_templates() -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    client = client_of(templated(template=template))
    for name in ("reasoning_content", "reasoning", "thinking"):
        said = {"role": "assistant", "content": "So.", name: "because"}
        assert asked(client, [*HELLO, said, *HELLO]) == "[|Hi][because|So.][|Hi]"


def test_without_an_offer_a_call_is_text(calling: TestClient) -> None:
    for fields in ({}, {"tools": OFFERED, "tool_choice": "none"}):
        (choice,) = chat(calling, **fields)["choices"]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == f"Let me see. {WRITTEN}"
        assert "tool_calls" not in choice["message"]
