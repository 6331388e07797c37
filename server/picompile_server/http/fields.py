"""Fields that several endpoints take: sampling, stop texts, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from picompile_server.http.errors import REFUSED
from picompile_server.http.refusals import Refusal, refused_field

MOST_ANSWERS = 128  # of one request, over all its prompts
MOST_PROMPTS = 128
_MOST_STOPS, _MOST_STOP_LETTERS = 16, 4096
_MOST_BIASES = 1024
_INTEGERS = (-(2**63), 2**63 - 1)
_MOST_TOKENS = 2**31 - 1


class BodyPart(BaseModel):
    """An object in a request. Types are taken as they are: "5" is no number. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


class RequestBody(BodyPart):
    """The body of a request."""

    refusals: ClassVar[tuple[Refusal, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (refused := refused_field(data, cls.refusals)) is not None:
            text = f"{refused.name} is not supported; {refused.hint}"
            raise PydanticCustomError(REFUSED, "{text}", {"text": text, "field": refused.name})
        return data


class StreamOptions(BodyPart):
    """Options of a stream: its contents besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:  # such as 1e999, which JSON can write and a float cannot hold
        raise ValueError("a number is too large") from error
    return value


# Any JSON object, for a schema.
SchemaObject = Annotated[dict[str, Any], AfterValidator(_finite)]


class JsonSchemaFormat(BodyPart):
    """A JSON schema as `response_format` has it."""

    name: str | None = None
    description: str | None = None
    # `schema` is a method of pydantic's models.
    schema_: SchemaObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(BodyPart):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(BodyPart):
    """A JSON object, of a schema if there is one, as llama.cpp's server has it."""

    type: Literal["json_object"]
    schema_: SchemaObject | None = Field(None, alias="schema")


class NamedSchemaFormat(BodyPart):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BodyPart):
    """The form that the text must have, in one of four ways; the name is vLLM's."""

    # `json` is a method of pydantic's models.
    json_: SchemaObject | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if sum(way is not None for way in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("structured_outputs must have exactly one of json, regex, choice and grammar")
        return self


def _logit_bias(value: Any) -> dict[int, float]:
    must = "logit_bias must map token ids to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise ValueError(must)
    if len(value) > _MOST_BIASES:
        raise ValueError(f"logit_bias may have {_MOST_BIASES} tokens, not {len(value)}")
    bias = {}
    for token, amount in value.items():
        is_id = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not is_id or not is_number or not -100 <= amount <= 100:
            raise ValueError(must)
        bias[int(token)] = float(amount)
    return bias


LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": _MOST_BIASES,
        }
    ),
]


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(map(_is_stop, stops)):
        most = f"at most {_MOST_STOPS} texts of 1 to {_MOST_STOP_LETTERS} characters"
        raise ValueError(f"stop must be a text or a list of {most}")
    return stops


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MOST_STOP_LETTERS


_STOP = {"type": "string", "minLength": 1, "maxLength": _MOST_STOP_LETTERS}
Stops = Annotated[
    list[str],
    PlainValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": _MOST_STOPS}]}),
]


# The number of tokens that an answer may have at most; -1 is llama.cpp's and Ollama's word for the whole context.
NO_LIMIT = -1
TokenLimit = Annotated[int, Field(ge=NO_LIMIT, le=_MOST_TOKENS)]


class TextBody(RequestBody):
    """The fields of every request for text. `max_completion_tokens` and `n_predict` are `max_tokens`, too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MOST_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    repeat_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(None, ge=_INTEGERS[0], le=_INTEGERS[1])
    stop: Stops | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: SchemaObject | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    timings_per_token: bool | None = None

    @field_validator("json_schema", "grammar")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        """Return None for values that llama.cpp's server takes as unset."""
        return value or None

    @model_validator(mode="after")
    def _agree(self) -> TextBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options can only be given with stream")
        if len({limit for limit in self._limits if limit is not None}) > 1:
            raise ValueError("max_tokens, max_completion_tokens and n_predict are one thing; give one of them")
        if (
            None not in (self.repetition_penalty, self.repeat_penalty)
            and self.repetition_penalty != self.repeat_penalty
        ):
            raise ValueError("repetition_penalty and repeat_penalty are one thing; give one of them")
        has_format = self.response_format is not None and self.response_format.type != "text"
        others = (self.json_schema, self.grammar, self.structured_outputs)
        if has_format + sum(given is not None for given in others) > 1:
            raise ValueError("give only one of response_format, json_schema, grammar and structured_outputs")
        return self

    @property
    def _limits(self) -> Sequence[int | None]:
        return self.max_tokens, self.max_completion_tokens, self.n_predict

    def token_limit(self, default: int | None) -> int | None:
        """Return the most tokens that each answer may have, None for as many as the context holds.

        `default` counts where the request does not say.
        """
        given = next((limit for limit in self._limits if limit is not None), default)
        return None if given == NO_LIMIT else given

    @property
    def answers(self) -> int:
        """Number of answers that each prompt gets."""
        return self.n or 1

    @property
    def stops(self) -> Sequence[str]:
        """The texts at which an answer ends."""
        return self.stop or ()
