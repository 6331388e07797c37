from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.toys.toy_artifact import make_toy
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import Engine, RequestError, SamplingParams, Tokenizer, load
from picompile_runtime.sampling.chat import ChatFullError, Conversation
from picompile_runtime.sampling.chat_answer import ChatAnswer, ChatMessage, ChatOptions

VOCAB, CONTEXT, CHUNK = 300, 200, 8
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
GREEDY = ChatOptions(SamplingParams(temperature=0), max_tokens=6)
LONG = "a question that is longer than a chunk"


def tokenizer_with(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": template})


@pytest.fixture
def make_engine(make_artifact: Callable[..., Path]) -> Callable[..., Engine]:
    """An engine whose model says the tokens of `script` at given positions, and elsewhere what it likes."""

    def make(script: dict[int, int] | None = None, name: str = "artifact") -> Engine:
        toy = make_toy(VOCAB, CONTEXT, script)
        return load(make_artifact(name, toy=toy, context=CONTEXT, chunk=CHUNK), threads=1)

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture
def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each call that had an engine read."""
    calls: list[list[int]] = []

    def spied(name: str) -> None:
        original = getattr(Engine, name)

        def read(self: Engine, ids: Sequence[int], *rest: Any, **more: Any) -> Any:
            calls.append(list(ids))
            return original(self, ids, *rest, **more)

        monkeypatch.setattr(Engine, name, read)

    spied("read")
    spied("read_chunk")
    return calls


def fresh_answer(engine: Engine, messages: Sequence[ChatMessage], options: ChatOptions = GREEDY) -> str:
    """The answer to the last of the messages by a conversation that has read nothing."""
    conversation = Conversation(engine, tokenizer_with(), options)
    conversation.set_messages(messages)
    return "".join(conversation.answer_again())


def test_a_second_question_reads_only_what_is_new(engine: Engine, tokens_read: list[list[int]]) -> None:
    conversation = Conversation(engine, tokenizer_with(), ChatOptions(SamplingParams(temperature=0), max_tokens=1))
    answer = conversation.ask(LONG)
    said = "".join(answer)
    assert list(chain(*tokens_read)) == answer.prompt_tokens
    assert all(len(call) <= CHUNK + 1 for call in tokens_read)
    tokens_read.clear()
    second = conversation.ask("two")
    answers = [said, "".join(second)]
    text = second.prompt_tokens
    # The model's only token was not read yet.
    assert text[: len(answer.prompt_tokens)] == answer.prompt_tokens
    assert list(chain(*tokens_read)) == text[len(answer.prompt_tokens) :]
    assert second.stats.reused_tokens == len(answer.prompt_tokens)
    assert second.stats.prompt_tokens == len(text)
    turns = [("user", LONG), ("assistant", answers[0]), ("user", "two"), ("assistant", answers[1])]
    assert conversation.messages == tuple(ChatMessage(*turn) for turn in turns)


def test_tokens_of_the_answer_are_not_read_again(
    make_engine: Callable[..., Engine], tokens_read: list[list[int]]
) -> None:
    tokenizer = tokenizer_with()
    start = len(tokenizer.encode_chat([{"role": "user", "content": "one"}]))
    spoken = tokenizer.encode("xyz w", special_tokens=False)
    script = {start - 1 + place: token for place, token in enumerate([*spoken, EOS])}
    conversation = Conversation(make_engine(script), tokenizer, GREEDY)
    assert "".join(conversation.ask("one")) == "xyz w"
    tokens_read.clear()
    second = conversation.ask("two")
    "".join(second)
    assert tokenizer.decode([*tokens_read[0], *tokens_read[1]]) == "\n<u>two\n<a>"
    assert second.reused_tokens == start + len(spoken)
    # An answer of nothing is one.
    conversation = Conversation(make_engine({start - 1: EOS}, name="silent"), tokenizer, GREEDY)
    answer = conversation.ask("one")
    assert ("".join(answer), answer.stats.stop_reason) == ("", "eos")
    assert conversation.messages[-1] == ChatMessage("assistant", "")


def test_a_question_that_was_asked_already_reads_two_tokens(engine: Engine, tokens_read: list[list[int]]) -> None:
    """A single one would be decoded, which may compute fewer neurons than reading a prompt does."""
    conversation = Conversation(engine, tokenizer_with(), GREEDY)
    first = "".join(conversation.ask(LONG))
    tokens_read.clear()
    again = conversation.answer_again()
    assert "".join(again) == first
    assert [len(call) for call in tokens_read] == [2, 1, 1, 1, 1, 1]
    assert len(conversation.messages) == 2


def test_counts_of_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neurons of other answers do not count."""
    answer = Conversation(engine, tokenizer_with(), GREEDY).ask(LONG)
    assert answer.stats.stop_reason == ""
    "".join(answer)
    stats = answer.stats
    assert (stats.generated_tokens, stats.stop_reason, stats.reused_tokens) == (6, "max_tokens", 0)
    assert stats.prompt_tokens_per_s > 0 and stats.answer_tokens_per_s > 0 and stats.time_to_first_token_s > 0
    assert stats.fired_share is not None and stats.computed_share is not None
    assert 0 <= stats.fired_share <= stats.computed_share <= 1
    totals = iter([(10, 5, 100), (40, 15, 200)])
    monkeypatch.setattr(Engine, "firing_totals", lambda self, function: next(totals))
    answer = Conversation(engine, tokenizer_with(), GREEDY).ask("one")
    "".join(answer)
    assert (answer.stats.computed_share, answer.stats.fired_share) == (0.3, 0.1)


def test_a_chat_whose_reading_is_cancelled_stops_at_a_chunk(engine: Engine, tokens_read: list[list[int]]) -> None:
    for pieces in (1, 3):
        engine.reset()
        tokens_read.clear()
        conversation = Conversation(engine, tokenizer_with(), GREEDY)
        answer = conversation.ask(LONG)
        assert [next(answer) for _ in range(pieces)] == [""] * pieces
        answer.cancel()
        assert list(answer) == []
        assert [len(call) for call in tokens_read] == [CHUNK] * pieces
        assert (answer.stats.stop_reason, answer.text) == ("cancelled", "")
        conversation.revert()
        assert conversation.messages == ()
        assert conversation.ask(LONG).reused_tokens == CHUNK * pieces


def test_a_cancelled_answer_keeps_what_was_said(engine: Engine) -> None:
    options = ChatOptions(SamplingParams(temperature=0))
    conversation = Conversation(engine, tokenizer_with(), options)
    answer = conversation.ask("one")
    said = next(answer) + next(answer)
    answer.cancel()
    said += "".join(answer)
    assert answer.stats.stop_reason == "cancelled"
    assert conversation.messages[-1] == ChatMessage("assistant", said)
    assert engine.position < CONTEXT / 2
    said = next(filter(None, conversation.ask("two")))  # and is left alone
    assert conversation.messages[-1] == ChatMessage("assistant", said)
    conversation.options = GREEDY
    third = "".join(conversation.ask("three"))
    assert third == fresh_answer(engine, conversation.messages[:-1])


def test_a_full_chat_refuses_a_question_and_stays_as_it_is(engine: Engine) -> None:
    conversation = Conversation(engine, tokenizer_with(), GREEDY)
    first = "".join(conversation.ask("x" * 100))
    before, position = conversation.messages, engine.position
    with pytest.raises(ChatFullError, match=rf"the chat is full: .* \d{{3}} tokens, and the context has {CONTEXT}$"):
        conversation.ask("y" * 90)
    too_long = r"the message is too long: it takes 30\d tokens alone.*; shorten it"
    with pytest.raises(RequestError, match=too_long) as found:
        conversation.ask("y" * 300)
    assert not isinstance(found.value, ChatFullError)
    assert (conversation.messages, engine.position) == (before, position)
    assert conversation.undo() == "x" * 100
    assert conversation.ask("x" * 100).prompt_tokens[:-2]
    assert "".join(conversation.answer_again()) == first


def test_an_answer_may_fill_the_context(engine: Engine) -> None:
    conversation = Conversation(engine, tokenizer_with(), ChatOptions(SamplingParams(temperature=0)))
    answer = conversation.ask("x" * (CONTEXT - 12))
    "".join(answer)
    assert (answer.stats.stop_reason, engine.position) == ("context", CONTEXT)
    with pytest.raises(ChatFullError):
        conversation.ask("two")
    conversation.undo()
    assert "".join(conversation.ask("two")) == fresh_answer(
        engine, [ChatMessage("user", "two")], ChatOptions(SamplingParams(temperature=0))
    )


def test_whether_a_template_uses_a_system_prompt(engine: Engine) -> None:
    for template, expected in (
        (TEMPLATE, True),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", False),
    ):
        conversation = Conversation(engine, tokenizer_with(template), GREEDY)
        assert conversation.set_system("be nice") is expected
        assert conversation.token_count() == 0
        assert conversation.set_system("") is True
        assert conversation.system == ""
        conversation.set_messages([ChatMessage("user", "abc")])
        assert conversation.token_count() == len("<u>abc\n" if expected else "abc")  # with no answer to come
    default = (
        "{% if messages[0].role != 'system' %}be nice{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert Conversation(engine, tokenizer_with(default), GREEDY).set_system("be nice") is True
    without = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    # It becomes a part of the question.
    assert Conversation(engine, tokenizer_with(without), GREEDY).set_system("be nice") is True
    conversation = Conversation(engine, tokenizer_with("{{ raise_exception('no system') }}"), GREEDY)
    for rejected in (
        lambda: conversation.set_system("be nice"),
        lambda: conversation.set_messages([ChatMessage("system", "be nice")]),
    ):
        with pytest.raises(RequestError, match="no system"):
            rejected()
        assert conversation.system == ""


def test_messages_that_cannot_be_taken_change_nothing(engine: Engine) -> None:
    conversation = Conversation(engine, tokenizer_with(), GREEDY)
    for call in (conversation.undo, conversation.answer_again):
        with pytest.raises(RequestError, match="the chat has no question yet"):
            call()
    "".join(conversation.ask("one"))
    before = conversation.messages
    wrong: tuple[tuple[Callable[[], Any], str], ...] = (
        (
            lambda: conversation.set_messages([ChatMessage("user", "x"), ChatMessage("system", "y")]),
            "only the first message of a chat can be a system prompt",
        ),
        (lambda: conversation.set_messages([ChatMessage("user", "\ud83d")]), "not valid Unicode"),
        (lambda: conversation.ask("\ud83d"), "not valid Unicode"),
        (lambda: ChatMessage("tool", "x"), "role of a message is one of system, user, assistant, not 'tool'"),
        (lambda: ChatMessage("user", 5), "the content of a message is a text, not 5"),  # type: ignore[arg-type]
        (lambda: ChatOptions(max_tokens=0), "max_tokens must be 1 or more, not 0"),
    )
    for call, says in wrong:
        with pytest.raises(RequestError, match=says):
            call()
    assert conversation.messages == before


def test_a_model_without_a_template_gets_a_plain_dialogue(make_engine: Callable[..., Engine]) -> None:
    tokenizer = byte_level()
    start = len(tokenizer.encode("User: one\n\nAssistant:"))
    spoken = tokenizer.encode(" xyz w\n\nUser: more")
    script = {start - 1 + place: token for place, token in enumerate(spoken)}
    conversation = Conversation(make_engine(script), tokenizer, ChatOptions(SamplingParams(temperature=0)))
    answer = conversation.ask("one")
    assert "".join(answer) == " xyz w\n"
    assert (len(answer.prompt_tokens), answer.stats.stop_reason) == (start, "stop")
    # The model wrote the beginning of the next turn itself, but for the last token, which was not read.
    second = conversation.ask("two")
    assert tokenizer.decode(second.prompt_tokens) == "User: one\n\nAssistant: xyz w\n\nUser: two\n\nAssistant:"
    assert tokenizer.decode(second.prompt_tokens[second.reused_tokens :]) == ": two\n\nAssistant:"


def test_a_seed_repeats_a_chat_but_not_an_answer_in_it(engine: Engine) -> None:
    """A chat that starts anew or gets a new seed begins with it."""
    seeded = [ChatOptions(SamplingParams(50.0, top_k=0, top_p=1.0, seed=seed), max_tokens=6) for seed in (7, 8)]
    conversation = Conversation(engine, tokenizer_with(), seeded[0])
    chats = []
    for _ in range(2):
        answers = ["".join(conversation.ask("one")), *("".join(conversation.answer_again()) for _ in range(2))]
        assert all(one != other for one, other in pairwise(answers))
        chats.append(answers)
        conversation.reset()
    assert chats[0] == chats[1]
    assert "".join(conversation.ask("one")) == chats[0][0]
    for options, same in ((seeded[1], False), (seeded[0], True)):
        conversation.options = options
        assert ("".join(conversation.answer_again()) == chats[0][0]) is same


def _do(conversation: Conversation, action: tuple[str, int]) -> None:
    """Change a conversation in one of the ways that users have."""
    kind, number = action
    answer: ChatAnswer | None = None
    if kind == "ask":
        answer = conversation.ask("q" * number)
    elif kind == "system":
        conversation.set_system("s" * number)
    elif kind == "undo" and len(conversation.messages) > 1:
        conversation.undo()
    elif kind == "regen" and any(message.role == "user" for message in conversation.messages):
        answer = conversation.answer_again()
    elif kind == "reset":
        conversation.reset()
    if answer is not None:
        for _ in zip(range(number), answer, strict=False):
            pass
        answer.cancel()
        if number % 2:
            "".join(answer)
        if not answer.text:
            conversation.revert()


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "regen", "undo", "system", "reset"]), st.integers(0, 20)), max_size=8
)


@pytest.mark.slow("draws many chats and answers each twice")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=_ACTIONS)
def test_an_answer_is_that_of_a_chat_that_was_never_read_in_parts(
    engine: Engine, actions: list[tuple[str, int]]
) -> None:
    conversation = Conversation(engine, tokenizer_with(), GREEDY)
    try:
        for action in actions:
            _do(conversation, action)
        found = "".join(conversation.ask("last"))
    except ChatFullError:
        conversation.reset()
        found = "".join(conversation.ask("last"))
    assert found == fresh_answer(engine, conversation.messages[:-1])
