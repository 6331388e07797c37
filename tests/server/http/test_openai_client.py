"""The official client, which checks types strictly, and answers that must have a form, against a real server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from helpers.serving_process import ServingProcess

STRICT: Any = {"_strict_response_validation": True, "api_key": "none", "max_retries": 0}
HELLO: Any = [{"role": "user", "content": "Hello"}]
COMPLETION: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "seed": 1, "logprobs": 2}
CHAT: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 16, "temperature": 0}
RESPONSE: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SWITCH: Any = {"type": "function", "function": {"name": "switch", "parameters": PARAMETERS, "strict": True}}
OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": PARAMETERS}}


class Lamp(BaseModel):
    """A type that answers are parsed to."""

    on: bool


@pytest.fixture(scope="module")
def client(server: ServingProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", **STRICT) as found:
        yield found


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/one")
    assert caught.value.code == "model_not_found"


def test_streamed_completions(server: ServingProcess) -> None:
    # Not strict: the client's type of a chunk does not have the null that OpenAI's finish_reason is before the end.
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.completions.create(**COMPLETION).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**COMPLETION, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert whole.logprobs is not None
    assert [token for chunk in chunks for token in (chunk.logprobs.tokens or ())] == whole.logprobs.tokens  # type: ignore[union-attr]


def test_a_streamed_chat_says_what_a_whole_one_does(client: OpenAI, server: ServingProcess) -> None:
    options: Any = {**CHAT, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    *_, last, counts = chunks
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert counts.choices == [] and counts.usage is not None and whole.usage is not None
    assert counts.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for token in whole.choices[0].logprobs.content:
        # Temperature 0 takes the likeliest.
        assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob <= 0
        assert token.token == token.top_logprobs[0].token

    async def models() -> tuple[Any, list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", **STRICT) as client:
            return await client.chat.completions.create(**options), [model.id async for model in client.models.list()]

    made, names = asyncio.run(models())
    assert names == ["tiny"] and made.choices == whole.choices


def test_responses(client: OpenAI) -> None:
    options = {**RESPONSE, "instructions": "Be short."}
    whole, events = client.responses.create(**options), list(client.responses.create(**options, stream=True))
    assert whole.id.startswith("resp_") and whole.output[0].id.startswith("msg_")
    assert whole.status == events[-1].response.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text == events[-1].response.output_text
    assert whole.usage.output_tokens == 8
    # The output goes back as input.
    asked = [*HELLO, *(item.to_dict() for item in whole.output), {"role": "user", "content": "And then?"}]
    second = client.responses.create(**options | {"input": asked})
    assert second.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens


def test_answers_are_parsed_to_a_schema(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "response_format": Lamp, "temperature": 0}
    (choice,) = client.chat.completions.parse(**options).choices
    assert isinstance(choice.message.parsed, Lamp) and choice.finish_reason == "stop"
    response = client.responses.parse(model="tiny", input="Hello", text_format=Lamp, temperature=0)
    # The same schema in the same place of the same prompt gives the same text.
    assert response.output_parsed == choice.message.parsed and response.status == "completed"
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        made = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert made.choices[0].message.parsed == choice.message.parsed and made.usage is not None
    with client.responses.stream(model="tiny", input="Hello", text_format=Lamp, temperature=0) as events:
        events.until_done()
        assert events.get_final_response().output_parsed == choice.message.parsed


def test_calls_are_parsed_to_their_arguments(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "tools": [SWITCH, OTHER], "temperature": 0}
    options["parallel_tool_calls"] = False
    (choice,) = client.chat.completions.create(**options, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name in ("switch", "other")
    options |= {"tools": [SWITCH], "tool_choice": {"type": "function", "function": {"name": "switch"}}}
    (choice,) = client.chat.completions.parse(**options).choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and call.function.name == "switch"
    assert isinstance(call.function.parsed_arguments, dict) and set(call.function.parsed_arguments) == {"on"}
    assert json.loads(call.function.arguments) == call.function.parsed_arguments

    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert choice.message.tool_calls[0].function == call.function
    # The call goes back with its result.
    asked = [*HELLO, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    made = client.chat.completions.create(model="tiny", messages=asked, max_tokens=3, tools=[SWITCH])
    assert made.choices[0].message.content is not None


# Answers that must have a form; and whose fault it is if one cannot go on.


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def post(server: ServingProcess, path: str, **body: Any) -> Any:
    seed = {} if path == "/v1/responses" else {"seed": 3}
    answer = httpx.post(f"{server.url}{path}", json={**seed, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NAMED},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_json_of_a_schema(server: ServingProcess, fields: Any) -> None:
    made = post(server, "/v1/completions", prompt="x", max_tokens=100, **fields)["choices"][0]
    chat = post(server, "/v1/chat/completions", messages=HELLO, **fields)["choices"][0]
    assert made["finish_reason"] == chat["finish_reason"] == "stop"
    for text in (made["text"], chat["message"]["content"]):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_other_forms(server: ServingProcess) -> None:
    for fields, pattern in (
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a"~3'}}, "a{3}"),
        ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ):
        made = post(server, "/v1/completions", prompt="x", n=3, max_tokens=40, **fields)
        assert all(re.fullmatch(pattern, choice["text"]) for choice in made["choices"]), pattern
    form = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    assert post(server, "/v1/responses", input="Hi", text=form)["text"]["format"]["schema"] == SCHEMA


def test_an_answer_that_its_grammar_ends_is_the_requests_fault(server: ServingProcess) -> None:
    """Some patterns show only on the way how large they are."""
    body = {"prompt": "x", "structured_outputs": {"regex": "(([ab]{0,100}a){0,100}b){100}"}, "max_tokens": 900}
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, "seed": 3}, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "grammar_failed"
    assert "too large or too ambiguous" in error["message"]
