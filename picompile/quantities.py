"""Whole numbers, as options and texts have them."""

import math
import operator
import re
from fractions import Fraction

from picompile.errors import UsageError

# More digits have no count, and Python reads no number of more than 4,300.
_MOST_DIGITS = 18


def require_whole(**values: object) -> None:
    """Raises `UsageError` for what is given and no whole number; None is not given."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            whole = False
        else:
            whole = not isinstance(value, bool)
        if not whole:
            raise UsageError(f"{name.replace('_', ' ')} must be a whole number, not {shortened(repr(value))}")


def parse_count(text: str) -> int | None:
    """The number from 0 on that the digits of `text` are; None where they are none, or too many."""
    digits = text.isascii() and text.isdigit() and len(text.lstrip("0")) <= _MOST_DIGITS
    return int(text[-_MOST_DIGITS:]) if digits else None


def shortened(text: str, most: int = 40) -> str:
    """The text, or its beginning: a line of error is to be read."""
    return text if len(text) <= most else f"{text[:most]}…"


# Shares as people write them: `0.1%` or `0.001`.


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


def parse_accuracy_bound(text: str, option: str = "--gate") -> float | None:
    """The bound on the relative change of perplexity, or None for `off`. Raises `UsageError`."""
    return None if text.strip().lower() == "off" else parse_share(text, option)


# Sizes and bandwidths as people write them: `8GiB`, `80%`, `67.2GB/s`.


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = r"(?P<number>\d+(?:\.\d*)?|\.\d+)"
_SIZE = re.compile(_NUMBER + r"\s*(?:(?P<prefix>[kmgtp]?)(?P<binary>i?)(?P<bytes>b?))", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(_NUMBER + r"\s*%", re.ASCII)
# A capital B: 100 Gb/s are bits.
_BANDWIDTH = re.compile(_NUMBER + r"\s*(?:(?P<prefix>[kKmMgGtT]?)(?P<binary>i?)B/s)?", re.ASCII)

# Longer texts are no sizes, and whole numbers beyond this no memory.
_LONGEST = 40
_MOST_BYTES = 2**60


def parse_bytes(text: str, option: str) -> int:
    """The bytes that `text` means, rounded down: `8GB` is 8·10⁹, `8GiB` and `8G` are 8·2³⁰, as GNU's tools have it.

    Raises `UsageError` that names `option`.
    """
    match = _match(_SIZE, text)
    # `8i` and `8iB` are no units.
    if match is None or (match["binary"] and not match["prefix"]):
        raise UsageError(f"{option}: {_quoted(text)} is no size; write it as 8GiB, 8GB, 512MiB or in bytes")
    value = _scaled(match, binary=not match["bytes"] or bool(match["binary"]))
    _check_bound(value, text, option)
    return int(value)


def parse_budget(text: str, available_bytes: int | None, option: str) -> int:
    """The bytes that `text` means: a size, a share of `available_bytes` like `80%`, or `auto` for all of them.

    `available_bytes` is None where nobody knows; only a size will do then. A size may be more than what is available:
    whether that is allowed is for the caller to say. Raises `UsageError` that names `option`.
    """
    share = Fraction(1) if text.strip().lower() == "auto" else _share(text, option)
    if share is None:
        return parse_bytes(text, option)
    if available_bytes is None:
        raise UsageError(f"{option}: how much there is is not known, so {_quoted(text)} says nothing; give a size")
    return int(share * available_bytes)


def _share(text: str, option: str) -> Fraction | None:
    """The share that `text` is, from 0 to 1; None for what is written as a size."""
    if not text.strip().endswith("%"):
        return None
    match = _match(_SHARE, text)
    if match is None or (value := Fraction(match["number"].rstrip(".")) / 100) > 1:
        raise UsageError(f"{option}: {_quoted(text)} is no share from 0% to 100%")
    return value


def parse_bandwidth(text: str, option: str) -> float:
    """Bytes per second: `67.2GB/s`, `62.6GiB/s`, or a plain number of GB/s. Raises `UsageError` that names `option`."""
    match = _match(_BANDWIDTH, text)
    if match is None or (match["binary"] and not match["prefix"]):
        raise UsageError(f"{option}: {_quoted(text)} is no bandwidth; write it as 67.2GB/s or 67.2")
    plain = match["prefix"] is None
    value = Fraction(match["number"].rstrip(".")) * 10**9 if plain else _scaled(match, binary=bool(match["binary"]))
    if value == 0:
        raise UsageError(f"{option}: a bandwidth must be more than 0, not {_quoted(text)}")
    _check_bound(value, text, option)
    return float(value)


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return pattern.fullmatch(text.strip()) if len(text) <= _LONGEST else None


def _scaled(match: re.Match[str], *, binary: bool) -> Fraction:
    unit: int = (1024 if binary else 1000) ** _POWERS[match["prefix"].lower()]
    return Fraction(match["number"].rstrip(".")) * unit


def _check_bound(value: Fraction, text: str, option: str) -> None:
    if value > _MOST_BYTES:
        raise UsageError(f"{option}: {_quoted(text)} is more than any machine has")


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")
