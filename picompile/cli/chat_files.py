"""Chats in files: JSON with the messages as OpenAI's API has them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.cli.checks import require_output_file, require_text_file, write_text
from picompile.errors import UsageError

if TYPE_CHECKING:
    from picompile_runtime.sampling.chat_answer import ChatMessage

_ROLES = {"developer": "system"}  # OpenAI's newer name


def save_chat(path: Path, messages: "Sequence[ChatMessage]", *, overwrite: bool) -> None:
    """Write the messages, whole or not at all. Raise `UsageError` if that is impossible or something is in the way.

    Only a chat is ever overwritten.
    """
    if path.exists() and not path.is_dir() and not overwrite:
        raise UsageError(f"{path}: exists; /save! {path} overwrites a chat")
    content = {"messages": [{"role": message.role, "content": message.content} for message in messages]}

    def check() -> None:
        require_output_file(path, "/save", _require_chat, overwrite=True)

    check()
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", check, overwrite=overwrite)


def load_chat(path: Path) -> "list[ChatMessage]":
    """Return the messages of a file: of a list of them, or of an object that has one under `messages`.

    Raises `UsageError` or `RequestError` if they are not texts of the three roles.
    """
    if path.exists() and not path.is_dir() and not path.is_file():
        raise UsageError(f"{path}: not a regular file")
    text = require_text_file(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error})") from error
    found = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(found, list):
        raise UsageError(f"{path}: no chat; it must have a list of messages")
    return [_message(f"{path}: message {place}", entry) for place, entry in enumerate(found, 1)]


def _require_chat(path: Path) -> None:
    try:
        load_chat(path)
    except Exception as error:
        raise UsageError(f"{path}: exists and is no chat, so it is not overwritten; choose another file") from error


def _message(where: str, entry: Any) -> "ChatMessage":
    from picompile_runtime.sampling.chat_answer import ROLES, ChatMessage

    if not isinstance(entry, dict) or not isinstance(role := entry.get("role"), str):
        raise UsageError(f"{where}: must be an object with role and content")
    role = _ROLES.get(role, role)
    if role not in ROLES:
        raise UsageError(f"{where}: a chat here has the roles {', '.join(ROLES)}, not {role[:40]!r}")
    content = entry.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return ChatMessage(role, "".join(_texts(where, parts)))


def _texts(where: str, parts: list[Any]) -> Iterator[str]:
    """Yield the texts of a message's parts."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text := part.get("text"), str):
            raise UsageError(f"{where}: its content must be a text")
        yield text
