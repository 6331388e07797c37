"""The statistics of a scheduler: its work so far, and the requests that wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from picompile_server.request import FinishReason


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of a scheduler. Counts and seconds are those since it was made.

    Attributes:
        finished: how many answers have ended, by the reason.
        prompt_tokens: tokens of the prompts that were read, cached ones included.
        cached_tokens: how many of them were in the cache already.
        generated_tokens: tokens that were chosen.
        reread_tokens: tokens of answers that were read again as prompts, for later requests.
        prompt_steps: chunks of prompts that were read.
        decode_steps: steps that read one token each of the answers that were being generated, and drafts.
        decoded_tokens: tokens that these steps have read.
        drafted_tokens: tokens of drafts that these steps have checked beside those.
        accepted_tokens: how many of them were chosen.
        prompt_s: time that the engine took for prompts.
        decode_s: time that it took for decode steps.
        waiting: requests that wait.
        reading: prompts that are being read, 0 or 1.
        decoding: answers that are being generated.
        held_tokens: tokens in the KV cache, those of ended answers included.
        reserved_tokens: tokens that running answers may come to hold.
        capacity_tokens: tokens that the KV cache has room for.
        fired_share: share of the neurons that fired in the latest decode steps, from 0 to 1; None if not known.
    """

    finished: Mapping[FinishReason, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    reread_tokens: int
    prompt_steps: int
    decode_steps: int
    decoded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    prompt_s: float
    decode_s: float
    waiting: int
    reading: int
    decoding: int
    held_tokens: int
    reserved_tokens: int
    capacity_tokens: int
    fired_share: float | None


@dataclass
class Counters:
    """The counts and seconds of `SchedulerStats`, which go up."""

    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reread_tokens: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
