"""POST /v1/responses: a conversation in, the items of one answer out, nothing kept."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.body import read_body
from picompile_server.http.chat_turn import ChatTurn, chat_turn
from picompile_server.http.counts import timings, usage
from picompile_server.http.errors import ApiError
from picompile_server.http.reply import ReplyWriter
from picompile_server.http.response_body import ResponseBody
from picompile_server.http.response_items import Event as ItemEvent
from picompile_server.http.response_items import OutputItems
from picompile_server.http.stream import deliver, sse
from picompile_server.model import ServedModel
from picompile_server.request import Event


async def create_response(request: Request) -> Response:
    """Answer the request with a whole response, or with the events of its making."""
    body = await read_body(request, ResponseBody)
    model: ServedModel = await request.app.state.models.use(request, body.model)
    turn = await chat_turn(request, body.as_chat(), model)
    return await deliver(request, turn.reply.start(), _ResponseWriter(body, turn), body.stream)


class _ResponseWriter(ReplyWriter):
    def __init__(self, body: ResponseBody, turn: ChatTurn) -> None:
        super().__init__(turn.reply)
        self._body, self._turn = body, turn
        self._output = OutputItems(body.namespaces, body.seals_reasoning)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._number = 0

    def begin(self) -> bytes:
        return b"".join(
            self._event(f"response.{name}", {"response": self._response("in_progress")})
            for name in ("created", "in_progress")
        )

    def take(self, index: int, event: Event) -> bytes:
        found = self._turn.take(index, event)
        return b"" if found is None else self._events(self._output.take(found[1]))

    def note(self, index: int, event: Event) -> None:
        """Take an event of the answer."""
        self.take(index, event)

    def end(self) -> bytes:
        last = self._events(self._output.close(self._status == "completed"))
        return last + self._event(f"response.{self._status}", {"response": self._whole()})

    def fail(self, error: ApiError) -> bytes:
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", {"response": {**self._response("failed"), "error": told}})

    def whole(self) -> Any:
        """Return the response as one JSON object."""
        self._events(self._output.close(self._status == "completed"))
        return self._whole()

    def _whole(self) -> dict[str, Any]:
        counts = usage(self._reply.answers, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            **self._response(self._status),
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": self._output.items,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            "timings": timings(self._reply.answers),
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._turn.builders[0].finish == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response before there is any output."""
        body, params = self._body, self._reply.answers[0].request.params
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        reasoning = None if body.reasoning is None else body.reasoning.model_dump()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._reply.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._reply.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": reasoning,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": self._tool_choice(),
            "tools": [_tool(each.model_dump()) for each in body.functions],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _tool_choice(self) -> Any:
        chosen = self._body.tool_choice or "auto"
        return chosen if isinstance(chosen, str) else chosen.model_dump(exclude_none=True)

    def _events(self, events: Iterable[ItemEvent]) -> bytes:
        return b"".join([self._event(name, members) for name, members in events])

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number, **members}, kind)


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as the response repeats it; OpenAI's has all members."""
    return {**given, "strict": bool(given["strict"])}
