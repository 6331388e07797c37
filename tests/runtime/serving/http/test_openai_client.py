"""The official client, which checks types strictly, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from helpers.fake_serving import FakeScheduler, client_of
from helpers.serving_process import ServingProcess
from picompile_runtime.serving.http.app import AppSettings
from picompile_runtime.serving.model import ServedModel

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


def test_completions_of_texts_and_tokens_are_the_same(client: OpenAI, server: ServingProcess) -> None:
    text = "a prompt of more than sixteen tokens, which is enough to be found in the cache"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    options: Any = {**COMPLETION, "temperature": 0, "extra_body": {"ignore_eos": True}}
    made = [client.completions.create(**options | {"prompt": prompt}) for prompt in (text, ids, [text], [ids])]
    assert len({one.choices[0].text for one in made}) == 1
    first, second = (one.usage for one in made[:2])
    assert first is not None and second is not None
    assert first.prompt_tokens == len(text) + 1 and first.completion_tokens == 8
    assert first.total_tokens == first.prompt_tokens + 8
    assert second.prompt_tokens_details is not None and (second.prompt_tokens_details.cached_tokens or 0) > 16


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


def test_seeds_repeat_and_answers_of_one_request_differ(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        made = client.chat.completions.create(**CHAT | {"temperature": 1}, n=3, seed=seed)
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        return [choice.message.content or "" for choice in made.choices]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(7)}) == 6
    # The answer at an index is that of the seed plus the index.
    assert texts(2)[0] == texts(1)[1]


def test_echo_gives_the_log_probabilities_that_lm_eval_needs(server: ServingProcess) -> None:
    # Not with the client: its types do not have the null of the first token, which OpenAI's own server sends.
    def ask(prompt: str) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
        return httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]

    made, count = ask("a = b"), httpx.post(f"{server.url}/tokenize", json={"prompt": "a = b"}).json()["count"]
    found = made["logprobs"]
    assert len(found["tokens"]) == count + 1 and made["text"].startswith("a = b")
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    # Those of the prompt are the same when it is continued.
    assert ask("a = b c")["logprobs"]["token_logprobs"][1:count] == found["token_logprobs"][1:-1]


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


def test_many_at_a_time_say_what_each_says_alone(client: OpenAI) -> None:
    prompts = [f"the prompt of number {number}" * (1 + number % 3) for number in range(12)]

    def ask(prompt: str) -> str:
        return client.completions.create(**COMPLETION | {"prompt": prompt, "max_tokens": 20}).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone


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


def in_process(model: ServedModel, key: str = "none", **settings: Any) -> OpenAI:
    """Return a client of an application in this process."""
    found = client_of(model, settings=AppSettings(**settings))
    return OpenAI(base_url="http://localhost/v1", http_client=found, **{**STRICT, "api_key": key})


def test_errors_have_the_types_of_the_client(fake: ServedModel, scheduler: FakeScheduler) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        in_process(fake, keys=("right",)).models.list()
    assert refused.value.code == "invalid_api_key" and refused.value.type == "authentication_error"
    assert in_process(fake, "right", keys=("right",)).models.list().data[0].id == "fake"
    client = in_process(fake)
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="fake", input="Hello")
    assert missing.value.code == "not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="fake", prompt="x" * 2000)
    assert wrong.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=3)
    assert wrong.value.param == "temperature"
    # An answer that fails in the middle of its stream.
    scheduler.failure = "the engine broke"
    stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="the engine broke"):
        list(stream)
    # These two are tried again by the client.
    scheduler.most_waiting = 0
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=HELLO)
    scheduler.close()
    with pytest.raises(openai.InternalServerError) as ending:
        client.chat.completions.create(model="fake", messages=HELLO)
    assert ending.value.status_code == 503
