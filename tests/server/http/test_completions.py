from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers import fake_serving
from helpers.fake_serving import CONTEXT, FIRED, FakeScheduler, client_of, default_params, fake_model, text_tokens
from helpers.toys.toy_tokenizers import EOS, metaspace
from picompile_server.http.completion_body import DEFAULT_MAX_TOKENS
from picompile_server.request import TokenLogProbability

SAYS = "Hello, world."


def complete(client: TestClient, **body: Any) -> Any:
    return fake_serving.made(client, "/v1/completions", **{"prompt": "Hi", **body})


def choice_of(client: TestClient, **body: Any) -> Any:
    (choice,) = complete(client, **body)["choices"]
    return choice


def streamed(client: TestClient, **body: Any) -> list[Any]:
    return fake_serving.streamed(client, "/v1/completions", **{"prompt": "Hi", **body})


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def with_log_probabilities(client: TestClient, is_streamed: bool, **body: Any) -> tuple[str, Any]:
    """The text and the log-probabilities of one answer, those of a stream joined."""
    if not is_streamed:
        choice = choice_of(client, **body)
        return choice["text"], choice["logprobs"]
    chunks = streamed(client, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    return text_of(chunks), {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_a_text_ends_with_the_model(client: TestClient, scheduler: FakeScheduler) -> None:
    made = complete(client)
    assert made["object"] == "text_completion" and made["id"].startswith("cmpl-") and made["model"] == "fake"
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (SAYS, "stop", None)
    tokens = len(text_tokens(SAYS)) + 1
    counts = {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": 2 + tokens}
    details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert made["usage"] == {**counts, **details}
    assert made["timings"]["predicted_n"] == tokens and made["timings"]["prompt_n"] == 2
    assert made["timings"]["fired_share"] == FIRED
    # The defaults are those of chat on the command line.
    request = scheduler.asked[0].request
    assert (request.params, request.max_tokens) == (default_params(), DEFAULT_MAX_TOKENS)
    assert (request.top_log_probabilities, request.with_prompt, request.ignore_end) == (None, False, False)


def test_every_field_reaches_the_scheduler(client: TestClient, scheduler: FakeScheduler) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5}
    sampling |= {"presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    complete(client, **sampling, logit_bias={"3": -100}, max_tokens=9, logprobs=2, ignore_eos=True, id_slot=0)
    request = scheduler.asked[0].request
    assert request.params == default_params(**sampling, logit_bias={3: -100.0})
    assert (request.max_tokens, request.top_log_probabilities, request.ignore_end) == (9, 2, True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_p": 0}, {"top_p": 0.0}),
        ({"top_k": -1, "max_tokens": None, "n_predict": None}, {"top_k": 0}),
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
    complete(client_of(model), temperature=0)
    assert model.scheduler.asked[0].request.params == default_params(temperature=0, top_k=20)  # type: ignore[attr-defined]


def test_several_prompts_with_several_answers_each(scheduler: FakeScheduler, client: TestClient) -> None:
    scheduler.says = lambda request: text_tokens(f"{len(request.prompt)}/{request.params.seed}")
    made = complete(client, prompt=["abc", text_tokens("x")], n=2, seed=4)
    found = [(choice["index"], choice["text"]) for choice in made["choices"]]
    assert found == [(0, "3/4"), (1, "3/5"), (2, "1/4"), (3, "1/5")]
    assert made["usage"]["prompt_tokens"] == 4  # each prompt counts once
    # Cached tokens count if all answers found them.
    scheduler.cached = 2
    made = complete(client, prompt="abc", n=2)
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert (made["timings"]["cache_n"], made["timings"]["prompt_n"]) == (4, 2)


@pytest.mark.parametrize("text", [SAYS, "né 🙂 ok", "", "🙂"])
def test_a_stream_has_the_text_of_the_whole(text: str) -> None:
    client = client_of(fake_model(text))
    chunks = streamed(client, max_tokens=50)
    assert text_of(chunks) == text == choice_of(client, max_tokens=50)["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    # A character is sent when it is whole.
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
    assert "usage" not in chunks[-1] and chunks[-1]["timings"]["predicted_n"] == len(text_tokens(text)) + 1


def test_the_last_text_of_a_stream(client: TestClient) -> None:
    last = streamed(client, max_tokens=3)[-1]["choices"][0]
    assert last["finish_reason"] == "length" and last["text"]
    # Bytes that are no character come at the end.
    client = client_of(fake_model([*text_tokens("ok"), *text_tokens("🙂")[:2]]))
    assert text_of(streamed(client)) == choice_of(client)["text"] == "ok\ufffd"


@pytest.mark.parametrize(
    ("stop", "text"),
    [("wo", "Hello, "), (["zz", "lo, w"], "Hel"), (["."], "Hello, world"), ("ld.!", SAYS), ([], SAYS), ("H", "")],
)
def test_stop_texts_across_tokens(client: TestClient, stop: Any, text: str) -> None:
    choice, chunks = choice_of(client, stop=stop, logprobs=0), streamed(client, stop=stop, logprobs=0)
    assert choice["text"] == text_of(chunks) == text
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"
    # Tokens that begin behind the end of the text are not told.
    for logprobs in (choice["logprobs"], chunks[-1]["choices"][0]["logprobs"]):
        assert all(offset < len(text) or text == SAYS for offset in logprobs["text_offset"])


def test_a_stop_text_cancels_the_answer(scheduler: FakeScheduler, client: TestClient) -> None:
    scheduler.says = lambda request: text_tokens("go on stop" + "x" * 60)
    scheduler.delay_s = 0.002
    made = complete(client, stop="stop", max_tokens=100)
    assert made["choices"][0]["text"] == "go on "
    assert made["usage"]["completion_tokens"] == len(text_tokens("go on stop"))
    assert scheduler.asked[0].cancelled.is_set()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities(client: TestClient, is_streamed: bool) -> None:
    _, found = with_log_probabilities(client, is_streamed, logprobs=2)
    assert "".join(found["tokens"]) == "Hello, world.<eos>"
    assert found["text_offset"] == [len("".join(found["tokens"][:place])) for place in range(len(found["tokens"]))]
    assert set(found["token_logprobs"]) == {-0.5}
    # The two likeliest, and the token itself.
    assert all(list(top.values()) == [-2.0, -3.0, -0.5] for top in found["top_logprobs"])


def test_parts_of_characters_have_their_place() -> None:
    client = client_of(fake_model("a🙂b"))
    found = choice_of(client, logprobs=0)["logprobs"]
    assert found["tokens"] == ["a", "\\xf0", "\\x9f", "\\x99", "\\x82", "b", "<eos>"]
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    parts = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in streamed(client, logprobs=0)]
    assert parts == [["a"], ["\\xf0", "\\x9f", "\\x99", "\\x82"], ["b"], ["<eos>"]]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_with_log_probabilities_of_the_prompt(client: TestClient, is_streamed: bool) -> None:
    for prompt in ("Hé!", text_tokens("Hé!")):
        text, found = with_log_probabilities(client, is_streamed, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
        assert text.startswith("Hé!") and len(text) > 3
        assert found["tokens"][:4] == ["H", "\\xc3", "\\xa9", "!"]
        assert found["text_offset"][:5] == [0, 1, 1, 2, 3]
        assert found["token_logprobs"] == [None, *[-0.5] * 4]
        assert found["top_logprobs"][0] is None and all(len(top) == 2 for top in found["top_logprobs"][1:3])


def test_echo_without_log_probabilities(client: TestClient, scheduler: FakeScheduler) -> None:
    assert choice_of(client, echo=True)["text"] == text_of(streamed(client, echo=True)) == f"Hi{SAYS}"
    # What the cache has is still reused.
    assert not any(answer.request.with_prompt for answer in scheduler.asked)


def test_only_the_prompt_is_scored_with_no_tokens_to_make(client: TestClient) -> None:
    made = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert made["choices"][0]["text"] == "Hi" and made["choices"][0]["finish_reason"] == "length"
    assert made["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert made["usage"]["completion_tokens"] == 0 and made["timings"]["fired_share"] is None


def test_special_tokens_are_echoed_if_the_request_gave_them(client: TestClient) -> None:
    choice = choice_of(client, prompt=[EOS, *text_tokens("Hi"), EOS], echo=True, logprobs=1)
    assert choice["text"] == f"<eos>Hi<eos>{SAYS}"
    assert choice["logprobs"]["tokens"][:4] == ["<eos>", "H", "i", "<eos>"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 5, 6, 7, 12]
    # Those that the tokenizer adds are not.
    assert choice_of(client_of(fake_model([EOS], tokenizer=metaspace())), prompt="abc", echo=True)["text"] == "abc"


def test_prompt_log_probabilities_as_vllm_has_them(client: TestClient) -> None:
    choice = choice_of(client, prompt_logprobs=2)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "1": {"logprob": -2.0, "rank": 1, "decoded_token": "!"},
            "2": {"logprob": -3.0, "rank": 2, "decoded_token": '"'},
            str(text_tokens("Hi")[1]): {"logprob": -0.5, "rank": None, "decoded_token": "i"},
        },
    ]
    assert choice["logprobs"] is None and choice_of(client)["prompt_logprobs"] is None


def test_infinite_log_probabilities_can_be_sent(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    named = TokenLogProbability(5, float("-inf"), ((6, 1e-9),))
    monkeypatch.setattr(fake_serving, "likely", lambda token, top: named)
    found = choice_of(client, logprobs=1)["logprobs"]
    assert found["token_logprobs"][0] == -9999.0 and max(found["top_logprobs"][0].values()) == 0.0


def test_usage_of_a_stream(client: TestClient) -> None:
    *chunks, last = streamed(client, stream_options={"include_usage": True}, n=2)
    assert all(chunk["usage"] is None for chunk in chunks) and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * (len(text_tokens(SAYS)) + 1)
    assert last["usage"]["prompt_tokens"] == 2 and last["timings"]["predicted_n"] == last["usage"]["completion_tokens"]
    ended = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1]
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
    assert choice_of(client)["text"] == "a"
    choice = choice_of(client, ignore_eos=True, max_tokens=3)
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [6, 7, 8]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [6, 7, 8]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"truncation_side": "right"}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_prompt_is_cut_short(client: TestClient, scheduler: FakeScheduler, options: Any, expected: Any) -> None:
    choice = choice_of(client, prompt=list(range(1, 9)), return_token_ids=True, **options)
    assert choice["prompt_token_ids"] == expected == list(scheduler.asked[0].request.prompt)


def test_a_text_that_is_cut_short_keeps_the_token_that_begins_it(client: TestClient) -> None:
    tokenizer = metaspace()
    names = {number: name for name, number in tokenizer.vocabulary().items()}
    for side, expected in (("left", ["<s>", "e"]), ("right", ["<s>", "▁a"])):
        options = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
        choice = choice_of(client_of(fake_model([EOS], tokenizer=tokenizer)), prompt="abcde", **options)
        assert [names[token] for token in choice["prompt_token_ids"]] == expected
    choice = choice_of(client, prompt="abcdef", truncate_prompt_tokens=2, echo=True, logprobs=0)
    assert choice["text"] == f"ef{SAYS}"
    assert choice["logprobs"]["tokens"][:3] == ["e", "f", "H"] and choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


def test_token_ids_are_told_of_the_prompt_and_of_the_answer(client: TestClient) -> None:
    choice, answer = choice_of(client, return_token_ids=True), [*text_tokens(SAYS), EOS]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (text_tokens("Hi"), answer)
    assert "token_ids" not in choice_of(client)
    # They are streamed once.
    for echo in (False, True):
        choices = [chunk["choices"][0] for chunk in streamed(client, echo=echo, n=2, return_token_ids=True)]
        for index in range(2):
            first, *others = own = [choice for choice in choices if choice["index"] == index]
            assert first["prompt_token_ids"] == text_tokens("Hi")
            assert not any("prompt_token_ids" in choice for choice in others)
            assert [token for choice in own for token in choice["token_ids"]] == answer
