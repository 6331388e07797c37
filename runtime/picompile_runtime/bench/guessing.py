"""Decoding a text with tokens guessed, as fast as the text allows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from picompile_runtime.bench.speed import SpeedStatistics
from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.speculation import Speculation


@dataclass(frozen=True)
class GuessedTokens:
    """The time of decoding, how many tokens were guessed, and how many of these stood in the text."""

    seconds: float
    guessed: int
    right: int


def decode_guessing(engine: Engine, before: Sequence[int], tokens: Sequence[int]) -> GuessedTokens:
    """Read `tokens`, one a step and those beside it that are guessed. The engine has read `before` in slot 0.

    Raises RequestError if the artifact can check no guesses.
    """
    if engine.most_checked == 1:
        raise RequestError("this artifact can check no guesses: compile it with --draft-tokens, without a GPU")
    speculation, place, guessed_tokens, right_tokens = Speculation(engine.most_checked - 1), 0, 0, 0
    speculation.add([*before, tokens[0]])
    begin = time.perf_counter()
    while place < len(tokens):
        guessed = speculation.guess(len(tokens) - place - 1)
        start, first = time.perf_counter(), engine.position
        engine.read_each([tokens[place], *guessed])
        speculation.saw_step(1 + len(guessed), time.perf_counter() - start)
        following = tokens[place + 1 : place + 1 + len(guessed)]
        pairs = enumerate(zip(guessed, following, strict=True))
        right = next((number for number, (guess, token) in pairs if guess != token), len(guessed))
        engine.rewind(first + 1 + right)
        speculation.add(tokens[place + 1 : place + 2 + right])
        place, guessed_tokens, right_tokens = place + 1 + right, guessed_tokens + len(guessed), right_tokens + right
    return GuessedTokens(time.perf_counter() - begin, guessed_tokens, right_tokens)


def guessing_figures(rounds: Sequence[GuessedTokens], tokens: int) -> dict[str, Any]:
    """Return the figures of rounds that read so many tokens each, as `bench --json` has them."""
    speed = SpeedStatistics.of(tokens, [each.seconds for each in rounds])
    guessed, right = (sum(counts) / len(rounds) for counts in zip(*((r.guessed, r.right) for r in rounds), strict=True))
    return {**vars(speed), "guessed_share": guessed / tokens, "right_share": right / tokens}
