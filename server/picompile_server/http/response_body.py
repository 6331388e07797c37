"""The fields of POST /v1/responses, in its basic form: text in, text out, nothing kept."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from picompile_server.http.chat_body import MessageText
from picompile_server.http.fields import BodyPart, JsonObjectFormat, RequestBody, SchemaObject, TextBody, TextFormat
from picompile_server.http.refusals import RESPONSES, SAMPLING, Refusal


class InputMessage(BodyPart):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageText


class FlatSchemaFormat(BodyPart):
    """JSON of a schema, as this endpoint writes it."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: SchemaObject = Field(alias="schema")
    strict: bool | None = None


class TextSettings(BodyPart):
    """The form that the text must have."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseBody(RequestBody):
    """A request for a response."""

    refusals: ClassVar[tuple[Refusal, ...]] = (*SAMPLING, *RESPONSES)

    model: str | None = None
    input: (
        Annotated[str, Field(json_schema_extra={"minLength": 1})]
        | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    text: TextSettings | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    @model_validator(mode="after")
    def _has_text(self) -> ResponseBody:
        if self.input == "":
            raise ValueError("input must not be empty")
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return [*messages, *({"role": message.role, "content": message.content} for message in self.input)]

    def as_text(self) -> TextBody:
        """Return the fields that the other endpoints have, too."""
        form: dict[str, Any] | None = None
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True)
            if isinstance(self.text.format, FlatSchemaFormat):
                form = {"type": form.pop("type"), "json_schema": form}
        return TextBody.model_validate({"temperature": self.temperature, "top_p": self.top_p, "response_format": form})
