"""Parts that replies of all endpoints for text have: identity, progress of their answers, counts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from picompile_server.http.counts import timings, usage
from picompile_server.http.errors import ApiError
from picompile_server.http.fields import StreamOptions, TextBody
from picompile_server.http.metrics import Metrics
from picompile_server.http.progress import AnswerProgress, Delta
from picompile_server.http.stream import DONE, sse
from picompile_server.mailbox import Answers
from picompile_server.model import ServedModel
from picompile_server.request import Event


@dataclass
class Reply:
    """A reply to one request.

    Attributes:
        prefix: of its id, such as `chatcmpl-`.
        kind: its member `object`.
        model: who answers.
        answers: the progress of each answer, prompt by prompt.
        metrics: what is told how the answers went.
        body: the request's fields, which say how many answers each prompt has and what the chunks of a stream tell.
    """

    prefix: str
    kind: str
    model: ServedModel
    answers: Sequence[AnswerProgress]
    metrics: Metrics
    body: TextBody
    created_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._head = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "object": self.kind,
            "created": self.created_s,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }
        self._streamed = self.body.stream_options or StreamOptions()
        self._started: Answers | None = None
        self._note_token = self.metrics.token_observer(self.model.name)

    def start(self) -> Answers:
        """Ask the model for the answers. Raises as `ServedModel.start` does."""
        self._started = self.model.start([answer.request for answer in self.answers])
        return self._started

    def take(self, index: int, event: Event) -> Delta | None:
        """Return an event's additions to an answer, None if there are none. Raises ApiError if the answer failed."""
        answer = self.answers[index]
        before_s, before = answer.last_token_s, answer.generated
        delta = answer.take(event)
        if before and answer.generated > before:
            self._note_token(answer.last_token_s - before_s)
        if answer.assembler.is_stopped and not answer.outcome and self._started is not None:
            self._started.cancel(index)
        return delta

    def chunk(self, choice: dict[str, Any], answer: AnswerProgress, delta: Delta | None) -> Any:
        """Return a chunk of a stream with one `choice`, made of `delta`; None before the first."""
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._streamed.include_usage:  # null but in the last chunk, unless the counts so far are wanted
            chunk["usage"] = usage([answer], 1) if self._streamed.continuous_usage_stats else None
        if delta is not None and delta.finish is not None:
            chunk["timings"] = timings([answer])
        elif delta is not None and self.body.timings_per_token:
            chunk["timings"] = {**timings([answer]), "fired_share": delta.fired_share}
        return chunk

    def end(self) -> bytes:
        """Return the end of a stream of chunks, with the counts of all answers if they are wanted."""
        if not self._streamed.include_usage:
            return DONE
        return sse({**self._head, "choices": [], **self.counts()}) + DONE

    def counts(self) -> dict[str, Any]:
        """Return the members `usage` and `timings`."""
        return {"usage": usage(self.answers, self.body.answers), "timings": timings(self.answers)}

    def whole(self, choices: Sequence[dict[str, Any]]) -> Any:
        """Return the reply as one JSON object."""
        return {**self._head, "choices": choices, **self.counts()}

    def close(self) -> None:
        """Note how the answers went."""
        for answer in self.answers:
            self.metrics.note_answer(self.model.name, answer.outcome or "cancelled", answer.times, answer.generated)


class ReplyWriter:
    """The parts that writers of replies share: those of a stream of OpenAI's chunks, which begins with its answers."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def begin(self) -> bytes:
        """Return the data before the first event."""
        return b""

    def end(self) -> bytes:
        """Return the data after the last event."""
        return self._reply.end()

    def fail(self, error: ApiError) -> bytes:
        """Return the data for a failed answer."""
        return sse(error.body()) + DONE

    def usage(self) -> dict[str, Any]:
        """Return the tokens of the answers, as OpenAI's API counts them."""
        return usage(self._reply.answers, self._reply.body.answers)

    def close(self) -> None:
        """Note how the answers went."""
        self._reply.close()
