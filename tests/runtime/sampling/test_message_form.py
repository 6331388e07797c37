"""Messages have the form that a template reads: texts or parts, and roles where it takes them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from helpers.chat_templates import CHATML, GEMMA, HERMES, MISTRAL
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import Tokenizer

TEXT = byte_level()._tokenizer.to_str()
# In the manner of SmolVLM and Idefics, of LLaVA, and of Llama 3.2 Vision, whose system message is a text alone.
EVERY_PART = (
    "{% for m in messages %}{{ m['role'] }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}\n"
    "{% endfor %}"
)
SELECTED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text }} {% else %}{{ m.role | upper }}: "
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
MIXED = (
    "{% for m in messages %}{% if m.role == 'system' %}<{{ m.content | trim }}>{% else %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %};{% endif %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}!{% endfor %}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]


def parts(*roles: str) -> list[dict[str, Any]]:
    """The chat with parts for the messages of these roles."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["role"] in roles else message
        for message in CHAT
    ]


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (EVERY_PART, ("system", "user", "assistant")),
        (SELECTED, ("system", "user", "assistant")),
        (MIXED, ("user", "assistant")),
        (EITHER, ()),
        (CHATML, ()),
    ],
)
def test_texts_are_given_in_the_form_that_a_template_reads(template: str, roles: tuple[str, ...]) -> None:
    tokenizer, given = Tokenizer(TEXT, {}, template), parts(*roles)
    assert tokenizer.fit_messages(CHAT) == given
    expected, _ = render_jinja_template(conversations=[given], chat_template=template)
    assert [tokenizer.render_chat(CHAT, False), tokenizer.render_chat(given, False)] == expected * 2
    assert all(message["content"] in expected[0] for message in CHAT)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (
            "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}",
            1,
        ),
        ("{% for m in messages %}{% if m.role in ['user', 'developer'] %}{{ m.content }}{% endif %}{% endfor %}", 1),
        ("{# developer #}" + CHATML, 0),
        ("{{ raise_exception('no') if messages[0].role == 'developer' }}" + CHATML, 0),
        (CHATML, 0),
        (EVERY_PART + "{# developer #}", 0),
    ],
)
def test_the_role_developer_is_kept_where_a_template_knows_it(template: str, role: int) -> None:
    tokenizer = Tokenizer(TEXT, {}, template)
    (message,) = tokenizer.fit_messages([{"role": "developer", "content": "Be kind."}])
    assert message["role"] == ("system", "developer")[role]
    assert "Be kind." in tokenizer.render_chat([{"role": "developer", "content": "Be kind."}, CHAT[1]])


def test_messages_without_a_template_or_a_role_stay() -> None:
    assert Tokenizer(TEXT).fit_messages(CHAT) == CHAT
    odd = [{"content": "a"}, {"role": ["user"], "content": "a"}, {"role": "user"}]
    assert Tokenizer(TEXT, {}, EVERY_PART).fit_messages(odd) == odd


LATER = [
    {"role": "system", "content": "Be kind."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "system", "content": "It is late."},
    {"role": "user", "content": "Bye"},
]
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, LATER),
        # Qwen 3.5 rejects a later system message, and others leave it out.
        (STRICT, [{"role": "system", "content": "Be kind.\n\nBe brief."}, *user("Hi", "It is late.", "Bye")]),
        (HERMES, [{"role": "system", "content": "Be kind.\n\nBe brief."}, *user("Hi", "It is late.", "Bye")]),
    ],
)
def test_a_later_system_message_is_the_users_where_a_template_has_none(
    template: str, expected: list[dict[str, str]]
) -> None:
    tokenizer = Tokenizer(TEXT, {}, template)
    assert tokenizer.fit_messages(LATER) == expected
    assert all(message["content"] in tokenizer.render_chat(LATER) for message in LATER)


def test_a_system_message_is_the_users_where_a_template_rejects_it() -> None:
    chat = [*LATER[:3], {"role": "assistant", "content": "Yes?"}, *user("Bye")]
    fitted = Tokenizer(TEXT, {}, GEMMA).fit_messages(chat)
    assert fitted == [*user("Be kind.\n\nBe brief.\n\nHi"), *chat[3:]]
    # A template that rejects everything is not adapted, and says why.
    assert Tokenizer(TEXT, {}, "{{ raise_exception('no') }}").fit_messages(chat[1:]) == chat[1:]


def test_messages_of_the_user_are_joined_where_roles_must_alternate() -> None:
    asked = [*user("Here.", "Hi"), {"role": "assistant", "content": "Yes?"}, *user("Bye")]
    joined = [*user("Here.\n\nHi"), *asked[2:]]
    assert Tokenizer(TEXT, {}, GEMMA).fit_messages(asked) == joined
    assert Tokenizer(TEXT, {}, MISTRAL).fit_messages(asked) == asked
    assert Tokenizer(TEXT, {}, GEMMA).fit_messages([*user("Hi"), LATER[3]]) == user("Hi\n\nIt is late.")
    assert Tokenizer(TEXT, {}, EVERY_PART).fit_messages(user("Hi", "Bye")) == [
        {"role": "user", "content": [{"type": "text", "text": text}]} for text in ("Hi", "Bye")
    ]


def test_contents_that_are_no_texts_are_not_joined() -> None:
    odd: list[dict[str, Any]] = [{"role": "user", "content": None}, *user("Hi")]
    assert Tokenizer(TEXT, {}, GEMMA).fit_messages(odd) == odd
