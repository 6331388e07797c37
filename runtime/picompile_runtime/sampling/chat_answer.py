"""One answer of a chat: its options, its generation, and its statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown, whole_number
from picompile_runtime.sampling.generate import Generation, generate
from picompile_runtime.sampling.sampler import SamplingParams
from picompile_runtime.sampling.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ChatMessage:
    """A message. Raises RequestError unless its role is one of `ROLES`, and its content a text."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"the role of a message is one of {', '.join(ROLES)}, not {shown(self.role)}")
        if not isinstance(self.content, str):
            raise RequestError(f"the content of a message is a text, not {shown(self.content)}")


@dataclass(frozen=True)
class ChatOptions:
    """Options of the answers.

    Attributes:
        params: how to choose tokens. With a seed, the n-th answer of a chat is drawn with the seed plus n - 1.
        max_tokens: how many tokens an answer may have; None goes on to the end of the context.
        draft: how tokens are drafted, see `generate`.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    draft: str = "none"

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            whole_number("max_tokens", value=self.max_tokens, least=1, most=2**63 - 1, must="1 or more")


@dataclass(frozen=True)
class ChatAnswerStats:
    """Counts and speeds of an answer.

    Attributes:
        prompt_tokens: number of tokens of the chat up to the answer.
        reused_tokens: how many of them were in the KV cache already, and not read again.
        generated_tokens: number of tokens of the answer, with the model's end token if there was one.
        prompt_tokens_per_s: speed of reading those that were read.
        answer_tokens_per_s: speed over the tokens of the answer after the first, 0.0 if there are none.
        time_to_first_token_s: time from the question to the first token, 0.0 if there was none.
        fired_share, computed_share: shares of the neurons that fired, and that were computed, while the answer was
            decoded, from 0 to 1; None if none was counted.
        stop_reason: "eos", "stop", "max_tokens", "context", "cancelled", or "" while it goes on.
    """

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    time_to_first_token_s: float
    fired_share: float | None
    computed_share: float | None
    stop_reason: str


class ChatAnswer(Iterator[str]):
    """An answer in progress, made by a `Conversation`. Iterate over it for the pieces of text.

    While the chat is read, a piece without text comes after each chunk. The text so far is a message of the chat at any
    time: an answer that is not made to its end stays as it is.

    Attributes:
        text: the text so far.
        prompt_tokens: token ids of the chat up to the answer.
        reused_tokens: how many of them were in the KV cache already.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        messages: list[ChatMessage],
        prompt_tokens: list[int],
        reused_tokens: int,
        options: ChatOptions,
        start_s: float,
    ) -> None:
        """Begin to answer `messages`, to which the answer adds itself. `start_s` is when it was asked for."""
        self.text = ""
        self.prompt_tokens, self.reused_tokens = prompt_tokens, reused_tokens
        self._engine, self._tokenizer, self._messages, self._options = engine, tokenizer, messages, options
        self._start_s, self._wait_s, self._read_s = start_s, 0.0, 0.0
        self._generation: Generation | None = None
        self._is_cancelled, self._place = False, len(messages)
        self._fired_before = self._fired = engine.firing_totals("all")
        self._pieces = self._run()
        engine.rewind(reused_tokens)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def read_tokens(self) -> int:
        """Number of tokens of the chat and the answer that are in the KV cache now."""
        return self._engine.position

    @property
    def held_tokens(self) -> list[int]:
        """Tokens of the chat and the answer; the KV cache has the first `read_tokens` of them."""
        return [*self.prompt_tokens, *(self._generation.tokens if self._generation else ())]

    def cancel(self) -> None:
        """End the answer before its next token or the next chunk of the chat. A signal handler may call it."""
        self._is_cancelled = True
        if self._generation:
            self._generation.cancel()

    @property
    def stats(self) -> ChatAnswerStats:
        """Counts and speeds so far; shares of neurons when the answer has ended."""
        made = self._generation.stats if self._generation else None
        read_s = self._read_s + (self._generation.prefill_s if self._generation else 0.0)
        computed, fired, neurons = (now - before for now, before in zip(self._fired, self._fired_before, strict=True))
        return ChatAnswerStats(
            prompt_tokens=len(self.prompt_tokens),
            reused_tokens=self.reused_tokens,
            generated_tokens=made.generated_tokens if made else 0,
            prompt_tokens_per_s=(len(self.prompt_tokens) - self.reused_tokens) / read_s if read_s else 0.0,
            answer_tokens_per_s=made.decode_tokens_per_s if made else 0.0,
            time_to_first_token_s=self._wait_s + made.time_to_first_token_s if made and made.generated_tokens else 0.0,
            fired_share=fired / neurons if neurons else None,
            computed_share=computed / neurons if neurons else None,
            stop_reason=made.stop_reason if made else "cancelled" if self._is_cancelled else "",
        )

    def _run(self) -> Iterator[str]:
        yield from self._read_chunks()
        if self._is_cancelled:
            return
        self._wait_s = time.perf_counter() - self._start_s
        self._generation = generation = generate(
            self._engine,
            tokenizer=self._tokenizer,
            prompt=self.prompt_tokens,
            params=self._options.params,
            max_tokens=self._options.max_tokens,
            stop=self._tokenizer.chat_stops,
            reused_tokens=self.read_tokens,
            draft=self._options.draft,
        )
        if self._is_cancelled:  # just now
            generation.cancel()
        for piece in generation:
            self._add(piece)
            yield piece
        self._fired = self._engine.firing_totals("all")
        if generation.stats.stop_reason != "cancelled":
            self._add("")  # an answer without text is one, too

    def _read_chunks(self) -> Iterator[str]:
        """Read all of the chat but the last chunk, or one token more if a single one would be left."""
        ids, chunk = self.prompt_tokens, self._engine.chunk
        while len(ids) - self.read_tokens > chunk + 1 and not self._is_cancelled:
            start, place = time.perf_counter(), self.read_tokens
            self._engine.read_chunk(ids[place : place + chunk], is_last=False)
            self._read_s += time.perf_counter() - start
            yield ""

    def _add(self, piece: str) -> None:
        self.text += piece
        message = ChatMessage("assistant", self.text)
        self._messages[self._place :] = [message]
