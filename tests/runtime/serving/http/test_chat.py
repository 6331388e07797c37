from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler, client_of, default_params, fake_model, text_tokens
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import Tokenizer
from picompile_runtime.serving.model import ServedModel

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def templated(says: Any = "Hello, world.") -> ServedModel:
    tokenizer = Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": TEMPLATE})
    return fake_model(says, tokenizer=tokenizer)


def chat(client: TestClient, messages: Any = HELLO, **body: Any) -> Any:
    answer = client.post(PATH, json={"messages": messages, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: TestClient, **body: Any) -> list[Any]:
    answer = client.post(PATH, json={"messages": HELLO, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def asked(client: TestClient, messages: Any) -> str:
    """The text that the model is asked to continue."""
    model = client.app.state.models.get(None)  # type: ignore[attr-defined]
    chat(client, messages)
    return str(model.tokenizer.decode(model.scheduler.asked[-1].request.prompt))


def test_a_message_is_the_answer(client: TestClient, scheduler: FakeScheduler) -> None:
    made = chat(client)
    assert made["object"] == "chat.completion" and made["id"].startswith("chatcmpl-")
    assert made["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # An answer may be as long as the context allows.
    assert scheduler.asked[0].request.max_tokens is None
    assert scheduler.asked[0].request.params == default_params()


def test_chunks_of_a_stream(client: TestClient) -> None:
    first, *pieces, last = streamed(client)
    assert {chunk["object"] for chunk in (first, *pieces, last)} == {"chat.completion.chunk"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None} and "timings" not in first
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in pieces)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == "Hello, world."
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_n"] == len(text_tokens("Hello, world.")) + 1


def test_the_last_text_comes_before_the_reason(client: TestClient) -> None:
    *_, piece, last = streamed(client, max_tokens=2, timings_per_token=True)
    assert piece["choices"][0]["delta"]["content"] and piece["timings"]["fired_share"]
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"


def test_the_models_template_writes_the_chat() -> None:
    client = client_of(templated())
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert asked(client, messages) == "[system:Be kind.][user:ab][assistant:c][user:d]>"


def test_a_model_without_a_template_gets_plain_text(client: TestClient) -> None:
    messages = [{"role": "system", "content": " Be kind.\n"}, *HELLO]
    assert asked(client, messages) == "Be kind.\n\nUser: Hi\n\nAssistant:"
    # What it answers stands in the next question just as it was written.
    answered = [*messages, {"role": "assistant", "content": " Hello."}, *HELLO]
    assert asked(client, answered).startswith("Be kind.\n\nUser: Hi\n\nAssistant: Hello.")


def test_a_plain_chat_ends_before_the_next_question() -> None:
    client = client_of(fake_model(" Yes.\n\nUser: And?"))
    assert chat(client)["choices"][0]["message"]["content"] == " Yes.\n"
    assert chat(client_of(templated("Yes.\nUser: And?")))["choices"][0]["message"]["content"] == "Yes.\nUser: And?"


def test_a_template_that_rejects_messages() -> None:
    tokenizer = Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": "{{ raise_exception('no system') }}"})
    answer = client_of(fake_model(tokenizer=tokenizer)).post(PATH, json={"messages": HELLO})
    assert answer.status_code == 400 and "no system" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client: TestClient, field: str) -> None:
    made = chat(client, **{field: 2})
    assert made["usage"]["completion_tokens"] == 2 and made["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_join_to_the_text() -> None:
    client = client_of(fake_model("né"))
    (choice,) = chat(client, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "né"
    assert [token["token"] for token in content] == ["n", "\\xc3", "\\xa9"]
    assert all(token["logprob"] == -0.5 for token in content)
    assert [top["bytes"] for top in content[0]["top_logprobs"]] == [[33], [34]]
    pieces = streamed(client, logprobs=True)[1:-1]
    assert [[token["token"] for token in piece["choices"][0]["logprobs"]["content"]] for piece in pieces] == [
        ["n"],
        ["\\xc3", "\\xa9"],
    ]


def test_several_answers(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.says = lambda request: text_tokens(f"{request.params.seed}")
    made = chat(client, n=3, seed=10)
    assert [choice["message"]["content"] for choice in made["choices"]] == ["10", "11", "12"]
    chunks = streamed(client, n=3, seed=10, stream_options={"include_usage": True})
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["10", "11", "12"] and chunks[-1]["usage"] == made["usage"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": "Hi"}, "[user:Hi]>"),
        ({"input": "Hi", "instructions": "Be kind."}, "[system:Be kind.][user:Hi]>"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "instructions": None},
            "[user:Hi]>",
        ),
    ],
)
def test_the_input_of_a_response(body: Any, expected: str) -> None:
    model = templated()
    answer = client_of(model).post("/v1/responses", json={**body, "temperature": 0, "max_output_tokens": 5})
    made, request = answer.json(), model.scheduler.asked[0].request  # type: ignore[attr-defined]
    assert model.tokenizer.decode(request.prompt) == expected
    assert (request.params.temperature, request.max_tokens) == (0, 5)
    assert made["status"] == "incomplete" and made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["store"] is False and made["usage"]["output_tokens"] == 5


def test_a_response_that_is_complete(client: TestClient) -> None:
    made = client.post("/v1/responses", json={"input": "Hi", "metadata": {"a": "b"}}).json()
    assert made["status"] == "completed" and made["metadata"] == {"a": "b"}
    assert made["output"][0]["content"][0]["text"] == "Hello, world."
