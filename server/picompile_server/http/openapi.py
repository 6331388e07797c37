"""GET /openapi.json: the OpenAPI 3.1 document of the server, made from the models of its requests and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from picompile_runtime.version import __version__
from picompile_server.http import response_schemas, schemas
from picompile_server.http.chat_body import ChatBody
from picompile_server.http.completion_body import CompletionBody
from picompile_server.http.errors import json_response
from picompile_server.http.messages_body import MessagesBody, PromptBody
from picompile_server.http.response_body import ResponseBody
from picompile_server.http.token_body import DetokenizeBody, TokenizeBody

_TEMPLATE = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request makes no sense, or asks for what there is not",
    401: "The API key is missing or wrong",
    403: "The Host header names another host",
    404: "There is no such model",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too many requests wait",
    500: "The server failed",
    503: "The server is loading its models, or ending",
}
_ANY = (401, 403, 500)
_POST = (400, *_ANY, 404, 413, 415, 503)


@dataclass(frozen=True)
class Operation:
    """An operation of the document: `is_streamed` if it can answer with server-sent events, too."""

    path: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    errors: Sequence[int] = _ANY
    is_streamed: bool = False
    is_open: bool = False
    media: str = "application/json"
    is_list: bool = False


OPERATIONS = (
    Operation("/", "The page for chats", None, errors=(403, 500), is_open=True, media="text/html"),
    Operation("/health", "Whether the server takes requests", schemas.HealthSchema, errors=(403, 500), is_open=True),
    Operation("/metrics", "Metrics for Prometheus", None, media="text/plain"),
    Operation("/slots", "What the slots do", schemas.SlotSchema, errors=(*_ANY, 503), is_list=True),
    Operation("/openapi.json", "This document", None),
    Operation("/v1/models", "The models", schemas.ModelListSchema, errors=(*_ANY, 503)),
    Operation("/v1/models/{model}", "One model", schemas.ModelSchema, errors=(*_ANY, 404, 503)),
    Operation(
        "/v1/completions",
        summary="Continue prompts",
        answer=schemas.CompletionSchema,
        body=CompletionBody,
        errors=(*_POST, 429),
        is_streamed=True,
    ),
    Operation(
        "/v1/chat/completions",
        summary="Write the next message of a chat",
        answer=schemas.ChatCompletionSchema,
        body=ChatBody,
        errors=(*_POST, 429),
        is_streamed=True,
    ),
    Operation(
        "/v1/responses",
        summary="Make a response",
        answer=response_schemas.ResponseSchema,
        body=ResponseBody,
        errors=(*_POST, 429),
        is_streamed=True,
    ),
    Operation(
        "/v1/messages",
        summary="Write the next message, as Anthropic's API has it",
        answer=response_schemas.MessageSchema,
        body=MessagesBody,
        errors=(*_POST, 429),
        is_streamed=True,
    ),
    Operation(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a chat",
        answer=response_schemas.TokenCountSchema,
        body=PromptBody,
        errors=_POST,
    ),
    Operation(
        "/tokenize", summary="Cut a text into tokens", answer=schemas.TokensSchema, body=TokenizeBody, errors=_POST
    ),
    Operation(
        "/detokenize",
        summary="Turn tokens into text",
        answer=schemas.DetokenizedSchema,
        body=DetokenizeBody,
        errors=_POST,
    ),
)


async def openapi(request: Request) -> Response:
    """Answer with the document."""
    return json_response(document())


@cache
def document() -> Mapping[str, Any]:
    """Return the OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "picompile", "version": __version__},
        "paths": {operation.path: {_method(operation): _described(operation)} for operation in OPERATIONS},
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _method(operation: Operation) -> str:
    return "get" if operation.body is None else "post"


def _described(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{_method(operation)} {operation.path}",
        "responses": _responses(operation),
        # Without keys, none is needed.
        "security": [] if operation.is_open else [{}, {"key": []}],
    }
    if operation.body is not None:
        content = {"application/json": {"schema": _reference(operation.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if "{model}" in operation.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        found["parameters"] = [name]
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    schema: dict[str, Any] = {} if operation.answer is None else _reference(operation.answer)
    if operation.is_list:
        schema = {"type": "array", "items": schema}
    if operation.media != "application/json":
        schema = {"type": "string"}
    content = {operation.media: {"schema": schema}}
    if operation.is_streamed:
        content["text/event-stream"] = {}  # OpenAPI 3.1 does not say whether a schema is for an event or for all
    found = {"200": {"description": operation.summary, "content": content}}
    error = {"application/json": {"schema": _reference(schemas.ErrorSchema)}}
    for status in operation.errors:
        found[str(status)] = {"description": _ERRORS[status], "content": error}
    if operation.path == "/health":
        found["503"] = {"description": _ERRORS[503], "content": content}
    return found


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _TEMPLATE.format(model=model.__name__)}


def _schemas() -> dict[str, Any]:
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(schemas.ErrorSchema, "serialization")]
    models += [(operation.body, "validation") for operation in OPERATIONS if operation.body is not None]
    models += [(operation.answer, "serialization") for operation in OPERATIONS if operation.answer is not None]
    _, found = models_json_schema(models, ref_template=_TEMPLATE)
    return dict(found["$defs"])
