"""Reading the body of a request: of bounded size, JSON, and with the fields that the endpoint takes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from picompile_server.http.errors import ApiError, bad_fields

Body = TypeVar("Body", bound=BaseModel)
PATIENCE_S = 120.0  # for a body


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the fields of a request.

    Raises:
        ApiError: the body does not come (408), is too large (413), has another type than JSON (415), or is not what
            `kind` describes (400).
    """
    # A page of another origin can send a body without asking only as plain text, as a form, or without a type.
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, f"send JSON with the header Content-Type: application/json, not {media[:80] or 'none'}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without Content-Encoding")
    try:
        content = await asyncio.wait_for(_read(request, request.app.state.most_body_bytes), PATIENCE_S)
    except asyncio.TimeoutError as error:  # another class before Python 3.11
        raise ApiError(408, f"the body did not come within {PATIENCE_S:.0f} s", code="timeout") from error
    try:
        data = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise bad_fields(error) from error


async def _read(request: Request, most_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {most_bytes} bytes (--max-body)", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > most_bytes):
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
