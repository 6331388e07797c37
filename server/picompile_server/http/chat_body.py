"""The fields of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict

from picompile_server.http.fields import BodyPart, SchemaObject, TextBody, TokenLimit
from picompile_server.http.refusals import CHAT, Refusal
from picompile_server.tools import ToolOffer, read_offer

_PARTS = ("text", "input_text", "output_text")


def _content(value: Any) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("the content of a message must be a text or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError('a part of a message must be an object such as {"type": "text", "text": "…"}')
        if kind not in _PARTS or not isinstance(text := part.get("text"), str):
            raise ValueError(f"a part of type {kind[:40]!r} is not supported: the model reads text alone")
        texts.append(text)
    return "".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_PARTS)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
# The text of a message; parts are joined.
MessageText = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


class CalledFunction(BodyPart):
    """The name of a function that an earlier answer called, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallBody(BodyPart):
    """A call of a function in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


# For the document: content may be missing only where an assistant called tools.
_HAS_CONTENT: JsonDict = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
_CALLS_TOOLS: JsonDict = {
    "required": ["tool_calls"],
    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array"}},
}


# Fields of messages that would change the answer: the beginning of it, as Mistral, DeepSeek and Moonshot have it, and
# what OpenAI had before tool_calls.
_MESSAGE_REFUSALS = {
    "prefix": "use /v1/completions to go on with a text",
    "partial": "use /v1/completions to go on with a text",
    "function_call": "use tool_calls",
}


class MessageBody(BodyPart):
    """One message of a chat."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_HAS_CONTENT, _CALLS_TOOLS]})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageText | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(min_length=1, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # The reasoning of an earlier answer, by the names that servers have for it.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_beginning(cls, data: Any) -> Any:
        for name, hint in _MESSAGE_REFUSALS.items():
            if isinstance(data, dict) and data.get(name):
                raise ValueError(f"{name} of a message is not supported; {hint}")
        return data

    @model_validator(mode="after")
    def _has_content(self) -> MessageBody:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content; only an assistant's with tool_calls does not")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        for key in ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


MOST_TOOLS = 128
FUNCTION_NAME = "^[a-zA-Z0-9_.-]{1,64}$"


class FunctionBody(BodyPart):
    """A function that the model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None


class ToolBody(BodyPart):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionBody


class ChosenFunction(BodyPart):
    """The name of the function that must be called."""

    name: str


class ChosenTool(BodyPart):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(BodyPart):
    """The tools that may be called, of those that are described; `mode` says whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(BodyPart):
    """A choice of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_tag(choice: Any) -> str:
    """Return the tag of a choice's class. Errors leave out tags that are no names."""
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "allowed tools" if kind == "allowed_tools" else "chosen tool"


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[ChosenTool, Tag("chosen tool")] | Annotated[AllowedChoice, Tag("allowed tools")],
        Discriminator(choice_tag),
    ]
)


def _some(value: int) -> int:
    if value == 0:
        raise ValueError("a message has 1 token or more; give -1 for no limit")
    return value


# A chat's answer is never empty, unlike a completion, which may only read a prompt.
AnswerLimit = Annotated[TokenLimit, AfterValidator(_some), Field(json_schema_extra={"not": {"const": 0}})]


# How much the model is to reason. A template may read the word; "none" turns reasoning off where it can be.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(TextBody):
    """A request for the next message of a chat."""

    refusals: ClassVar[tuple[Refusal, ...]] = CHAT

    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: AnswerLimit | None = None
    max_tokens: AnswerLimit | None = None
    n_predict: AnswerLimit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[ToolBody], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: SchemaObject | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None

    @model_validator(mode="after")
    def _fit(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs can only be given with logprobs")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice can only be given with tools")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that each answer may have; None for as many as the context holds."""
        return self.token_limit(None)

    @property
    def top(self) -> int | None:
        """Number of alternatives that each token's log-probabilities name; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def uses_tools(self) -> bool:
        """Whether tools are offered, or were used before."""
        return bool(self.tools) or any(message.role == "tool" or message.tool_calls for message in self.messages)

    @property
    def template_arguments(self) -> Mapping[str, Any] | None:
        """Further variables of the chat template: those that are given, and by the names that templates have for it
        whether to reason.
        """
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        reasons = self.reasoning_effort != "none"
        effort = {"reasoning_effort": self.reasoning_effort} if reasons else {}
        return {**effort, "enable_thinking": reasons, "thinking": reasons, **(self.chat_template_kwargs or {})}

    def template_messages(self) -> Sequence[dict[str, Any]]:
        """Return the messages as chat templates expect them."""
        return [message.for_template() for message in self.messages]

    def offer(self) -> ToolOffer | None:
        """Return the tools that the model may call, None for no tools. Raises RequestError if they make no sense."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, BodyPart) else self.tool_choice
        return read_offer(tools, choice, self.parallel_tool_calls is not False)
