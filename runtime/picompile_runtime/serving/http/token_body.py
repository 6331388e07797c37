"""The fields of POST /tokenize and /detokenize: llama.cpp's and vLLM's, each with its own defaults."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from picompile_runtime.serving.http.chat_body import MessageBody
from picompile_runtime.serving.http.fields import RequestBody

# For the document: there is exactly one of them.
_SOURCES = [
    {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("content", "prompt", "messages")
]


class TokenizeBody(RequestBody):
    """A text to cut into tokens: `content` as llama.cpp names it, `prompt` or `messages` as vLLM does."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _SOURCES})

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if sum(given is not None for given in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give exactly one of content, prompt and messages")
        return self

    @property
    def has_special_tokens(self) -> bool:
        """Whether to add the tokens that the tokenizer puts around a text."""
        if self.content is not None:
            return bool(self.add_special)
        return self.add_special_tokens is not False

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the chat as templates expect it."""
        return [message.for_template() for message in self.messages or ()]


class DetokenizeBody(RequestBody):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(fail_fast=True)
