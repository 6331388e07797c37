"""Decoding a text with drafts, as fast as the text allows."""

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
class DraftedTokens:
    """The time of decoding some tokens, how many were drafted, and how many of these stood in the text."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int


def decode_drafting(engine: Engine, before: Sequence[int], tokens: Sequence[int]) -> DraftedTokens:
    """Read `tokens`, one a step and those beside it that are drafted. The engine has read `before` in slot 0.

    Raises RequestError if the artifact can check no drafts.
    """
    if engine.most_checked == 1:
        raise RequestError("this artifact can check no drafts: compile it with --draft-tokens, without a GPU")
    speculation, place, draft_tokens, accepted_tokens = Speculation(engine.most_checked - 1), 0, 0, 0
    speculation.add([*before, tokens[0]])
    begin = time.perf_counter()
    while place < len(tokens):
        drafted = speculation.draft(len(tokens) - place - 1)
        start, first = time.perf_counter(), engine.position
        engine.read_each([tokens[place], *drafted])
        speculation.saw_step(1 + len(drafted), time.perf_counter() - start)
        following = tokens[place + 1 : place + 1 + len(drafted)]
        pairs = enumerate(zip(drafted, following, strict=True))
        accepted = next((number for number, (draft, token) in pairs if draft != token), len(drafted))
        engine.rewind(first + 1 + accepted)
        speculation.add(tokens[place + 1 : place + 2 + accepted])
        place, draft_tokens, accepted_tokens = (
            place + 1 + accepted,
            draft_tokens + len(drafted),
            accepted_tokens + accepted,
        )
    return DraftedTokens(time.perf_counter() - begin, len(tokens), draft_tokens, accepted_tokens)


def draft_figures(rounds: Sequence[DraftedTokens]) -> dict[str, Any]:
    """Return the figures of rounds that read as many tokens each, as `bench --json` has them."""
    tokens = rounds[0].tokens
    speed = SpeedStatistics.of(tokens, [each.seconds for each in rounds])
    drafted, accepted = (sum(getattr(each, what) for each in rounds) for what in ("drafted", "accepted"))
    read = tokens * len(rounds)
    return {**vars(speed), "draft_share": drafted / read, "accepted_share": accepted / read}
