"""Schemas of the answers of POST /v1/responses and /v1/messages, for the OpenAPI document; see schemas.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from picompile_server.http.schemas import ClosedSchema, TimingsSchema


class OutputTextSchema(ClosedSchema):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


ItemStatusSchema = Literal["in_progress", "completed", "incomplete"]


class OutputMessageSchema(ClosedSchema):
    """The message of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatusSchema
    content: list[OutputTextSchema]


class ReasoningTextSchema(ClosedSchema):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoningSchema(ClosedSchema):
    """The reasoning of a response; `encrypted_content` is for the client to hand back, if it asked for it."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningTextSchema]
    encrypted_content: str | None
    status: ItemStatusSchema


class OutputCallSchema(ClosedSchema):
    """A call of a function; its arguments are JSON."""

    id: str
    type: Literal["function_call"]
    status: ItemStatusSchema
    call_id: str
    name: str
    arguments: str
    namespace: str = Field(default="")


class ResponseSchema(BaseModel):
    """The answer to a request for a response; further members repeat the request's."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessageSchema | OutputReasoningSchema | OutputCallSchema]
    usage: dict[str, Any]
    timings: TimingsSchema


class MessageTextSchema(ClosedSchema):
    """A text of a message."""

    type: Literal["text"]
    text: str


class MessageThinkingSchema(ClosedSchema):
    """The reasoning of a message."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class MessageToolUseSchema(ClosedSchema):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsageSchema(ClosedSchema):
    """Counts of tokens, as Anthropic's API tells them."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageSchema(ClosedSchema):
    """The answer to a request for a message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageTextSchema | MessageThinkingSchema | MessageToolUseSchema]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsageSchema


class TokenCountSchema(ClosedSchema):
    """The number of tokens of a prompt."""

    input_tokens: int
