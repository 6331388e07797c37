"""The fields of POST /v1/responses: a conversation as items, tools and reasoning; nothing is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from picompile_server.http.chat_body import (
    FUNCTION_NAME,
    MOST_TOOLS,
    ChatBody,
    ChosenFunction,
    FunctionBody,
    ReasoningEffort,
    choice_tag,
)
from picompile_server.http.fields import BodyPart, JsonObjectFormat, RequestBody, SchemaObject, TextFormat
from picompile_server.http.refusals import RESPONSES, SAMPLING, Refusal
from picompile_server.http.response_input import InputItems, chat_messages, qualified


class FlatSchemaFormat(BodyPart):
    """JSON of a schema, as this endpoint writes it."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: SchemaObject = Field(alias="schema")
    strict: bool | None = None


class TextSettings(BodyPart):
    """The form that the text must have. `verbosity` is a wish, which this server does not tell the model."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FlatTool(FunctionBody):
    """A function that the model may call, as this endpoint writes it."""

    type: Literal["function"]


class FlatChosenTool(ChosenFunction):
    """The function that must be called, as this endpoint writes it."""

    type: Literal["function"]


class AllowedTool(BodyPart):
    """A tool that may be called, as this endpoint writes it; those that are no functions are left out."""

    type: str
    name: str | None = None

    @model_validator(mode="after")
    def _is_named(self) -> AllowedTool:
        if self.type == "function" and self.name is None:
            raise ValueError("a function of tool_choice needs its name")
        return self


class FlatAllowedChoice(BodyPart):
    """The tools that may be called, of those that are described; `mode` says whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MOST_TOOLS)]

    def for_chat(self) -> str | Mapping[str, Any]:
        """Return the choice as the other endpoint writes it; "none" if no function is left."""
        named = [
            {"type": "function", "function": {"name": tool.name}} for tool in self.tools if tool.type == "function"
        ]
        return {"type": self.type, self.type: {"mode": self.mode, "tools": named}} if named else "none"


FlatToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[FlatChosenTool, Tag("chosen tool")] | Annotated[FlatAllowedChoice, Tag("allowed tools")],
        Discriminator(choice_tag),
    ]
)


class ReasoningSettings(BodyPart):
    """Settings of reasoning. There are no summaries: the output has all of the reasoning."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class OtherTool(BodyPart):
    """A tool of another kind, such as a search. Clients offer some unasked, which a server that has none leaves out."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": ["function", "namespace"]}})]


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
    return f"a {kind}" if kind in ("function", "namespace") else "another tool"


class NamespaceTool(BodyPart):
    """Functions under one name, as Codex offers those of an MCP server."""

    type: Literal["namespace"]
    name: str
    tools: list[
        Annotated[
            Annotated[FlatTool, Tag("a function")] | Annotated[OtherTool, Tag("another tool")], Discriminator(_tool_tag)
        ]
    ]


OfferedTool = Annotated[
    Annotated[FlatTool, Tag("a function")]
    | Annotated[NamespaceTool, Tag("a namespace")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_tool_tag),
]

# What responses have besides on request. All but the first are of tools that there are not.
SEALED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class ResponseBody(RequestBody):
    """A request for a response."""

    refusals: ClassVar[tuple[Refusal, ...]] = (*SAMPLING, *RESPONSES)

    model: str | None = None
    input: Annotated[str, Field(json_schema_extra={"minLength": 1})] | InputItems
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    text: TextSettings | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    chat_template_kwargs: SchemaObject | None = None

    @field_validator("include")
    @classmethod
    def _no_logprobs(cls, value: list[str] | None) -> list[str] | None:
        if _LOGPROBS in (value or ()):
            raise ValueError(f"include: {_LOGPROBS} is not supported; use /v1/chat/completions")
        return value

    @model_validator(mode="after")
    def _fit(self) -> ResponseBody:
        if self.input == "":
            raise ValueError("input must not be empty")
        if self.tool_choice not in (None, "none", "auto") and not self.functions:
            raise ValueError("tool_choice needs a tool of type function in tools; this server runs no others")
        if len(self.functions) > MOST_TOOLS:
            raise ValueError(f"tools may have {MOST_TOOLS} functions, not {len(self.functions)}")
        for name in self.namespaces:
            if not re.fullmatch(FUNCTION_NAME, name):
                raise ValueError(f"tools: {name[:80]!r}, a namespace and a function, is no name of a function")
        return self

    @property
    def functions(self) -> Sequence[FlatTool]:
        """The tools that the model may call, those of namespaces with the name of both."""
        members = [
            tool.model_copy(update={"name": qualified(space.name, tool.name)}) for space, tool in self._members()
        ]
        return [*(tool for tool in self.tools or () if isinstance(tool, FlatTool)), *members]

    @property
    def namespaces(self) -> Mapping[str, tuple[str, str]]:
        """Namespaces and names of functions by the names that the model knows."""
        return {qualified(space.name, tool.name): (space.name, tool.name) for space, tool in self._members()}

    def _members(self) -> Iterator[tuple[NamespaceTool, FlatTool]]:
        for space in self.tools or ():
            if isinstance(space, NamespaceTool):
                yield from ((space, tool) for tool in space.tools if isinstance(tool, FlatTool))

    @property
    def seals_reasoning(self) -> bool:
        """Whether the client wants reasoning in a form in which it hands it back."""
        return SEALED_REASONING in (self.include or ())

    def as_chat(self) -> ChatBody:
        """Return the request that asks the other endpoint for the same."""
        fields = {
            "messages": chat_messages(self.instructions, self.input),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._form(),
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.functions],
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_validate(fields)

    def _choice(self) -> str | Mapping[str, Any] | None:
        chosen = self.tool_choice
        if isinstance(chosen, FlatChosenTool):
            return {"type": "function", "function": {"name": chosen.name}}
        return chosen.for_chat() if isinstance(chosen, FlatAllowedChoice) else chosen

    def _form(self) -> Mapping[str, Any] | None:
        if self.text is None or self.text.format is None:
            return None
        form = self.text.format.model_dump(by_alias=True)
        return (
            {"type": form.pop("type"), "json_schema": form} if isinstance(self.text.format, FlatSchemaFormat) else form
        )
