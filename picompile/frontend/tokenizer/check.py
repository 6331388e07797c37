"""The tokenizer of an artifact, held to what it was made of before anything else is compiled."""

from collections.abc import Iterator, Mapping
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.messages import printable, shown_ids, shown_text
from picompile.frontend.tokenizer.library import guarded
from picompile.frontend.tokenizer.probes import PROBE_CHATS, QUESTION, ProbeChat, probe_texts
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.tokenizer import Tokenizer


def check_ids(tokenizer: Tokenizer, source: Any, what: str) -> Iterator[str]:
    """Compare the runtime's tokenizer with the one of the tokenizers package that its files were written from.

    Args:
        tokenizer: the artifact's, which the runtime reads from its files.
        source: the tokenizer of the tokenizers package.
        what: the checkpoint, for messages.

    Yields:
        A line that names the first added token that is not read as itself, as some vocabularies have it.

    Raises:
        UnsupportedModelError: a text has other ids, or ids have another text.
        CannotBuildError, RequestError: one of the two fails.
    """
    with guarded():
        texts = probe_texts(source)
    for around in (False, True):
        with guarded():
            expected = [encoding.ids for encoding in source.encode_batch(texts, add_special_tokens=around)]
            written = source.decode_batch(expected, skip_special_tokens=True)
        for text, ids, again in zip(texts, expected, written, strict=True):
            found = tokenizer.encode(text, special_tokens=around)
            if found != ids:
                raise UnsupportedModelError(
                    f"{what}: the artifact's tokenizer reads {shown_text(text)} as {shown_ids(found)}, "
                    f"and the checkpoint's as {shown_ids(ids)}"
                )
            if tokenizer.decode(found) != again:
                raise UnsupportedModelError(f"{what}: the artifact's tokenizer writes {shown_ids(found)} otherwise")
    for text, number in tokenizer.added_tokens.items():
        found = tokenizer.encode(text, special_tokens=False)
        if number not in found or len(found) > 2:
            yield f"{what}: the added token {shown_text(text)} is read as {shown_ids(found)}, not as {number}"
            return


def check_templates(tokenizer: Tokenizer, special: Mapping[str, str], what: str) -> Iterator[str]:
    """Compare what the runtime makes of chats with what transformers' own renderer makes of them.

    Args:
        tokenizer: the artifact's.
        special: the special tokens by name that transformers hands to a template.
        what: the checkpoint, for messages.

    Yields:
        A line about a template that no chat can be rendered with, or that never writes what the user says.

    Raises:
        UnsupportedModelError: a chat is rendered otherwise. That both fail is agreement.
    """
    if not tokenizer.has_chat_template:
        return
    failures, written = [], ""
    for chat in PROBE_CHATS:
        ours, theirs = _ours(tokenizer, chat), None
        if _is_over_limit(ours):
            yield f"{what}: the chat template cannot be used: {printable(str(ours))}"
            return
        for _ in range(2):  # a second time where the clock may have moved on between the two
            theirs = _theirs(tokenizer, chat, special)
            if (theirs is None and isinstance(ours, RequestError)) or theirs == ours:
                break
            ours = _ours(tokenizer, chat)
        else:
            raise UnsupportedModelError(f"{what}: the chat template is rendered otherwise than by transformers, {chat}")
        if isinstance(ours, RequestError):
            failures.append(ours)
        else:
            written += ours
    if len(failures) == len(PROBE_CHATS):
        yield f"{what}: the chat template fails on every chat: {printable(str(failures[0]))}"
    elif QUESTION not in written:
        yield f"{what}: the chat template writes no text of the user's messages, neither as texts nor in parts"


def rendered_probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the texts of the chats that a template is tried with, without those that it fails on."""
    if tokenizer.has_chat_template:
        yield from (text for chat in PROBE_CHATS if isinstance(text := _ours(tokenizer, chat), str))


def _ours(tokenizer: Tokenizer, chat: ProbeChat) -> str | RequestError:
    try:
        return tokenizer.render_chat(chat.messages, chat.prompt, chat.tools, chat.arguments)
    except RequestError as error:
        return error


def _is_over_limit(rendered: str | RequestError) -> bool:
    """Return whether a template was ended, as one that runs for ever: transformers' renderer would not end it."""
    return isinstance(rendered, RequestError) and any(
        part in str(rendered) for part in ("it takes more than", "it fails", "the text has more than")
    )


def _theirs(tokenizer: Tokenizer, chat: ProbeChat, special: Mapping[str, str]) -> str | None:
    """Return transformers' text of a chat; None where it fails."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [{key: value for key, value in message.items() if value is not None} for message in chat.messages]
    messages = tokenizer.fit_messages(given, with_tools=chat.tools is not None)
    try:
        (text,), _ = render_jinja_template(
            conversations=[messages],
            tools=chat.tools,
            chat_template=tokenizer.chat_template(with_tools=chat.tools is not None),
            add_generation_prompt=chat.prompt,
            **{**special, **chat.arguments},
        )
    except Exception:  # a stranger's program can fail in any way
        return None
    return str(text)
