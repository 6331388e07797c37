"""The fields of POST /tokenize and /detokenize: llama.cpp's and vLLM's, each with its own defaults."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, JsonValue, model_validator

from picompile_server.http.chat_body import ChatBody, MessageBody, ToolBody
from picompile_server.http.fields import RequestBody, SchemaObject

# For the document: there is exactly one of them.
_SOURCES: list[JsonValue] = [
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
    tools: Annotated[list[ToolBody], Field(max_length=128)] | None = None
    chat_template_kwargs: SchemaObject | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if sum(given is not None for given in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give exactly one of content, prompt and messages")
        if self.tools and self.messages is None:
            raise ValueError("tools can only be given with messages")
        return self

    @property
    def has_special_tokens(self) -> bool:
        """Whether to add the tokens that the tokenizer puts around a text."""
        if self.content is not None:
            return bool(self.add_special)
        return self.add_special_tokens is not False

    def as_chat(self) -> ChatBody:
        """Return the chat as a request for its next message would have it."""
        return ChatBody.model_construct(
            messages=self.messages or [], tools=self.tools, chat_template_kwargs=self.chat_template_kwargs
        )


class DetokenizeBody(RequestBody):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(fail_fast=True)
