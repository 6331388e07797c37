"""The official client, which checks types strictly, against a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from helpers.serving_process import ServingProcess

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: ServingProcess) -> Iterator[OpenAI]:
    strict = {"_strict_response_validation": True}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **strict) as found:  # type: ignore[arg-type]
        yield found


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/one")
    assert caught.value.code == "model_not_found"


def test_completions_of_texts_and_tokens_are_the_same(client: OpenAI, server: ServingProcess) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    texts = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in ("Hello", ids, ["Hello"], [ids])
    ]
    assert len(set(texts)) == 1


def test_usage_counts_tokens_and_what_was_cached(client: OpenAI) -> None:
    prompt = "a prompt of more than sixteen tokens, which is enough to be found in the cache"
    found = [
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
        for _ in range(2)
    ]
    first, second = (one.usage for one in found)
    assert first is not None and second is not None
    assert first.prompt_tokens == len(prompt) + 1 and first.completion_tokens == 4
    assert first.total_tokens == first.prompt_tokens + 4
    assert second.prompt_tokens_details is not None and (second.prompt_tokens_details.cached_tokens or 0) > 16
    assert found[0].choices[0].text == found[1].choices[0].text


def test_a_streamed_chat_says_what_a_whole_one_does(client: OpenAI) -> None:
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    *_, last, counts = chunks
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert counts.choices == [] and counts.usage is not None and whole.usage is not None
    assert counts.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_seeds_repeat_and_answers_of_one_request_differ(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        made = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, n=3, seed=seed)  # type: ignore[arg-type]
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        return [choice.message.content or "" for choice in made.choices]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(7)}) == 6
    # The answer at an index is that of the seed plus the index.
    assert texts(2)[0] == texts(1)[1]


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )  # type: ignore[call-overload]
    tokens = made.choices[0].logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace")
    for token in tokens:
        assert len(token.top_logprobs) == 3
        # Temperature 0 takes the likeliest.
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert token.token == token.top_logprobs[0].token


def test_echo_gives_the_log_probabilities_that_lm_eval_needs(server: ServingProcess) -> None:
    # Not with the client: its types do not have the null of the first token, which OpenAI's own server sends.
    body = {
        "model": "tiny",
        "prompt": "a = b",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1,
    }
    made = httpx.post(f"{server.url}/v1/completions", json=body).json()
    found, ids = made["choices"][0]["logprobs"], httpx.post(f"{server.url}/tokenize", json={"prompt": "a = b"}).json()
    assert len(found["tokens"]) == ids["count"] + 1
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert made["choices"][0]["text"].startswith("a = b")
    # Those of the prompt are the same when it is continued.
    longer = httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": "a = b c"}).json()
    assert longer["choices"][0]["logprobs"]["token_logprobs"][1 : ids["count"]] == found["token_logprobs"][1:-1]


def test_responses(client: OpenAI) -> None:
    options = {"model": "tiny", "input": "Hello", "instructions": "Be short.", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**options)  # type: ignore[call-overload]
    events = list(client.responses.create(**options, stream=True))  # type: ignore[call-overload]
    assert whole.id.startswith("resp_") and whole.output[0].id.startswith("msg_")
    assert whole.status == events[-1].response.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text == events[-1].response.output_text
    assert whole.usage.output_tokens == 8


def test_errors_have_the_types_of_the_client(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)  # type: ignore[arg-type]
    assert caught.value.param == "temperature"


def test_many_at_a_time_say_what_each_says_alone(client: OpenAI) -> None:
    prompts = [f"the prompt of number {number}" * (1 + number % 3) for number in range(12)]

    def ask(prompt: str) -> str:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, seed=3, temperature=1)
        return made.choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    together = [""] * len(prompts)

    def ask_too(place: int) -> None:
        together[place] = ask(prompts[place])

    threads = [threading.Thread(target=ask_too, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
