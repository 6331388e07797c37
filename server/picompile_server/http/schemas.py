"""Schemas of responses, for the OpenAPI document. Responses are not made from these: that would cost time a token.

tests/server/http hold responses to them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishSchema = Literal["stop", "length", "tool_calls"]


class ClosedSchema(BaseModel):
    """A schema that has all members."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetailSchema(BaseModel):
    """The fault of a request, and what to do about it."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorSchema(ClosedSchema):
    """An error in OpenAI's form."""

    error: ErrorDetailSchema


class CachedTokensSchema(ClosedSchema):
    """Counts of prompt tokens that were in the KV cache."""

    cached_tokens: int


class ReasoningTokensSchema(ClosedSchema):
    """Counts of tokens of answers by what they are."""

    reasoning_tokens: int


class UsageSchema(ClosedSchema):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensSchema
    completion_tokens_details: ReasoningTokensSchema


class TimingsSchema(ClosedSchema):
    """Times and speeds, as llama.cpp's server tells them, and the share of the neurons that fired."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    fired_share: float | None


class CompletionLogprobsSchema(ClosedSchema):
    """Log-probabilities of a completion; the first token of an echoed prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class RankedTokenSchema(ClosedSchema):
    """A token of a prompt or an alternative to it."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoiceSchema(ClosedSchema):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobsSchema | None
    finish_reason: FinishSchema
    prompt_logprobs: list[dict[str, RankedTokenSchema] | None] | None
    prompt_token_ids: list[int] = Field(default=[])
    token_ids: list[int] = Field(default=[])


class CompletionSchema(ClosedSchema):
    """The answer to a request for completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceSchema]
    usage: UsageSchema
    timings: TimingsSchema


class TopLogprobSchema(ClosedSchema):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprobSchema(TopLogprobSchema):
    """A token of a message, and its alternatives."""

    top_logprobs: list[TopLogprobSchema]


class ChatLogprobsSchema(ClosedSchema):
    """Log-probabilities of a message."""

    content: list[ChatLogprobSchema]
    refusal: None


class CalledFunctionSchema(ClosedSchema):
    """A function that the model calls; its arguments are JSON."""

    name: str
    arguments: str


class ToolCallSchema(ClosedSchema):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionSchema


class ChatMessageSchema(ClosedSchema):
    """The message that the model wrote."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field(default="")
    tool_calls: list[ToolCallSchema] = Field(default=[])


class ChatChoiceSchema(ClosedSchema):
    """One message, and why it ended."""

    index: int
    message: ChatMessageSchema
    logprobs: ChatLogprobsSchema | None
    finish_reason: FinishSchema


class ChatCompletionSchema(ClosedSchema):
    """The answer to a request for the next message of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceSchema]
    usage: UsageSchema
    timings: TimingsSchema


class ModelStatusSchema(ClosedSchema):
    """Whether a model is loaded."""

    value: Literal["loaded", "loading", "unloaded"]


class ModelSchema(BaseModel):
    """A model that is served; `max_model_len` and further members are known of one that is loaded."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: ModelStatusSchema
    max_model_len: int | None


class ModelListSchema(ClosedSchema):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelSchema]


class TokenPieceSchema(ClosedSchema):
    """A token with its text, or its bytes if these are no text."""

    id: int
    piece: str | list[int]


class TokensSchema(ClosedSchema):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPieceSchema]
    token_strs: list[str] | None


class DetokenizedSchema(ClosedSchema):
    """The text of tokens, under llama.cpp's name and under vLLM's."""

    content: str
    prompt: str


class HealthSchema(ClosedSchema):
    """Whether the server takes requests."""

    status: Literal["ok", "loading", "draining"]


class SlotSchema(ClosedSchema):
    """A slot of a model's KV cache, and its state."""

    id: int
    model: str
    n_ctx: int
    is_processing: bool
    state: Literal["idle", "reading", "decoding"]
    n_tokens: int
    id_task: int | None
