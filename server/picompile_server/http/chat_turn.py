"""The next message of a chat, for each endpoint that asks for one: its prompt, its grammar, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from starlette.requests import Request

from picompile_server.http.ask import check_prompt, sampling_params, with_index
from picompile_server.http.chat_body import ChatBody
from picompile_server.http.chat_prompt import encode_messages
from picompile_server.http.errors import ApiError
from picompile_server.http.grammars import GrammarMaker, WatchedGrammar, asks_for_form, form_grammar
from picompile_server.http.message import MessageBuilder, MessageDelta
from picompile_server.http.progress import AnswerProgress, Delta
from picompile_server.http.reply import Reply
from picompile_server.model import ServedModel
from picompile_server.reasoning import ReasoningSplitter
from picompile_server.reasoning_formats import is_closed, is_open
from picompile_server.request import Event, ServingRequest
from picompile_server.text import TextAssembler
from picompile_server.tools import ToolOffer


@dataclass(frozen=True)
class ChatTurn:
    """The answers to a chat while their events come: a message each.

    Attributes:
        reply: the reply that has the answers.
        builders: build the messages, an answer each.
    """

    reply: Reply
    builders: Sequence[MessageBuilder]

    def take(self, index: int, event: Event) -> tuple[Delta, MessageDelta] | None:
        """Return an event's additions to the answer at `index` and to its message; None if there are none.

        Raises ApiError if the answer failed.
        """
        delta = self.reply.take(index, event)
        if delta is None:
            return None
        builder, answer = self.builders[index], self.reply.answers[index]
        was_reasoning = builder.is_reasoning
        added = builder.take(delta.text, delta.finish)
        if was_reasoning or builder.is_reasoning or added.reasoning:
            answer.reasoning_tokens = answer.generated
        return delta, added


async def chat_turn(request: Request, body: ChatBody, model: ServedModel, prefix: str = "", kind: str = "") -> ChatTurn:
    """Return the turn that answers a chat, which has not started.

    Args:
        request: the request.
        body: the chat and how to answer it.
        model: who answers.
        prefix, kind: see `Reply`.

    Raises:
        ApiError, PicompileRuntimeError: the request makes no sense, or does not fit the model.
    """
    offer = body.offer()
    ids = await encode_messages(body, model, offer)
    check_prompt(ids, model)
    end = model.end_of(ids)
    has_begun = model.reasoning is not None and is_open(model.reasoning, end)
    reasons = model.reasoning is not None and not is_closed(model.reasoning, end)
    grammar = await _grammar(body, model, offer, has_begun if reasons else None)
    params, prompt = sampling_params(body, model), np.array(ids, np.int32)
    asked = [
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
    builders = [_builder(body, model, offer, has_begun) for _ in asked]
    return ChatTurn(_reply(request, body, model, asked, offer, prefix, kind), builders)


async def _grammar(
    body: ChatBody, model: ServedModel, offer: ToolOffer | None, has_begun: bool | None
) -> WatchedGrammar | None:
    """Return the restriction of the answers' tokens: to calls of the offered tools, or to the requested form.

    `has_begun` says whether the prompt has begun the reasoning that comes first; None if there is to be none.
    """
    has_form = asks_for_form(body)
    if offer is not None and has_form:
        raise ApiError(
            400, "an answer can have a form or call tools; leave out response_format, or set tool_choice to none"
        )
    if offer is None and not has_form:
        return None

    def made() -> GrammarMaker | None:
        maker = form_grammar(body, model.grammars) if offer is None else model.tool_use.grammar(model.grammars, offer)
        if maker is None or has_begun is None:
            return maker
        return _behind_reasoning(model, maker, has_begun, has_form)

    maker = await model.grammar_workers.run(made)
    return None if maker is None else WatchedGrammar(maker)


def _behind_reasoning(model: ServedModel, maker: GrammarMaker, has_begun: bool, is_text: bool) -> GrammarMaker:
    """Return a maker of grammars that let the model reason first, if it does."""
    from picompile_server.reasoning_grammar import ReasoningGrammar

    tokens = model.reasoning_tokens
    if tokens is None:
        return maker
    _ = tokens.spaces  # made here, since it takes a moment
    return lambda: ReasoningGrammar(tokens, maker, has_begun, is_text)


def _builder(body: ChatBody, model: ServedModel, offer: ToolOffer | None, has_begun: bool) -> MessageBuilder:
    splits = model.reasoning is not None and body.reasoning_format != "none"
    return MessageBuilder(
        None if offer is None else model.tool_use.parser(offer),
        ReasoningSplitter(model.reasoning, has_begun) if splits and model.reasoning is not None else None,
    )


def _reply(
    request: Request,
    body: ChatBody,
    model: ServedModel,
    asked: Sequence[ServingRequest],
    offer: ToolOffer | None,
    prefix: str,
    kind: str,
) -> Reply:
    stops = [*body.stops, *model.tokenizer.chat_stops]
    shown = dict({} if offer is None else model.tool_use.shown_tokens)
    if model.reasoning is not None:
        special = model.tokenizer.special_tokens.items()
        shown |= {number: name for name, number in special if any(name in text for text in model.reasoning.texts)}
    return Reply(
        prefix,
        kind=kind,
        model=model,
        answers=[AnswerProgress(model, each, TextAssembler(model.tokenizer, stops, shown=shown)) for each in asked],
        metrics=request.app.state.metrics,
        body=body,
    )
