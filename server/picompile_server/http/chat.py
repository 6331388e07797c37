"""POST /v1/chat/completions: the next message of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.body import read_body
from picompile_server.http.chat_body import ChatBody
from picompile_server.http.chat_turn import ChatTurn, chat_turn
from picompile_server.http.logprobs import chat_logprobs
from picompile_server.http.progress import Delta, NamedToken
from picompile_server.http.reply import ReplyWriter
from picompile_server.http.stream import deliver, sse
from picompile_server.model import ServedModel
from picompile_server.request import Event


async def create_chat_completion(request: Request) -> Response:
    """Answer the request with whole messages, or with a stream of their pieces."""
    body = await read_body(request, ChatBody)
    model: ServedModel = await request.app.state.models.use(request, body.model)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    turn = await chat_turn(request, body, model, "chatcmpl-", kind)
    return await deliver(request, turn.reply.start(), _ChatWriter(body, turn), body.stream)


class _ChatWriter(ReplyWriter):
    def __init__(self, body: ChatBody, turn: ChatTurn) -> None:
        super().__init__(turn.reply)
        self._body, self._turn, self._builders = body, turn, turn.builders
        self._tokens: list[list[NamedToken]] = [[] for _ in turn.builders]

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": None}
        return b"".join(self._chunk(index, first, None) for index in range(len(self._builders)))

    def take(self, index: int, event: Event) -> bytes:
        found = self._turn.take(index, event)
        if found is None:
            return b""
        delta, added = found
        tokens, parts = delta.tokens, []
        for piece in added.pieces():
            parts.append(self._chunk(index, piece, delta, tokens))
            tokens = ()
        if tokens:  # of text that is held back
            parts.append(self._chunk(index, {"content": ""}, delta, tokens))
        if delta.finish is not None:
            parts.append(self._chunk(index, {}, delta, finish=added.finish))
        return b"".join(parts)

    def _chunk(
        self,
        index: int,
        added: dict[str, Any],
        delta: Delta | None,
        tokens: Sequence[NamedToken] = (),
        finish: str | None = None,
    ) -> bytes:
        named = {"content": chat_logprobs(self._reply.model.texts, tokens)} if tokens else None
        choice = {"index": index, "delta": added, "logprobs": named, "finish_reason": finish}
        return sse(self._reply.chunk(choice, self._reply.answers[index], delta))

    def note(self, index: int, event: Event) -> None:
        found = self._turn.take(index, event)
        if found is not None:
            self._tokens[index] += found[0].tokens

    def whole(self) -> Any:
        return self._reply.whole([self._choice(index) for index in range(len(self._builders))])

    def _choice(self, index: int) -> dict[str, Any]:
        texts, builder = self._reply.model.texts, self._builders[index]
        named = None
        if self._body.top is not None:
            named = {"content": chat_logprobs(texts, self._tokens[index]), "refusal": None}
        return {"index": index, "message": builder.message(), "logprobs": named, "finish_reason": builder.finish}
