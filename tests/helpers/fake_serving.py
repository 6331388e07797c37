"""A model to serve without an engine: its answers are what a test says, token by token, at a time that it chooses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from helpers.chat_templates import AGENT
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import SamplingParams, Tokenizer
from picompile_server.http.app import AppSettings, make_app
from picompile_server.http.models import ModelSet
from picompile_server.model import ServedModel
from picompile_server.request import (
    AnswerTimes,
    Finished,
    FinishReason,
    Listener,
    PromptRead,
    ServingRequest,
    TokenChosen,
    TokenLogProbability,
)
from picompile_server.scheduler import ClosedError, QueueFullError, SchedulerOptions
from picompile_server.slots import SlotState
from picompile_server.stats import SchedulerStats

CONTEXT, SLOTS = 1024, 2
FIRED = 0.25


def likely(token: int, top: int) -> TokenLogProbability:
    """The log-probability that every token of the fake has, and those of alternatives: the ids from 1 on."""
    return TokenLogProbability(token, -0.5, tuple((one, -1.0 - one) for one in range(1, top + 1)))


@dataclass
class FakeAnswer:
    """An answer on a thread of its own."""

    request: ServingRequest
    listener: Listener
    tokens: Sequence[int]
    scheduler: FakeScheduler
    cancelled: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()
        self.scheduler.gate.set()

    def run(self) -> None:
        submitted_s, request = time.monotonic(), self.request
        top = request.top_log_probabilities
        named = [None, *(likely(token, top or 0) for token in request.prompt[1:])] if request.with_prompt else None
        reason: FinishReason = "max_tokens"
        error = ""
        self.listener(PromptRead(self.scheduler.cached, None if named is None else tuple(named)))
        first_s = time.monotonic()
        for sent, token in enumerate([*self.tokens, EOS]):
            self.scheduler.gate.wait()
            time.sleep(self.scheduler.delay_s)
            if self.cancelled.is_set():
                reason = "cancelled"
                break
            if self.scheduler.failure:
                reason, error = "error", self.scheduler.failure
                break
            if sent == request.max_tokens or sent + len(request.prompt) > CONTEXT:
                break
            self.listener(TokenChosen(token, None if top is None else likely(token, top), FIRED))
            if token == EOS and not request.ignore_end:
                reason = "eos"
                break
        self.has_ended.set()
        self.listener(Finished(reason, AnswerTimes(submitted_s, submitted_s, first_s, time.monotonic()), error))


class FakeScheduler:
    """Has the interface of a `Scheduler`.

    Attributes:
        says: makes the tokens of an answer from its request.
        gate: each token waits for it.
        failure: ends answers with this error if it is not empty.
        asked: the answers so far.
    """

    options = SchedulerOptions()

    def __init__(self, says: Callable[[ServingRequest], Sequence[int]]) -> None:
        self.says, self.gate, self.failure = says, threading.Event(), ""
        self.gate.set()
        self.delay_s, self.cached, self.most_waiting = 0.0, 0, 1000
        self.is_closed = False
        self.asked: list[FakeAnswer] = []

    def submit(self, request: ServingRequest, listener: Listener) -> FakeAnswer:
        if self.is_closed:
            raise ClosedError("the scheduler is closed and takes no requests any more")
        if len(self.running) >= self.most_waiting:
            raise QueueFullError("as many requests are waiting as may")
        answer = FakeAnswer(request, listener, self.says(request), self)
        self.asked.append(answer)
        threading.Thread(target=answer.run, daemon=True).start()
        return answer

    @property
    def running(self) -> list[FakeAnswer]:
        return [answer for answer in self.asked if not answer.has_ended.is_set()]

    def stats(self) -> SchedulerStats:
        counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens", "reread_tokens"), 7)
        counts |= {"drafted_tokens": 6, "accepted_tokens": 5}
        steps = {"prompt_steps": 1, "decode_steps": 2, "decoded_tokens": 3, "prompt_s": 0.5, "decode_s": 0.25}
        now: dict[str, Any] = {"waiting": 0, "reading": 0, "decoding": len(self.running), "held_tokens": 11}
        return SchedulerStats(
            finished={}, **counts, **steps, **now, reserved_tokens=5, capacity_tokens=CONTEXT * SLOTS, fired_share=None
        )

    def close(self, drain: bool = True) -> None:
        self.is_closed = True

    def slots(self) -> tuple[SlotState, ...]:
        return (SlotState(0, "decoding", 4, 1), SlotState(1, "idle", 0, None))


def text_tokens(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """The tokens of a text, for `FakeScheduler.says`."""
    return (tokenizer or byte_level()).encode(text, special_tokens=False)


def fake_model(
    says: str | Sequence[int] | Callable[[ServingRequest], Sequence[int]] = "Hello, world.",
    name: str = "fake",
    tokenizer: Tokenizer | None = None,
) -> ServedModel:
    """A served model that answers every request with `says`, or with what `says` returns for it."""
    tokenizer = tokenizer or byte_level()
    if callable(says):
        answers = says
    else:
        tokens = text_tokens(says, tokenizer) if isinstance(says, str) else list(says)
        answers = lambda request: tokens  # noqa: E731
    manifest = SimpleNamespace(sha256="ab" * 32, model={"architecture": "Fake"}, quant="q4", predictor="exact")
    artifact: Any = SimpleNamespace(
        eos_token_ids=frozenset({EOS}), manifest=manifest, json=lambda name: {}, folder="fake"
    )
    vocab = tokenizer._tokenizer.get_vocab_size()
    engine: Any = SimpleNamespace(
        artifact=artifact, context=CONTEXT, vocab=vocab, sequences=SLOTS, chunk=8, close=lambda: None
    )
    scheduler: Any = FakeScheduler(answers)
    return ServedModel(name, engine, tokenizer, scheduler)


def agent_model(says: str) -> ServedModel:
    """A model that reasons and calls tools, whose answer is `says`, and whose prompts show all of a chat."""
    return fake_model(says, tokenizer=Tokenizer(byte_level()._tokenizer.to_str(), {"chat_template": AGENT}))


def prompt_of(model: ServedModel) -> str:
    """The text of the prompt of the latest request to a model."""
    asked = model.scheduler.asked[-1]  # type: ignore[attr-defined]
    return str(model.tokenizer.decode(asked.request.prompt))


def client_of(*models: ServedModel, names: Sequence[str] = (), settings: AppSettings | None = None) -> TestClient:
    """A client of an application that serves `models`; `names` are those of all that there will be."""
    found = ModelSet(names or [model.name for model in models])
    for model in models:
        found.add(model)
    return TestClient(make_app(found, settings), "http://localhost", raise_server_exceptions=False)


def made(client: TestClient, path: str, **body: Any) -> Any:
    """Return the JSON that a request is answered with, which must not fail."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: TestClient, path: str, **body: Any) -> list[Any]:
    """Return the chunks of a stream, but for [DONE], with which it must end."""
    answer = client.post(path, json={"stream": True, **body})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream", answer.text
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def default_params(**changes: Any) -> SamplingParams:
    """The parameters where neither the request nor the model says how to choose tokens: those of `picompile chat`."""
    return SamplingParams(**changes)
