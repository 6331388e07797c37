"""Errors as OpenAI's API answers them: a status, and a JSON object `error` with message, type, param and code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from picompile_runtime.errors import PicompileRuntimeError, RequestError
from picompile_runtime.request_checks import shown
from picompile_server.scheduler import ClosedError, QueueFullError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_INVALID = "invalid_request_error"
REFUSED = "refused"  # pydantic's name for the errors of fields that are refused
_RETRY = {429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


class ApiError(Exception):
    """An error that a client is told.

    Attributes:
        status: the HTTP status.
        param: the field of the request that is wrong, as in `messages[0].content`.
        code: a word for programs, such as `model_not_found`.
        details: further members of the object `error`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.details = dict(details or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON object that is sent."""
        kind = _TYPES.get(self.status, _INVALID)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.details}
        }

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the response that is sent."""
        return json_response(self.body(), self.status, {**_RETRY.get(self.status, {}), **(headers or {})})


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `content` as JSON."""
    return Response(to_json(content), status, headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """Return the client's error for one of the runtime, or for an unexpected one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, f"the server is busy: {error}", code="queue_full")
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, PicompileRuntimeError):
        return ApiError(500, str(error))
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def bad_fields(error: ValidationError) -> ApiError:
    """Return one readable error for the first thing that is wrong with a request's fields."""
    found = error.errors(include_url=False)
    # The branches of a union fail one by one; the one that came furthest is the one that was meant.
    first = max((one for one in found if one["loc"][:1] == found[0]["loc"][:1]), key=_depth)
    path = _path(first)
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
    if first["type"] == REFUSED:
        context = first.get("ctx", {})
        return ApiError(400, context["text"], param=context["field"], code="unsupported_parameter")
    if first["type"] == "value_error":  # from a validator of ours, whose text says it all
        return ApiError(400, first["msg"].removeprefix("Value error, "), param=path or None)
    messages = dict.fromkeys(_message(one) for one in found if _path(one) == path)
    return ApiError(400, f"{path}: {' or '.join(messages)}, not {shown(first['input'])}", param=path)


def _depth(error: ErrorDetails) -> int:
    path = _path(error)
    return path.count(".") + path.count("[")


def _message(error: ErrorDetails) -> str:
    if error["type"] == "model_type":
        return "should be an object"
    text = error["msg"].removeprefix("Input ")
    return text[:1].lower() + text[1:]


def _path(error: ErrorDetails) -> str:
    """Return a path as `messages[0].content`, without the names that pydantic gives to the branches of a union."""
    path, before = "", ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES and not (before in _TAGGED and part in _TAGS):
            path += f".{part}" if path else part
        before = str(part)
    return path


_BRANCHES = frozenset(("str", "int", "float", "bool", "dict", "list", "none", "ChosenTool", "FlatChosenTool"))
# Fields whose branches are told apart by a tag, and the tags.
_TAGGED = frozenset(("response_format", "format"))
_TAGS = frozenset(("text", "json_object", "json_schema"))


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Answer an error of the API or of the runtime."""
    return as_api_error(error).response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer starlette's own errors: a path that there is not, or a method that a path does not have."""
    if not isinstance(error, HTTPException):
        return as_api_error(error).response()
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, message, code=code).response(error.headers)
