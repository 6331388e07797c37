"""Shares as people write them: `0.1%` or `0.001`."""

import math

from picompile.counts import shortened
from picompile.errors import UsageError


def parse_share(text: str, option: str, *, highest: float = 1.0) -> float:
    """The number that `text` means, from 0 to `highest`. Raises `UsageError` that names `option`."""
    number = text.strip()
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value <= highest:
        raise UsageError(
            f"{option}: {shortened(repr(text))} is no share from 0 to {highest:.0%}; write it as 0.1% or 0.001"
        )
    return value


def parse_gate(text: str, option: str = "--gate") -> float | None:
    """The bound on the relative change of perplexity, or None for `off`. Raises `UsageError`."""
    return None if text.strip().lower() == "off" else parse_share(text, option)
