"""Items of the input of POST /v1/responses, and the chat messages that they stand for."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema

from picompile_server.http.chat_body import MessageText
from picompile_server.http.fields import BodyPart

# Marks reasoning that this server wrote for a client to hand back; that of other servers can only be ignored.
_MARK = "picompile:"
# Roles that tell the model what to do.
_INSTRUCTING = ("system", "developer")


class InputMessage(BodyPart):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageText


class InputCall(BodyPart):
    """A call of a function in an earlier answer, its arguments as JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputCallOutput(BodyPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: MessageText


class ReasoningText(BodyPart):
    """A text of reasoning, or of its summary."""

    text: str


class InputReasoning(BodyPart):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def reasoning(self) -> str:
        """The text of the reasoning: in full if it is there, else its summary."""
        given = self.content or ([ReasoningText(text=text)] if (text := unsealed(self.encrypted_content)) else [])
        return "\n\n".join(part.text for part in given or self.summary or ())


class OtherItem(BodyPart):
    """An item of another kind, which is refused."""


def _refused(value: Any) -> Any:
    kind = str(value.get("type"))[:40]
    hint = "send the item itself, since the server keeps none" if kind == "item_reference" else "leave it out"
    raise ValueError(f"an item of type {kind!r} is not supported; {hint}")


def _tag(item: Any) -> str:
    """Return the tag of an item's class; what has no type is a message. Errors leave out tags that are no names."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return f"{kind} item" if kind in ("message", "function_call", "function_call_output", "reasoning") else "other item"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message item")]
    | Annotated[InputCall, Tag("function_call item")]
    | Annotated[InputCallOutput, Tag("function_call_output item")]
    | Annotated[InputReasoning, Tag("reasoning item")]
    | Annotated[OtherItem, PlainValidator(_refused), WithJsonSchema({"not": {}}), Tag("other item")],
    Discriminator(_tag),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]


def sealed(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, by which clients hand it back that leave out its text, as Codex does.

    It is no secret, and hence not encrypted.
    """
    return _MARK + base64.b64encode(reasoning.encode(errors="replace")).decode()


def unsealed(given: str | None) -> str:
    """Return the reasoning of an `encrypted_content`; none if another server made it."""
    if given is None or not given.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def qualified(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function that may be in a namespace."""
    return f"{namespace}.{name}" if namespace else name


def chat_messages(instructions: str | None, items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of OpenAI's other endpoint for a conversation.

    An answer is one message: its reasoning, then its text, then its calls. Instructions and the system messages that
    follow them are one message, too: many templates take no more.
    """
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        if isinstance(item, InputMessage) and item.role != "assistant":
            _add_message(messages, item)
        elif isinstance(item, InputCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        else:
            _add_to_answer(messages, item)
    return messages


def _add_message(messages: list[dict[str, Any]], item: InputMessage) -> None:
    if item.role in _INSTRUCTING and messages and all(each["role"] in _INSTRUCTING for each in messages):
        messages[-1]["content"] += f"\n\n{item.content}"
    else:
        messages.append({"role": item.role, "content": item.content})


def _add_to_answer(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add a part of an answer to the last message, or begin another answer with it."""
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, InputCall):
        if answer is None:
            answer = _begun(messages)
        function = {"name": qualified(item.namespace, item.name), "arguments": item.arguments}
        answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, InputReasoning):
        if item.reasoning:
            _begun(messages)["reasoning_content"] = item.reasoning
    elif isinstance(item, InputMessage):
        if answer is None or answer["content"]:
            answer = _begun(messages)
        answer["content"] = item.content


def _begun(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]
