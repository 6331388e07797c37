"""More of the official client, strict about types: asynchronous, its helpers for schemas and streams, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from helpers.fake_serving import FakeScheduler, client_of, fake_model
from helpers.serving_process import ServingProcess
from picompile_runtime.serving.http.app import AppSettings
from picompile_runtime.serving.model import ServedModel

Result = TypeVar("Result")
HELLO: Any = [{"role": "user", "content": "Hello"}]
STRICT: Any = {"_strict_response_validation": True, "api_key": "none", "max_retries": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SWITCH: Any = {"type": "function", "function": {"name": "switch", "parameters": PARAMETERS, "strict": True}}


class Lamp(BaseModel):
    """A type that answers are parsed to."""

    on: bool


@pytest.fixture(scope="module")
def client(server: ServingProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", **STRICT) as found:
        yield found


def run(server: ServingProcess, work: Callable[[AsyncOpenAI], Awaitable[Result]]) -> Result:
    """Return what `work` does with an asynchronous client."""

    async def main() -> Result:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", **STRICT) as client:
            return await work(client)

    return asyncio.run(main())


def test_an_asynchronous_client_gets_what_a_synchronous_one_does(client: OpenAI, server: ServingProcess) -> None:
    completion: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "seed": 1, "logprobs": 2}
    chat: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "seed": 1, "logprobs": True, "top_logprobs": 2}
    response: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0}

    async def work(client: AsyncOpenAI) -> tuple[Any, ...]:
        models = [model.id async for model in client.models.list()]
        made = await asyncio.gather(
            client.completions.create(**completion),
            client.chat.completions.create(**chat),
            client.responses.create(**response),
        )
        return models, *made

    models, text, message, answer = run(server, work)
    assert models == ["tiny"]
    assert text.choices == client.completions.create(**completion).choices
    assert message.choices == client.chat.completions.create(**chat).choices
    assert answer.output_text == client.responses.create(**response).output_text


def test_asynchronous_streams(server: ServingProcess) -> None:
    async def work(client: AsyncOpenAI) -> tuple[str, str]:
        chat: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
        whole = await client.chat.completions.create(**chat)
        stream = await client.chat.completions.create(**chat, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content or "", "".join(pieces)

    whole, streamed = run(server, work)
    assert whole == streamed and whole


def test_a_stream_that_is_left_does_not_hold_up_the_next(server: ServingProcess) -> None:
    async def work(client: AsyncOpenAI) -> int:
        # More than there are slots: each is free again when its client has gone.
        for _ in range(12):
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
        # Not sampled, which may come to the end at once.
        made = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, temperature=0)
        assert made.usage is not None
        return made.usage.completion_tokens

    assert run(server, work) == 3


def test_answers_are_parsed_to_a_schema(client: OpenAI) -> None:
    made = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Lamp, temperature=0)
    assert isinstance(made.choices[0].message.parsed, Lamp) and made.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="tiny", input="Hello", text_format=Lamp, temperature=0)
    assert isinstance(response.output_parsed, Lamp) and response.status == "completed"
    # The same schema in the same place of the same prompt gives the same text.
    assert response.output_parsed == made.choices[0].message.parsed


def test_streams_are_parsed_to_a_schema(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "response_format": Lamp, "temperature": 0}
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        made = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(made.choices[0].message.parsed, Lamp) and made.usage is not None
    with client.responses.stream(model="tiny", input="Hello", text_format=Lamp, temperature=0) as events:
        for _ in events:
            pass
        response = events.get_final_response()
    assert response.output_parsed == made.choices[0].message.parsed


def test_calls_are_parsed_to_their_arguments(client: OpenAI, server: ServingProcess) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "tools": [SWITCH], "tool_choice": "required", "temperature": 0}
    options["parallel_tool_calls"] = False
    made = client.chat.completions.parse(**options)
    (call,) = made.choices[0].message.tool_calls or ()
    assert made.choices[0].finish_reason == "tool_calls" and call.function.name == "switch"
    assert isinstance(call.function.parsed_arguments, dict) and set(call.function.parsed_arguments) == {"on"}

    async def work(client: AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
            return kinds, final.choices[0]

    kinds, choice = run(server, work)
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert choice.message.tool_calls[0].function == call.function
    # The call goes back with its result.
    asked = [*HELLO, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(model="tiny", messages=asked, max_tokens=2, tools=[SWITCH]).usage is not None


def test_the_output_of_a_response_goes_back_as_input(client: OpenAI) -> None:
    first = client.responses.create(model="tiny", input="Hello", max_output_tokens=4)
    output: Any = [item.to_dict() for item in first.output]
    asked: Any = [{"role": "user", "content": "Hello"}, *output, {"role": "user", "content": "And then?"}]
    second = client.responses.create(model="tiny", input=asked, max_output_tokens=4)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_streamed_completions(server: ServingProcess) -> None:
    # Not strict: the client's type of a chunk does not have the null that OpenAI's finish_reason is before the end.
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        options: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0, "logprobs": 1}
        whole = client.completions.create(**options).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert whole.logprobs is not None
    assert [token for chunk in chunks for token in (chunk.logprobs.tokens or ())] == whole.logprobs.tokens  # type: ignore[union-attr]


def in_process(model: ServedModel, key: str = "none", **settings: Any) -> OpenAI:
    """Return a client of an application in this process."""
    found = client_of(model, settings=AppSettings(**settings))
    return OpenAI(base_url="http://localhost/v1", http_client=found, **{**STRICT, "api_key": key})


def test_keys(fake: ServedModel) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        in_process(fake, keys=("right",)).models.list()
    assert caught.value.code == "invalid_api_key" and caught.value.type == "authentication_error"
    assert in_process(fake, "right", keys=("right",)).models.list().data[0].id == "fake"


def test_a_full_queue_and_a_server_that_ends_have_the_types_that_are_tried_again(
    fake: ServedModel, scheduler: FakeScheduler
) -> None:
    client = in_process(fake)
    scheduler.most_waiting = 0
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=HELLO)
    scheduler.close()
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="fake", messages=HELLO)
    assert caught.value.status_code == 503


def test_an_answer_that_fails_in_the_middle_of_its_stream(fake: ServedModel, scheduler: FakeScheduler) -> None:
    scheduler.failure = "the engine broke"
    stream = in_process(fake).chat.completions.create(model="fake", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="the engine broke"):
        list(stream)


def test_endpoints_that_there_are_not(fake: ServedModel) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        in_process(fake).embeddings.create(model="fake", input="Hello")
    assert caught.value.code == "not_found"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
    ],
)
def test_errors_name_the_field(fields: Any, field: str) -> None:
    client = in_process(fake_model())
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "fake", "messages": HELLO, **fields})
    assert caught.value.param == field
