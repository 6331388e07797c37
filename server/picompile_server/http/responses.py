"""POST /v1/responses, in its basic form: a conversation in, one message out, nothing kept."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.ask import check_letters, check_prompt, sampling_params
from picompile_server.http.body import read_body
from picompile_server.http.counts import timings, usage
from picompile_server.http.errors import ApiError
from picompile_server.http.grammars import grammar_of
from picompile_server.http.progress import AnswerProgress
from picompile_server.http.reply import Reply, ReplyWriter
from picompile_server.http.response_body import ResponseBody
from picompile_server.http.stream import deliver, sse
from picompile_server.model import ServedModel
from picompile_server.request import Event, ServingRequest
from picompile_server.text import TextAssembler


async def create_response(request: Request) -> Response:
    """Answer the request with a whole response, or with the events of its making."""
    body = await read_body(request, ResponseBody)
    model: ServedModel = request.app.state.models.get(body.model)
    messages = body.template_messages()
    check_letters(sum(len(message["content"]) for message in messages), model)
    ids = await model.encode_chat(messages)
    check_prompt(ids, model)
    fields = body.as_text()
    grammar = await grammar_of(fields, model)
    asked = ServingRequest(ids, sampling_params(fields, model), body.max_output_tokens, grammar=grammar)
    progress = AnswerProgress(model, asked, TextAssembler(model.tokenizer, model.tokenizer.chat_stops))
    reply = Reply("", kind="", model=model, answers=[progress], metrics=request.app.state.metrics, body=fields)
    writer = _ResponseWriter(body, reply, asked)
    return await deliver(request, reply.start(), writer, body.stream)


class _ResponseWriter(ReplyWriter):
    def __init__(self, body: ResponseBody, reply: Reply, asked: ServingRequest) -> None:
        super().__init__(reply)
        self._body, self._asked = body, asked
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._finish: str | None = None
        self._number = 0

    def begin(self) -> bytes:
        item = self._message("in_progress", [])
        return (
            self._event("response.created", response=self._response("in_progress"))
            + self._event("response.in_progress", response=self._response("in_progress"))
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place(), part=_part(""))
        )

    def take(self, index: int, event: Event) -> bytes:
        before = len(self._text)
        self.note(index, event)
        if len(self._text) == before:
            return b""
        return self._event("response.output_text.delta", **self._place(), delta=self._text[before:], logprobs=[])

    def note(self, index: int, event: Event) -> None:
        """Take an event of the answer."""
        delta = self._reply.take(index, event)
        if delta is not None:
            self._text += delta.text
            self._finish = delta.finish

    def end(self) -> bytes:
        item = self._message(self._status, [_part(self._text)])
        return (
            self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{self._status}", response=self.whole())
        )

    def fail(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": told})

    def whole(self) -> Any:
        """Return the response as one JSON object."""
        counts = usage(self._reply.answers, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            **self._response(self._status),
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [self._message(self._status, [_part(self._text)])],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            "timings": timings(self._reply.answers),
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response before there is any output."""
        body, params = self._body, self._asked.params
        text = (
            body.text.model_dump(by_alias=True, exclude_none=True)
            if body.text and body.text.format
            else {"format": {"type": "text"}}
        )
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": text,
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number, **members}, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
