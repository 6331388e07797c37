"""Prompts that are cut short, echoed, and told as token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from helpers.fake_serving import FakeScheduler, client_of, fake_model, text_tokens
from helpers.toys.toy_tokenizers import EOS, metaspace

PATH = "/v1/completions"


def choice_of(client: TestClient, prompt: Any, **body: Any) -> Any:
    answer = client.post(PATH, json={"prompt": prompt, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


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
    choice = choice_of(client, list(range(1, 9)), return_token_ids=True, **options)
    assert choice["prompt_token_ids"] == expected == list(scheduler.asked[0].request.prompt)


@pytest.mark.parametrize(("side", "expected"), [("left", ["<s>", "e"]), ("right", ["<s>", "▁a"])])
def test_a_text_that_is_cut_short_keeps_the_token_that_begins_it(side: str, expected: list[str]) -> None:
    tokenizer = metaspace()
    client = client_of(fake_model([EOS], tokenizer=tokenizer))
    choice = choice_of(client, "abcde", truncate_prompt_tokens=2, truncation_side=side, return_token_ids=True)
    names = {number: name for name, number in tokenizer.vocabulary().items()}
    assert [names[token] for token in choice["prompt_token_ids"]] == expected


def test_a_prompt_that_is_cut_short_is_echoed_so(client: TestClient) -> None:
    choice = choice_of(client, "abcdef", truncate_prompt_tokens=2, echo=True, logprobs=0)
    assert choice["text"] == "efHello, world."
    assert choice["logprobs"]["tokens"][:3] == ["e", "f", "H"] and choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


def test_special_tokens_of_a_prompt_of_tokens_are_echoed(client: TestClient) -> None:
    ids = [EOS, *text_tokens("Hi"), EOS]
    choice = choice_of(client, ids, echo=True, logprobs=1)
    assert choice["text"] == "<eos>Hi<eos>Hello, world."
    assert choice["logprobs"]["tokens"][:4] == ["<eos>", "H", "i", "<eos>"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 5, 6, 7, 12]


def test_special_tokens_that_the_tokenizer_adds_are_not_echoed() -> None:
    client = client_of(fake_model([EOS], tokenizer=metaspace()))
    assert choice_of(client, "abc", echo=True)["text"] == "abc"


def test_token_ids_are_told_of_the_prompt_and_of_the_answer(client: TestClient) -> None:
    choice = choice_of(client, "Hi", return_token_ids=True)
    assert choice["prompt_token_ids"] == text_tokens("Hi")
    assert choice["token_ids"] == [*text_tokens("Hello, world."), EOS]
    assert "token_ids" not in choice_of(client, "Hi")


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_are_streamed_once(client: TestClient, echo: bool) -> None:
    body = {"prompt": "Hi", "stream": True, "echo": echo, "n": 2, "return_token_ids": True}
    events = client.post(PATH, json=body).text.split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == text_tokens("Hi")
        assert not any("prompt_token_ids" in choice for choice in own[1:])
        assert [token for choice in own for token in choice["token_ids"]] == [*text_tokens("Hello, world."), EOS]


def test_chats_have_no_such_fields(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for field in ({"truncate_prompt_tokens": 3}, {"return_token_ids": True}):
        answer = client.post("/v1/chat/completions", json={**body, **field})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(field))
