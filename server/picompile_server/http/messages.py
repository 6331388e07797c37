"""POST /v1/messages and /v1/messages/count_tokens: the next message of a chat, as Anthropic's API has it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.body import read_body
from picompile_server.http.chat_prompt import encode_messages
from picompile_server.http.chat_turn import ChatTurn, chat_turn
from picompile_server.http.counts import usage
from picompile_server.http.errors import ApiError, json_response
from picompile_server.http.message import MessageDelta
from picompile_server.http.messages_body import MessagesBody, PromptBody
from picompile_server.http.reply import ReplyWriter
from picompile_server.http.stream import deliver, sse
from picompile_server.model import ServedModel
from picompile_server.request import Event, PromptRead

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(request: Request) -> Response:
    """Answer the request with a whole message, or with the events of its making."""
    body = await read_body(request, MessagesBody)
    model: ServedModel = await request.app.state.models.use(request, body.model)
    turn = await chat_turn(request, body.as_chat(), model)
    return await deliver(request, turn.reply.start(), _MessageWriter(turn), body.stream)


async def count_message_tokens(request: Request) -> Response:
    """Answer with the number of tokens of a chat's prompt."""
    body = await read_body(request, PromptBody)
    model: ServedModel = await request.app.state.models.use(request, body.model)
    chat = body.as_chat()
    return json_response({"input_tokens": len(await encode_messages(chat, model, chat.offer()))})


class _MessageWriter(ReplyWriter):
    def __init__(self, turn: ChatTurn) -> None:
        super().__init__(turn.reply)
        self._turn = turn
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0
        self._open = ""  # the type of the block that is open
        self._has_begun = False

    def take(self, index: int, event: Event) -> bytes:
        # The first event tells how much of the prompt was in the cache.
        begun = b"" if self._has_begun or not isinstance(event, PromptRead) else self._begun()
        found = self._turn.take(index, event)
        return begun if found is None else begun + b"".join(self._added(found[1]))

    def note(self, index: int, event: Event) -> None:
        """Take an event of the answer."""
        self._turn.take(index, event)

    def _begun(self) -> bytes:
        self._has_begun = True
        return _event("message_start", message={**self._message(), "content": [], "stop_reason": None})

    def _added(self, delta: MessageDelta) -> Iterator[bytes]:
        if delta.reasoning:
            yield from self._in_block("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            yield from self._in_block("text", {"text": ""})
            yield self._delta("text_delta", text=delta.content)
        for call in delta.calls:
            if call.name is not None:
                yield from self._closed()
                yield from self._in_block("tool_use", {"id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._delta("input_json_delta", partial_json=call.arguments)

    def _in_block(self, kind: str, members: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events that begin a block, unless one of the kind is open."""
        if self._open != kind:
            yield from self._closed()
            self._open = kind
            yield _event("content_block_start", index=self._blocks, content_block={"type": kind, **members})

    def _closed(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._blocks)
            self._blocks += 1
            self._open = ""

    def _delta(self, kind: str, **members: Any) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **members})

    def end(self) -> bytes:
        message = self._message()
        ended = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        last = _event("message_delta", delta=ended, usage=message["usage"]) + _event("message_stop")
        return b"".join(self._closed()) + last

    def fail(self, error: ApiError) -> bytes:
        return sse({"type": "error", **error.body()}, "error")

    def whole(self) -> Any:
        """Return the message as one JSON object."""
        builder = self._turn.builders[0]
        content: list[dict[str, Any]] = []
        if builder.reasoning:
            content.append({"type": "thinking", "thinking": builder.reasoning, "signature": ""})
        if builder.content:
            content.append({"type": "text", "text": builder.content})
        for call in builder.calls:
            function = call["function"]
            named = {"id": call["id"], "name": function["name"], "input": _object(function["arguments"])}
            content.append({"type": "tool_use", **named})
        return {**self._message(), "content": content}

    def _message(self) -> dict[str, Any]:
        counts, stop = usage(self._reply.answers, 1), self._reply.answers[0].assembler.stop
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        stop = stop if stop in self._reply.body.stops else None  # not one of the server's own
        finish = self._turn.builders[0].finish or "stop"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.model.name,
            "stop_reason": "stop_sequence" if stop is not None and finish == "stop" else _REASONS[finish],
            "stop_sequence": stop,
            "usage": {
                "input_tokens": counts["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": counts["completion_tokens"],
            },
        }


def _object(arguments: str) -> Any:
    """Return the arguments of a call, which were cut off if they are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _event(kind: str, **members: Any) -> bytes:
    return sse({"type": kind, **members}, kind)
