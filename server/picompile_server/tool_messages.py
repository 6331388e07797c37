"""Messages of a chat as templates take them: with calls in their text, other ids, and more instructions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from picompile_runtime.errors import RequestError
from picompile_server.tool_format import ToolFormat
from picompile_server.tool_formats import HERMES

Message = Mapping[str, Any]


def written_calls(style: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of calls. Raises RequestError for arguments that the format cannot write."""
    named = [named_arguments(call) for call in calls]
    for name, given in named:
        if style.arguments is not None and not isinstance(given, Mapping):
            raise RequestError(f"the arguments of a call of {name} in a message are not a JSON object")
    return style.write([(name, json.dumps(given, ensure_ascii=False)) for name, given in named])


def named_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of a called function, and its arguments."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("a tool call in a message needs a function with a name")
    name, given = function["name"], function.get("arguments")
    if not isinstance(given, str):
        return name, given if given is not None else {}
    try:
        return name, json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the arguments of a call of {name} in a message are not JSON") from error


def without_tool_roles(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools: calls are written into the text, and results are the user's.

    Results that follow each other are one message, since many templates want the roles to alternate.
    """
    chat: list[dict[str, Any]] = []
    results = False
    for message in messages:
        if message.get("role") == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if results:
                chat[-1]["content"] += f"\n{text}"
            else:
                chat.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = written_calls(HERMES, message["tool_calls"])
            content = message.get("content")
            chat.append({"role": "assistant", "content": f"{content}\n{calls}" if content else calls})
        else:
            chat.append(dict(message))
        results = message.get("role") == "tool"
    return chat


def numbered_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in which the ids of calls are as Kimi K2 writes them, with a number that counts on in the chat.

    Its template writes the id of an earlier call, and no name.
    """
    ids: dict[str, str] = {}
    chat: list[dict[str, Any]] = []
    number = 0
    for message in map(dict, messages):
        calls = []
        for call in message.get("tool_calls") or ():
            name, _ = named_arguments(call)
            calls.append({**call, "id": f"functions.{name}:{number}"})
            ids[str(call.get("id"))] = calls[-1]["id"]
            number += 1
        if calls:
            message["tool_calls"] = calls
        if message.get("tool_call_id") is not None:
            message["tool_call_id"] = ids.get(str(message["tool_call_id"]), message["tool_call_id"])
        chat.append(message)
    return chat


def reasoning_name(message: Message) -> str | None:
    """Return the name under which a message has its reasoning; None if it has none."""
    return next((name for name in ("reasoning_content", "reasoning", "thinking") if message.get(name)), None)


def begins_with_system(messages: Sequence[Message]) -> bool:
    """Return whether the first message is for the system."""
    return bool(messages) and messages[0].get("role") in ("system", "developer")


def with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages whose system message ends with `text`."""
    if begins_with_system(messages):
        return [{**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_first_user(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages in which the user's first begins with `text`."""
    place = next((place for place, message in enumerate(messages) if message.get("role") == "user"), None)
    if place is None:
        return [{"role": "user", "content": text}, *messages]
    first = {**messages[place], "content": f"{text}\n\n{messages[place].get('content') or ''}"}
    return [*messages[:place], first, *messages[place + 1 :]]
