"""Generation of text: a prompt goes in, pieces of text come out as they are generated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import check_room, shown, token_ids, whole_number
from picompile_runtime.sampling.sampler import Sampler, SamplingParams
from picompile_runtime.sampling.speculation import Speculation, speculate
from picompile_runtime.sampling.tokenizer import StreamDecoder, Tokenizer

_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class GenerationStats:
    """Counts and speeds of a generation.

    Attributes:
        prompt_tokens: number of tokens in the prompt.
        generated_tokens: number of tokens generated so far.
        prefill_tokens_per_s: speed of reading the prompt.
        decode_tokens_per_s: speed over the tokens after the first, 0.0 if there are none. Time that the caller spends
            between two pieces does not count.
        time_to_first_token_s: time from the start to the first token.
        stop_reason: "eos", "stop", "max_tokens", "context", "cancelled", or "" while it goes on.
        draft_tokens: number of tokens that were drafted and checked.
        accepted_tokens: number of those that are among the generated tokens.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    time_to_first_token_s: float
    stop_reason: str
    draft_tokens: int = 0
    accepted_tokens: int = 0


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    max_tokens: int | None = 128,
    stop: str | Sequence[str] = (),
    keep_position: bool = False,
    reused_tokens: int = 0,
    draft: str = "none",
) -> Generation:
    """Return a generation that continues `prompt`; iterate over it for the pieces of text.

    Args:
        engine: the engine, whose slot 0 is used.
        tokenizer: the model's tokenizer.
        prompt: a text or token ids.
        params: how to choose tokens.
        max_tokens: how many tokens to generate at most; None goes on to the end of the context.
        stop: texts at which the text ends. No part of them is ever shown. The name of a special token, which has no
            text, ends it at that token. It also ends at an end token of the model.
        keep_position: whether to continue behind the tokens that the engine has read, instead of forgetting them.
        reused_tokens: how many tokens of the prompt, from the first on, the engine has read already. They are not read
            again; what the engine has read behind them is forgotten. A single token that is left to read is decoded,
            which may compute fewer neurons than reading it in a prompt.
        draft: one of DRAFTS: `ngram` drafts tokens that repeat what was before and checks several in one step, where
            that promises to be faster and the artifact was made for it. Tokens are the same as with `none`.

    Raises:
        RequestError: the request cannot be met. It is raised at once, and the engine has not changed.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens = token_ids(ids, engine.vocab, least=0).tolist()
    if not tokens:
        raise RequestError("the prompt is empty, and this model has no token that begins a text; give a prompt")
    if max_tokens is not None:
        max_tokens = whole_number("max_tokens", value=max_tokens, least=1, most=2**63 - 1, must="1 or more")
    if not isinstance(tokenizer, Tokenizer):
        raise RequestError(f"a text is made by a Tokenizer, not by {shown(tokenizer)}")
    speculation = speculate(draft, engine.most_checked)
    check_room(len(tokens), engine.position if keep_position else 0, engine.context)
    reused_tokens = _reused(reused_tokens, len(tokens), engine, keep_position)
    made = Generation(
        engine,
        decoder=StreamDecoder(tokenizer),
        prompt_tokens=tokens,
        params=params or SamplingParams(),
        max_tokens=max_tokens,
        stop=StopFinder(stop, tokenizer.special_tokens),
        reused_tokens=reused_tokens,
        speculation=speculation,
    )
    if not keep_position:  # last, so that a rejected request changes nothing
        engine.rewind(reused_tokens)
    return made


def _reused(reused_tokens: int, prompt_tokens: int, engine: Engine, keep_position: bool) -> int:
    """Return how many tokens of the prompt are not read again, or raise RequestError."""
    most = 0 if keep_position else min(prompt_tokens - 1, engine.position)
    must = "" if most else "0: with keep_position, or nothing read before, there is nothing to reuse"
    return whole_number("reused_tokens", value=reused_tokens, least=0, most=most, must=must)


class Generation(Iterator[str]):
    """A generation in progress, made by `generate`. Iterate over it for the pieces of text.

    Attributes:
        prompt_tokens: token ids of the prompt.
        tokens: token ids generated so far, including the model's end token, which is not in the text. The engine has
            not read the last one.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: StreamDecoder,
        prompt_tokens: list[int],
        params: SamplingParams,
        max_tokens: int | None,
        stop: StopFinder,
        reused_tokens: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.tokens: list[int] = []
        self._engine, self._decoder, self._stop = engine, decoder, stop
        self._end_tokens = engine.artifact.eos_token_ids
        self._sampler = Sampler(params, engine.vocab)
        self._max_tokens, self._reused_tokens = max_tokens, reused_tokens
        self._speculation, self._drafted, self._accepted = speculation, 0, 0
        self._is_cancelled = False
        self._prefill_s = self._first_token_s = self._decode_s = 0.0
        self._reason = ""
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def cancel(self) -> None:
        """End the generation before its next token. A signal handler or another thread may call it."""
        self._is_cancelled = True

    @property
    def prefill_s(self) -> float:
        """Time that reading the prompt took."""
        return self._prefill_s

    @property
    def stats(self) -> GenerationStats:
        """Counts and speeds so far."""
        read_tokens = len(self.prompt_tokens) - self._reused_tokens
        return GenerationStats(
            prompt_tokens=len(self.prompt_tokens),
            generated_tokens=len(self.tokens),
            prefill_tokens_per_s=read_tokens / self._prefill_s if self._prefill_s else 0.0,
            decode_tokens_per_s=(len(self.tokens) - 1) / self._decode_s if self._decode_s else 0.0,
            time_to_first_token_s=self._first_token_s,
            stop_reason=self._reason,
            draft_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )

    def _run(self) -> Iterator[str]:
        for token in self._sampled():
            if token in self._end_tokens:
                self._reason = "eos"
                break
            if not self._stop.ends_at(token) and (piece := self._stop.feed(self._decoder.push(token))):
                yield piece
            if self._stop.found:
                break
        rest = self._stop.feed(self._decoder.flush()) + self._stop.rest()
        if self._stop.found:
            self._reason = "stop"
        if rest:
            yield rest

    def _sampled(self) -> Iterator[int]:
        """Yield tokens until there are `max_tokens` of them, the context is full, or the generation is cancelled."""
        if self._is_cancelled:
            self._reason = "cancelled"
            return
        start = time.perf_counter()
        scores = self._engine.read(self.prompt_tokens[self._reused_tokens :])
        read = self._engine.position
        self._prefill_s = time.perf_counter() - start
        self._sampler.observe(self.prompt_tokens)
        self.tokens.append(self._sampler.sample(scores))
        self._first_token_s = time.perf_counter() - start
        if self._speculation is not None:
            self._speculation.add([*self.prompt_tokens, self.tokens[0]])
        yield self.tokens[-1]
        while len(self.tokens) != self._max_tokens and self._engine.position < self._engine.context:
            if self._is_cancelled:
                self._reason = "cancelled"
                return
            start = time.perf_counter()
            made = self._step()
            self._decode_s += time.perf_counter() - start
            try:
                for number, token in enumerate(made):
                    if number and self._is_cancelled:
                        break
                    self.tokens.append(token)
                    yield token
            finally:  # whoever asks for no more has not seen the rest
                if len(made) > 1:
                    with suppress(RequestError):  # the engine may be closed by then
                        self._engine.rewind(read + len(self.tokens) - 1)
        self._reason = "max_tokens" if len(self.tokens) == self._max_tokens else "context"

    def _step(self) -> list[int]:
        """Read the last token and a draft, and return the tokens that really follow."""
        last = self.tokens[-1:]
        if self._speculation is None:
            return [self._sampler.sample(self._engine.read(last))]
        first, room = self._engine.position, self._engine.context - self._engine.position - 1
        if self._max_tokens is not None:
            room = min(room, self._max_tokens - len(self.tokens) - 1)
        drafted = self._speculation.draft(room)
        start = time.perf_counter()
        rows = self._engine.read_each(last + drafted) if drafted else [self._engine.read(last)]
        self._speculation.saw_step(len(rows), time.perf_counter() - start)
        made: list[int] = []
        for row, draft in zip(rows, [*drafted, None], strict=True):
            made.append(self._sampler.sample(row))
            if made[-1] != draft or draft in self._end_tokens:
                break
        if drafted:
            self._engine.rewind(first + len(made))
            self._drafted, self._accepted = self._drafted + len(drafted), self._accepted + len(made) - 1
        self._speculation.add(made)
        return made


class StopFinder:
    """Finds the first stop text in a stream, however the stream is cut into pieces.

    The first is the one that is complete first, and the longest of those that are complete at the same character. Text
    that may be the beginning of a stop text is held back until it is known not to be. Special tokens have no text: a
    stop text that is exactly the name of one is found where that token comes.

    Attributes:
        stop: the stop text that was found, None before.
    """

    def __init__(self, stops: str | Sequence[str], special_tokens: Mapping[str, int] = _NO_TOKENS) -> None:
        """Make a finder of `stops`; `special_tokens` are the ids of the special tokens by name.

        Raises RequestError: `stops` are no texts, or one of them is empty.
        """
        try:
            self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        except TypeError as error:
            raise RequestError(f"stop must be a text or a list of texts, not {shown(stops)}") from error
        if not all(isinstance(stop, str) for stop in self._stops):
            raise RequestError(f"stop must be a text or a list of texts, not {shown(stops)}")
        if not all(self._stops):
            raise RequestError("a stop text must not be empty")
        self._tokens = {special_tokens[stop]: stop for stop in self._stops if stop in special_tokens}
        self._held = ""
        self._has_text = self._has_token = False
        self.stop: str | None = None

    @property
    def found(self) -> bool:
        """Whether a stop text or a stop token was found."""
        return self._has_text or self._has_token

    def ends_at(self, token: int) -> bool:
        """Return whether the text ends at this token. Feed what a decoder holds back of the tokens before it then."""
        if not self._has_token and token in self._tokens:
            self._has_token, self.stop = True, self._tokens[token]
        return self._has_token

    def feed(self, text: str) -> str:
        """Add text, and return what can be shown now; nothing after a stop text was found."""
        if self._has_text:
            return ""
        text = self._held + text
        places = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            _, place, self.stop = min(places)
            self._has_text, self._held = True, ""
            return text[:place]
        shown = len(text) - self._beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return the text that was held back, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop text."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stops), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
