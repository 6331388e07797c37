"""The fields of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from picompile_server.http.fields import MOST_ANSWERS, MOST_PROMPTS, TextBody
from picompile_server.http.refusals import COMPLETION, Refusal

# What a prompt may be: a text or token ids.
PromptSource = str | list[int]

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompts(value: Any) -> list[PromptSource]:
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) or _is_ids(one) for one in value):
        raise ValueError("prompt must be a text, a list of token ids, or a list of either, and not empty")
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"a request may have {MOST_PROMPTS} prompts, not {len(value)}")
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SOME = {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1, "maxItems": MOST_PROMPTS}
Prompts = Annotated[
    list[PromptSource], PlainValidator(_prompts), WithJsonSchema({"anyOf": [{"type": "string"}, _IDS, _SOME]})
]


class CompletionBody(TextBody):
    """A request for texts that continue prompts."""

    refusals: ClassVar[tuple[Refusal, ...]] = COMPLETION

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    truncation_side: Literal["left", "right"] | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_ANSWERS)

    @model_validator(mode="after")
    def _fit(self) -> CompletionBody:
        if self.best_of not in (None, self.answers):
            raise ValueError("best_of must be n: all answers are returned")
        if len(self.prompt) * self.answers > MOST_ANSWERS:
            raise ValueError(f"a request may have {MOST_ANSWERS} answers, not {len(self.prompt)} × {self.answers}")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed; leave out stream")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that each answer may have; None for as many as the context holds."""
        return self.token_limit(DEFAULT_MAX_TOKENS)
