from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import CONTEXT, FIRED, FakeScheduler, client_of, default_params, fake_model, text_tokens
from helpers.toys.toy_tokenizers import EOS
from picompile_runtime.serving.http.completion_body import DEFAULT_MAX_TOKENS

PATH = "/v1/completions"


def complete(client: TestClient, **body: Any) -> Any:
    answer = client.post(PATH, json={"prompt": "Hi", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: TestClient, **body: Any) -> list[Any]:
    """The chunks of a stream, but for [DONE], with which it must end."""
    answer = client.post(PATH, json={"prompt": "Hi", "stream": True, **body})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    *events, done, rest = answer.text.split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def test_a_text_ends_with_the_model(client: TestClient) -> None:
    made = complete(client)
    assert made["object"] == "text_completion" and made["id"].startswith("cmpl-") and made["model"] == "fake"
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hello, world.", "stop", None)
    tokens = len(text_tokens("Hello, world.")) + 1
    assert made["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": tokens,
        "total_tokens": 2 + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert made["timings"]["predicted_n"] == tokens and made["timings"]["prompt_n"] == 2
    assert made["timings"]["fired_share"] == FIRED


def test_defaults_are_openais(client: TestClient, scheduler: FakeScheduler) -> None:
    complete(client)
    request = scheduler.asked[0].request
    assert request.params == default_params()
    assert request.max_tokens == DEFAULT_MAX_TOKENS
    assert (request.top_log_probabilities, request.with_prompt, request.ignore_end) == (None, False, False)


def test_every_field_reaches_the_scheduler(client: TestClient, scheduler: FakeScheduler) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "seed": 5,
        "repetition_penalty": 1.5,
    }
    complete(client, **sampling, logit_bias={"3": -100}, max_tokens=9, logprobs=2, ignore_eos=True)
    request = scheduler.asked[0].request
    assert request.params == default_params(**sampling, logit_bias={3: -100.0})
    assert (request.max_tokens, request.top_log_probabilities, request.ignore_end) == (9, 2, True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"temperature": None, "seed": None, "n": None, "stop": None}, {}),
    ],
)
def test_values_of_other_servers(client: TestClient, scheduler: FakeScheduler, fields: Any, expected: Any) -> None:
    complete(client, **fields)
    assert scheduler.asked[0].request.params == default_params(**expected)


def test_the_models_own_defaults_hold_where_a_request_says_nothing() -> None:
    model = fake_model()
    model.defaults = default_params(temperature=0.6, top_k=20)
    client = client_of(model)
    complete(client, temperature=0)
    assert model.scheduler.asked[0].request.params == default_params(temperature=0, top_k=20)  # type: ignore[attr-defined]


def test_several_prompts_with_several_answers_each(scheduler: FakeScheduler, client: TestClient) -> None:
    scheduler.says = lambda request: text_tokens(f"{len(request.prompt)}/{request.params.seed}")
    made = complete(client, prompt=["abc", text_tokens("x")], n=2, seed=4)
    assert [(choice["index"], choice["text"]) for choice in made["choices"]] == [
        *((0, "3/4"), (1, "3/5"), (2, "1/4"), (3, "1/5"))
    ]
    # Each prompt counts once.
    assert made["usage"]["prompt_tokens"] == 4


def test_cached_tokens_count_if_all_answers_found_them(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.cached = 2
    made = complete(client, prompt="abc", n=2)
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert (made["timings"]["cache_n"], made["timings"]["prompt_n"]) == (4, 2)


@pytest.mark.parametrize("text", ["Hello, world.", "né 🙂 ok", "", "🙂"])
def test_a_stream_has_the_text_of_the_whole(text: str) -> None:
    client = client_of(fake_model(text))
    chunks = streamed(client, max_tokens=50)
    assert text_of(chunks) == text == complete(client, max_tokens=50)["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    # A character is sent when it is whole.
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
    assert "usage" not in chunks[-1] and chunks[-1]["timings"]["predicted_n"] == len(text_tokens(text)) + 1


def test_the_last_chunk_has_the_last_text(client: TestClient) -> None:
    chunks = streamed(client, max_tokens=3)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" and chunks[-1]["choices"][0]["text"]


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    client = client_of(fake_model([*text_tokens("ok"), *text_tokens("🙂")[:2]]))
    assert text_of(streamed(client)) == complete(client)["choices"][0]["text"] == "ok\ufffd"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("wo", "Hello, "),
        (["zz", "lo, w"], "Hel"),
        (["."], "Hello, world"),
        ("ld.!", "Hello, world."),
        ([], "Hello, world."),
        ("H", ""),
    ],
)
def test_stop_texts_across_tokens(client: TestClient, stop: Any, text: str) -> None:
    made = complete(client, stop=stop, logprobs=0)
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    chunks = streamed(client, stop=stop, logprobs=0)
    assert text_of(chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    # Tokens that begin behind the end of the text are not told.
    for logprobs in (choice["logprobs"], chunks[-1]["choices"][0]["logprobs"]):
        assert all(offset < len(text) or text == "Hello, world." for offset in logprobs["text_offset"])


def test_a_stop_text_cancels_the_answer(scheduler: FakeScheduler, client: TestClient) -> None:
    scheduler.says = lambda request: text_tokens("go on stop" + "x" * 60)
    scheduler.delay_s = 0.002
    made = complete(client, stop="stop", max_tokens=100)
    assert made["choices"][0]["text"] == "go on "
    assert made["usage"]["completion_tokens"] == len(text_tokens("go on stop"))
    assert scheduler.asked[0].cancelled.is_set()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities(client: TestClient, is_streamed: bool) -> None:
    if is_streamed:
        parts = [chunk["choices"][0]["logprobs"] for chunk in streamed(client, logprobs=2)]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        found = complete(client, logprobs=2)["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == "Hello, world.<eos>"
    assert found["text_offset"] == [len("".join(found["tokens"][:place])) for place in range(len(found["tokens"]))]
    assert set(found["token_logprobs"]) == {-0.5}
    # The two likeliest, and the token itself.
    assert all(list(top.values()) == [-2.0, -3.0, -0.5] for top in found["top_logprobs"])


def test_parts_of_characters_have_their_place() -> None:
    client = client_of(fake_model("a🙂b"))
    found = complete(client, logprobs=0)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "\\xf0", "\\x9f", "\\x99", "\\x82", "b", "<eos>"]
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    parts = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in streamed(client, logprobs=0)]
    assert parts == [["a"], ["\\xf0", "\\x9f", "\\x99", "\\x82"], ["b"], ["<eos>"]]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("prompt", ["Hé!", text_tokens("Hé!")])
def test_echo_with_log_probabilities_of_the_prompt(client: TestClient, prompt: Any, is_streamed: bool) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    if is_streamed:
        chunks = streamed(client, **fields)
        text, parts = text_of(chunks), [chunk["choices"][0]["logprobs"] for chunk in chunks]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        (choice,) = complete(client, **fields)["choices"]
        text, found = choice["text"], choice["logprobs"]
    assert text.startswith("Hé!") and len(text) > 3
    assert found["tokens"][:4] == ["H", "\\xc3", "\\xa9", "!"]
    assert found["text_offset"][:5] == [0, 1, 1, 2, 3]
    assert found["token_logprobs"] == [None, *[-0.5] * 4]
    assert found["top_logprobs"][0] is None and all(len(top) == 2 for top in found["top_logprobs"][1:3])


def test_echo_without_log_probabilities(client: TestClient, scheduler: FakeScheduler) -> None:
    assert complete(client, echo=True)["choices"][0]["text"] == "HiHello, world."
    assert text_of(streamed(client, echo=True)) == "HiHello, world."
    # What the cache has is still reused.
    assert not any(answer.request.with_prompt for answer in scheduler.asked)


def test_only_the_prompt_is_scored_with_no_tokens_to_make(client: TestClient) -> None:
    made = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert made["choices"][0]["text"] == "Hi" and made["choices"][0]["finish_reason"] == "length"
    assert made["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert made["usage"]["completion_tokens"] == 0 and made["timings"]["fired_share"] is None


def test_prompt_log_probabilities_as_vllm_has_them(client: TestClient) -> None:
    first, second = text_tokens("Hi")
    (choice,) = complete(client, prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "1": {"logprob": -2.0, "rank": 1, "decoded_token": "!"},
            "2": {"logprob": -3.0, "rank": 2, "decoded_token": '"'},
            str(second): {"logprob": -0.5, "rank": None, "decoded_token": "i"},
        },
    ]
    assert choice["logprobs"] is None and first != second
    assert complete(client)["choices"][0]["prompt_logprobs"] is None


def test_infinite_log_probabilities_can_be_sent(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers import fake_serving
    from picompile_runtime.serving.request import TokenLogProbability

    named = TokenLogProbability(5, float("-inf"), ((6, 1e-9),))
    monkeypatch.setattr(fake_serving, "likely", lambda token, top: named)
    found = complete(client, logprobs=1)["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] == -9999.0 and max(found["top_logprobs"][0].values()) == 0.0


def test_usage_of_a_stream(client: TestClient) -> None:
    *chunks, last = streamed(client, stream_options={"include_usage": True}, n=2)
    assert all(chunk["usage"] is None for chunk in chunks) and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * (len(text_tokens("Hello, world.")) + 1)
    assert last["usage"]["prompt_tokens"] == 2 and last["timings"]["predicted_n"] == last["usage"]["completion_tokens"]
    assert [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] in (
        [0, 1],
        [1, 0],
    )


def test_usage_of_every_chunk(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed(client, stream_options=options)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_timings_of_every_token(client: TestClient) -> None:
    chunks = streamed(client, timings_per_token=True)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert all(chunk["timings"]["fired_share"] == FIRED for chunk in chunks)
    assert [("timings" in chunk) for chunk in streamed(client)] == [False] * (len(chunks) - 1) + [True]


def test_an_answer_goes_on_to_the_end_of_the_context(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.says = lambda request: text_tokens("x" * 2 * CONTEXT)
    made = complete(client, max_tokens=2 * CONTEXT)
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["usage"]["total_tokens"] == CONTEXT + 1
    assert text_of(streamed(client, max_tokens=2 * CONTEXT)) == made["choices"][0]["text"]


def test_end_tokens_that_are_ignored(scheduler: FakeScheduler, client: TestClient) -> None:
    scheduler.says = lambda request: [*text_tokens("a"), EOS, *text_tokens("b"), EOS]
    assert complete(client)["choices"][0]["text"] == "a"
    made = complete(client, ignore_eos=True, max_tokens=3)
    assert made["choices"][0]["text"] == "ab" and made["choices"][0]["finish_reason"] == "length"
