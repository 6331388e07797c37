"""Schemas of responses, for the OpenAPI document. Responses are not made from these: that would cost time a token.

tests/server/http hold responses to them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishSchema = Literal["stop", "length", "tool_calls"]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetailSchema(BaseModel):
    """The fault of a request, and what to do about it."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorSchema(_Schema):
    """An error in OpenAI's form."""

    error: ErrorDetailSchema


class CachedTokensSchema(_Schema):
    """Counts of prompt tokens that were in the KV cache."""

    cached_tokens: int


class ReasoningTokensSchema(_Schema):
    """Counts of tokens of answers by what they are."""

    reasoning_tokens: int


class UsageSchema(_Schema):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensSchema
    completion_tokens_details: ReasoningTokensSchema


class TimingsSchema(_Schema):
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


class CompletionLogprobsSchema(_Schema):
    """Log-probabilities of a completion; the first token of an echoed prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class RankedTokenSchema(_Schema):
    """A token of a prompt or an alternative to it."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoiceSchema(_Schema):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobsSchema | None
    finish_reason: FinishSchema
    prompt_logprobs: list[dict[str, RankedTokenSchema] | None] | None
    prompt_token_ids: list[int] = Field(default=[])
    token_ids: list[int] = Field(default=[])


class CompletionSchema(_Schema):
    """The answer to a request for completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceSchema]
    usage: UsageSchema
    timings: TimingsSchema


class TopLogprobSchema(_Schema):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprobSchema(TopLogprobSchema):
    """A token of a message, and its alternatives."""

    top_logprobs: list[TopLogprobSchema]


class ChatLogprobsSchema(_Schema):
    """Log-probabilities of a message."""

    content: list[ChatLogprobSchema]
    refusal: None


class CalledFunctionSchema(_Schema):
    """A function that the model calls; its arguments are JSON."""

    name: str
    arguments: str


class ToolCallSchema(_Schema):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionSchema


class ChatMessageSchema(_Schema):
    """The message that the model wrote."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field(default="")
    tool_calls: list[ToolCallSchema] = Field(default=[])


class ChatChoiceSchema(_Schema):
    """One message, and why it ended."""

    index: int
    message: ChatMessageSchema
    logprobs: ChatLogprobsSchema | None
    finish_reason: FinishSchema


class ChatCompletionSchema(_Schema):
    """The answer to a request for the next message of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceSchema]
    usage: UsageSchema
    timings: TimingsSchema


class OutputTextSchema(_Schema):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


ItemStatusSchema = Literal["in_progress", "completed", "incomplete"]


class OutputMessageSchema(_Schema):
    """The message of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatusSchema
    content: list[OutputTextSchema]


class ReasoningTextSchema(_Schema):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoningSchema(_Schema):
    """The reasoning of a response; `encrypted_content` is for the client to hand back, if it asked for it."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningTextSchema]
    encrypted_content: str | None
    status: ItemStatusSchema


class OutputCallSchema(_Schema):
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


class MessageTextSchema(_Schema):
    """A text of a message."""

    type: Literal["text"]
    text: str


class MessageThinkingSchema(_Schema):
    """The reasoning of a message."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class MessageToolUseSchema(_Schema):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsageSchema(_Schema):
    """Counts of tokens, as Anthropic's API tells them."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageSchema(_Schema):
    """The answer to a request for a message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageTextSchema | MessageThinkingSchema | MessageToolUseSchema]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsageSchema


class TokenCountSchema(_Schema):
    """The number of tokens of a prompt."""

    input_tokens: int


class ModelStatusSchema(_Schema):
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


class ModelListSchema(_Schema):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelSchema]


class TokenPieceSchema(_Schema):
    """A token with its text, or its bytes if these are no text."""

    id: int
    piece: str | list[int]


class TokensSchema(_Schema):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPieceSchema]
    token_strs: list[str] | None


class DetokenizedSchema(_Schema):
    """The text of tokens, under llama.cpp's name and under vLLM's."""

    content: str
    prompt: str


class HealthSchema(_Schema):
    """Whether the server takes requests."""

    status: Literal["ok", "loading", "draining"]


class SlotSchema(_Schema):
    """A slot of a model's KV cache, and its state."""

    id: int
    model: str
    n_ctx: int
    is_processing: bool
    state: Literal["idle", "reading", "decoding"]
    n_tokens: int
    id_task: int | None
