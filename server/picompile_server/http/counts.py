"""Costs of answers: the members `usage` and `timings` of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from picompile_server.http.progress import AnswerProgress


def usage(answers: Sequence[AnswerProgress], per_prompt: int) -> dict[str, Any]:
    """Return OpenAI's `usage` of a request.

    Args:
        answers: its answers, prompt by prompt.
        per_prompt: how many answers each prompt has. Its tokens count once; as cached if all of these found them so.
    """
    prompts = [answers[first : first + per_prompt] for first in range(0, len(answers), per_prompt)]
    prompt_tokens = sum(len(each[0].request.prompt) for each in prompts)
    generated = sum(answer.generated for answer in answers)
    cached = sum(min(answer.cached_tokens for answer in each) for each in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }


def timings(answers: Sequence[AnswerProgress]) -> dict[str, Any]:
    """Return llama.cpp's `timings`, over all `answers`, and the share of the neurons that fired.

    `prompt_n` counts the tokens that were read, `cache_n` those that were in the KV cache. A speed counts the tokens
    behind the first, over the time from the first to the last. What has not happened yet is 0.
    """
    cached = sum(answer.cached_tokens for answer in answers)
    read = sum(len(answer.request.prompt) for answer in answers) - cached
    generated = sum(answer.generated for answer in answers)
    begun = [answer for answer in answers if answer.generated]
    prompt_s = max((_prompt_s(answer) for answer in answers), default=0.0)
    decode_s = (
        max(answer.last_token_s for answer in begun) - min(answer.first_token_s for answer in begun) if begun else 0.0
    )
    later = generated - len(begun)
    shares = [(share, answer.generated) for answer in begun if (share := answer.fired_share) is not None]
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / read if read else 0.0,
        "prompt_per_second": read / prompt_s if prompt_s else 0.0,
        "predicted_n": generated,
        "predicted_ms": 1e3 * decode_s,
        "predicted_per_token_ms": 1e3 * decode_s / later if later else 0.0,
        "predicted_per_second": later / decode_s if decode_s else 0.0,
        "fired_share": _mean(shares),
    }


def _prompt_s(answer: AnswerProgress) -> float:
    """Return how long an answer's prompt took, from its admission to its first token."""
    if answer.times is not None:
        return answer.times.first_token_s - answer.times.admitted_s
    return answer.first_token_s - answer.asked_s if answer.generated else 0.0


def _mean(shares: Sequence[tuple[float, int]]) -> float | None:
    total = sum(weight for _, weight in shares)
    return round(sum(share * weight for share, weight in shares) / total, 6) if total else None
