"""POST /v1/chat/completions: the next message of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.ask import check_prompt, sampling_params, with_index
from picompile_server.http.body import read_body
from picompile_server.http.chat_body import ChatBody
from picompile_server.http.chat_prompt import encode_messages
from picompile_server.http.errors import ApiError
from picompile_server.http.grammars import WatchedGrammar, asks_for_form, grammar_of
from picompile_server.http.logprobs import chat_logprobs
from picompile_server.http.message import MessageBuilder, MessageDelta
from picompile_server.http.progress import AnswerProgress, Delta, NamedToken
from picompile_server.http.reply import Reply, ReplyWriter
from picompile_server.http.stream import deliver, sse
from picompile_server.model import ServedModel
from picompile_server.request import Event, ServingRequest
from picompile_server.text import TextAssembler
from picompile_server.tools import ToolOffer


async def create_chat_completion(request: Request) -> Response:
    """Answer the request with whole messages, or with a stream of their pieces."""
    body = await read_body(request, ChatBody)
    model: ServedModel = request.app.state.models.get(body.model)
    offer = body.offer()
    ids = await encode_messages(body, model, offer)
    check_prompt(ids, model)
    asked = _requests(body, model, ids, await _grammar(body, model, offer))
    reply = _reply(body, model, asked, offer, request)
    builders = [MessageBuilder(None if offer is None else model.tool_use.parser(offer)) for _ in asked]
    writer = _ChatWriter(body, reply, builders)
    return await deliver(request, reply.start(), writer, body.stream)


async def _grammar(body: ChatBody, model: ServedModel, offer: ToolOffer | None) -> WatchedGrammar | None:
    """Return the restriction of the answers' tokens: to calls of the offered tools, or to the requested form."""
    if offer is None:
        return await grammar_of(body, model)
    if asks_for_form(body):
        raise ApiError(
            400, "an answer can have a form or call tools; leave out response_format, or set tool_choice to none"
        )
    made = await model.grammar_workers.run(lambda: model.tool_use.grammar(model.grammars, offer))
    return None if made is None else WatchedGrammar(made)


def _requests(
    body: ChatBody, model: ServedModel, ids: Sequence[int], grammar: WatchedGrammar | None
) -> list[ServingRequest]:
    params, prompt = sampling_params(body, model), np.array(ids, np.int32)
    return [
        ServingRequest(
            prompt,
            with_index(params, index),
            body.most_tokens,
            body.top,
            ignore_end=bool(body.ignore_eos),
            grammar=grammar,
        )
        for index in range(body.answers)
    ]


def _reply(
    body: ChatBody, model: ServedModel, asked: Sequence[ServingRequest], offer: ToolOffer | None, request: Request
) -> Reply:
    stops = [*body.stops, *model.tokenizer.chat_stops]
    shown = {} if offer is None else model.tool_use.shown_tokens
    return Reply(
        "chatcmpl-",
        kind="chat.completion.chunk" if body.stream else "chat.completion",
        model=model,
        answers=[AnswerProgress(model, each, TextAssembler(model.tokenizer, stops, shown=shown)) for each in asked],
        metrics=request.app.state.metrics,
        body=body,
    )


class _ChatWriter(ReplyWriter):
    def __init__(self, body: ChatBody, reply: Reply, builders: Sequence[MessageBuilder]) -> None:
        super().__init__(reply)
        self._body, self._builders = body, builders
        self._tokens: list[list[NamedToken]] = [[] for _ in builders]

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": None}
        return b"".join(self._chunk(index, first, None) for index in range(len(self._builders)))

    def take(self, index: int, event: Event) -> bytes:
        found = self._added(index, event)
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
        found = self._added(index, event)
        if found is not None:
            self._tokens[index] += found[0].tokens

    def _added(self, index: int, event: Event) -> tuple[Delta, MessageDelta] | None:
        """Return an event's additions to the answer and to its message; None if there are none."""
        delta = self._reply.take(index, event)
        return None if delta is None else (delta, self._builders[index].take(delta.text, delta.finish))

    def whole(self) -> Any:
        return self._reply.whole([self._choice(index) for index in range(len(self._builders))])

    def _choice(self, index: int) -> dict[str, Any]:
        texts, builder = self._reply.model.texts, self._builders[index]
        named = None
        if self._body.top is not None:
            named = {"content": chat_logprobs(texts, self._tokens[index]), "refusal": None}
        return {"index": index, "message": builder.message(), "logprobs": named, "finish_reason": builder.finish}
