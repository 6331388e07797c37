"""POST /v1/completions: texts that continue prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.ask import sampling_params, with_index
from picompile_server.http.body import read_body
from picompile_server.http.completion_body import CompletionBody
from picompile_server.http.completion_prompt import Prompt, read_prompt
from picompile_server.http.errors import ApiError
from picompile_server.http.grammars import grammar_of
from picompile_server.http.logprobs import completion_logprobs, prompt_logprobs
from picompile_server.http.progress import AnswerProgress, Delta
from picompile_server.http.reply import Reply, ReplyWriter
from picompile_server.http.stream import deliver, sse
from picompile_server.model import ServedModel
from picompile_server.request import Event, PromptRead, ServingRequest, TokenLogProbability
from picompile_server.text import TextAssembler

# A token's id, its log-probability, and where its text begins.
_Place = tuple[int, TokenLogProbability | None, int]

# Log-probabilities of prompts in one reply: some tens of megabytes of JSON.
_MOST_NAMED = 2**19


async def create_completion(request: Request) -> Response:
    """Answer the request with all texts, or with a stream of their pieces."""
    body = await read_body(request, CompletionBody)
    model = await request.app.state.models.use(request, body.model)
    prompts = [await read_prompt(source, body, model) for source in body.prompt]
    asked = await _requests(body, model, prompts)
    reply = _reply(body, model, asked, request)
    writer = _CompletionWriter(body, reply, [prompt for prompt in prompts for _ in range(body.answers)])
    is_large = body.prompt_logprobs is not None or bool(body.echo)
    return await deliver(request, reply.start(), writer, body.stream, is_large)


async def _requests(body: CompletionBody, model: ServedModel, prompts: Sequence[Prompt]) -> list[ServingRequest]:
    params, grammar = sampling_params(body, model), await grammar_of(body, model)
    tops = [top for top in (body.logprobs, body.prompt_logprobs) if top is not None]
    with_prompt = body.prompt_logprobs is not None or (bool(body.echo) and body.logprobs is not None)
    named = sum(len(prompt.ids) for prompt in prompts) * body.answers * (1 + max(tops, default=0))
    if with_prompt and named > _MOST_NAMED:
        raise ApiError(400, f"{named} log-probabilities of prompts are too many; ask for fewer, at most {_MOST_NAMED}")
    return [
        ServingRequest(
            ids,
            params=with_index(params, index),
            max_tokens=body.most_tokens,
            top_log_probabilities=max(tops, default=None),
            with_prompt=with_prompt,
            ignore_end=bool(body.ignore_eos),
            grammar=grammar,
        )
        for ids in [np.array(prompt.ids, np.int32) for prompt in prompts]  # shared by the prompt's answers
        for index in range(body.answers)
    ]


def _reply(body: CompletionBody, model: ServedModel, asked: Sequence[ServingRequest], request: Request) -> Reply:
    answers = [
        AnswerProgress(model, each, TextAssembler(model.tokenizer, body.stops, each.prompt), keeps_end=True)
        for each in asked
    ]
    return Reply(
        "cmpl-", kind="text_completion", model=model, answers=answers, metrics=request.app.state.metrics, body=body
    )


@dataclass
class _Written:
    """An answer so far: its text, its tokens, why it ended, and how many token ids were told, None before any were."""

    text: str = ""
    places: list[_Place] = field(default_factory=list)
    finish: str | None = None
    told: int | None = None


class _CompletionWriter(ReplyWriter):
    def __init__(self, body: CompletionBody, reply: Reply, prompts: Sequence[Prompt]) -> None:
        super().__init__(reply)
        self._body, self._prompts = body, prompts
        self._written = [_Written() for _ in prompts]

    def take(self, index: int, event: Event) -> bytes:
        found = self._added(index, event)
        if found is None:
            return b""
        delta, places = found
        answer = self._reply.answers[index]
        choice = self._choice(index, delta.text, places, delta.finish)
        return sse(self._reply.chunk(choice, answer, delta))

    def note(self, index: int, event: Event) -> None:
        found = self._added(index, event)
        if found is not None:
            delta, places = found
            written = self._written[index]
            written.text += delta.text
            written.places += places
            written.finish = delta.finish

    def _added(self, index: int, event: Event) -> tuple[Delta, list[_Place]] | None:
        """Return an event's additions, the echoed prompt included; None if there are none."""
        delta, prompt = self._reply.take(index, event), self._prompts[index]
        if isinstance(event, PromptRead) and self._body.echo:
            answer = self._reply.answers[index]
            named = answer.prompt if self._body.logprobs is not None else ()
            return Delta(prompt.text), list(zip(prompt.ids, named, prompt.offsets, strict=False))
        if delta is None:
            return None
        before = len(prompt.text)
        return delta, [(token.named.token, token.named, before + token.offset) for token in delta.tokens]

    def _choice(self, index: int, text: str, places: Sequence[_Place], finish: str | None) -> dict[str, Any]:
        top = self._body.logprobs
        named = None if top is None else completion_logprobs(self._reply.model.texts, places, top)
        choice = {"index": index, "text": text, "logprobs": named, "finish_reason": finish}
        return {**choice, **self._token_ids(index)} if self._body.return_token_ids else choice

    def _token_ids(self, index: int) -> dict[str, Any]:
        """Return the token ids that were not told yet: of the answer, and first of its prompt."""
        written, tokens = self._written[index], self._reply.answers[index].tokens
        before, written.told = written.told, len(tokens)
        prompt = {"prompt_token_ids": self._prompts[index].ids} if before is None else {}
        return {**prompt, "token_ids": tokens[before or 0 :]}

    def whole(self) -> Any:
        texts, top = self._reply.model.texts, self._body.prompt_logprobs
        choices = []
        for index, (written, answer) in enumerate(zip(self._written, self._reply.answers, strict=True)):
            choice = self._choice(index, written.text, written.places, written.finish)
            choice["prompt_logprobs"] = None if top is None else prompt_logprobs(texts, answer.prompt, top)
            choices.append(choice)
        return self._reply.whole(choices)
