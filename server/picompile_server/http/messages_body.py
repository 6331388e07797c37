"""The fields of POST /v1/messages, as Anthropic's API has them, and the chat that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from picompile_server.http.chat_body import FUNCTION_NAME, MOST_TOOLS, ChatBody, ChosenFunction
from picompile_server.http.fields import BodyPart, RequestBody, SchemaObject, Stops
from picompile_server.http.refusals import MESSAGES, Refusal

# A line of Claude Code's system prompt for its maker's billing: it differs in every request, so that nothing of the
# prompt behind it could be reused.
_BILLING = "x-anthropic-billing-header:"


class TextBlock(BodyPart):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BodyPart):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(BodyPart):
    """Reasoning of an earlier answer that cannot be read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BodyPart):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: SchemaObject


Texts = str | Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolResultBlock(BodyPart):
    """The result of a call. Whether it is an error is for its text to say."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_tag(block: Any) -> str:
    """Return the tag of a block's class. What is no block is held to be a text, so that the error is readable."""
    kind = block.get("type") if isinstance(block, dict) else None
    return f"{kind} block" if kind in _BLOCKS else "text block"


Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[RedactedBlock, Tag("redacted_thinking block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")],
    Discriminator(_block_tag),
]


class TurnBody(BodyPart):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class OfferedToolBody(BodyPart):
    """A tool that the model may call: the client's own, or one of those of its maker, which this server leaves out."""

    type: str | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: SchemaObject | None = None


class ToolChoiceBody(BodyPart):
    """Whether the model may call a tool, must call one, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(BodyPart):
    """Whether the model is to reason. How long is its own affair: `budget_tokens` is a wish."""

    type: Literal["enabled", "disabled", "adaptive"]


class PromptBody(RequestBody):
    """A conversation, as both endpoints take it."""

    refusals: ClassVar[tuple[Refusal, ...]] = MESSAGES

    model: str | None = None
    messages: Annotated[list[TurnBody], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[OfferedToolBody], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None

    @model_validator(mode="after")
    def _fit(self) -> PromptBody:
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool") and not self.functions:
            raise ValueError("tool_choice needs a tool of the client's own in tools; this server runs no others")
        return self

    @property
    def functions(self) -> Sequence[OfferedToolBody]:
        """The tools that the model may call."""
        return [tool for tool in self.tools or () if tool.type in (None, "custom")]

    def as_chat(self) -> ChatBody:
        """Return the request that asks OpenAI's endpoint for the same."""
        return ChatBody.model_validate(self._fields())

    def _fields(self) -> dict[str, Any]:
        system = _joined(self.system, without=_BILLING)
        messages = [{"role": "system", "content": system}] if system else []
        for turn in self.messages:
            messages += _messages(turn)
        tools = [_function(tool) for tool in self.functions]
        return {"messages": messages, "tools": tools, **self._choice(), **self._thinking()}

    def _choice(self) -> dict[str, Any]:
        if (given := self.tool_choice) is None:
            return {}
        choice: Any = {"any": "required"}.get(given.type, given.type)
        if given.type == "tool":
            choice = {"type": "function", "function": ChosenFunction(name=given.name or "").model_dump()}
        return {"tool_choice": choice, "parallel_tool_calls": not given.disable_parallel_tool_use}

    def _thinking(self) -> dict[str, Any]:
        if self.thinking is None or self.thinking.type == "adaptive":
            return {}
        if self.thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}


class MessagesBody(PromptBody):
    """A request for the next message."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)

    def _fields(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {**super()._fields(), **sampling, "max_tokens": self.max_tokens, "stop": self.stop_sequences or []}


def _joined(content: str | Sequence[TextBlock] | None, without: str = "\n\n\n") -> str:
    texts = [content or ""] if content is None or isinstance(content, str) else [block.text for block in content]
    return "\n\n".join(text for text in texts if not text.startswith(without))


def _function(tool: OfferedToolBody) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _messages(turn: TurnBody) -> list[dict[str, Any]]:
    """Return the messages for one of these: results of calls are messages of their own, before what else is said."""
    blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    messages = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if texts or calls or not messages:
        message: dict[str, Any] = {"role": turn.role, "content": _joined(texts)}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n\n".join(thoughts)
        messages.append(message)
    return messages
