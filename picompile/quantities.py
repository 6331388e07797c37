"""Numbers in options: whole numbers, shares, sizes and bandwidths. Also a text of several numbers."""

import math
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from picompile.errors import UsageError

# The largest float32, in which activations are computed and thresholds compared.
LARGEST_FLOAT32 = 3.4028234663852886e38
# No count has more digits, and Python reads no number of more than 4,300.
_MOST_DIGITS = 18


def require_whole(**values: object) -> None:
    """Raise `UsageError` for the first value that is neither None nor a whole number."""
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
    """Return the number that the digits of `text` write; None if it has other characters, or too many digits."""
    digits = text.isascii() and text.isdigit() and len(text.lstrip("0")) <= _MOST_DIGITS
    return int(text[-_MOST_DIGITS:]) if digits else None


def parse_least_one(text: str, option: str) -> int:
    """Return the number from 1 on that `text` writes. Raise `UsageError`."""
    if not (number := parse_count(text.strip())):
        raise UsageError(f"{option}: {shortened(repr(text))} is no whole number from 1 on")
    return number


def shortened(text: str, most: int = 40) -> str:
    """Return the text, or its beginning and an ellipsis, so that an error message stays readable."""
    return text if len(text) <= most else f"{text[:most]}…"


def parse_share(text: str, option: str) -> float:
    """Return the share from 0 to 1 that `text` writes, as `0.1%` or `0.001`. Raise `UsageError`."""
    number = text.strip()
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UsageError(f"{option}: {shortened(repr(text))} is no share from 0 to 100%; write it as 0.1% or 0.001")
    return value


def parse_accuracy_bound(text: str, option: str) -> float | None:
    """Return the bound on the relative rise of perplexity, or None for `off`. Raise `UsageError`."""
    return None if text.strip().lower() == "off" else parse_share(text, option)


def parse_checked_bound(text: str, option: str) -> float | None:
    """Return the bound as `parse_accuracy_bound` does, and infinity for `report`. Raise `UsageError`."""
    return math.inf if text.strip().lower() == "report" else parse_accuracy_bound(text, option)


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = r"(?P<number>\d+(?:\.\d*)?|\.\d+)"
_SIZE = re.compile(_NUMBER + r"\s*(?:(?P<prefix>[kmgtp]?)(?P<binary>i?)(?P<bytes>b?))", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(_NUMBER + r"\s*%", re.ASCII)
# A capital B: 100 Gb/s are bits.
_BANDWIDTH = re.compile(_NUMBER + r"\s*(?:(?P<prefix>[kKmMgGtT]?)(?P<binary>i?)B/s)?", re.ASCII)

# Longer texts are not sizes, and no machine has more bytes of memory.
_LONGEST = 40
_MOST_BYTES = 2**60
# A budget below it holds no model: whoever writes a smaller number without a unit means GiB, or MiB from 1024 on.
_LEAST_PLAIN_BYTES = 2**20


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes that `text` means, rounded down: `8GB` is 8·10⁹, `8GiB` and `8G` are 8·2³⁰, as in GNU's tools.

    Raises:
        UsageError: `text` is not a size, or a number so small that its unit was forgotten; the message names `option`.
    """
    match = _match(_SIZE, text)
    # `i` without a prefix, as in `8i` and `8iB`, is not a unit.
    if match is None or (match["binary"] and not match["prefix"]):
        raise UsageError(f"{option}: {_quoted(text)} is no size; write it as 8GiB, 8GB, 512MiB or in bytes")
    value = _scaled(match, binary=not match["bytes"] or bool(match["binary"]))
    _check_bound(value, text, option)
    if not match["prefix"] and not match["bytes"] and 0 < value < _LEAST_PLAIN_BYTES:
        meant = f"{text.strip()}{'GiB' if value < 1024 else 'MiB'}"
        raise UsageError(f"{option} {text.strip()} is {_counted_bytes(int(value))}; did you mean {meant}?")
    return int(value)


def _counted_bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


def parse_budget(text: str, available_bytes: int | None, option: str) -> int:
    """Return the bytes that `text` means: a size, a share of `available_bytes` like `80%`, or `auto` for all of them.

    `available_bytes` is None if it is unknown; then only a size is accepted. A size may exceed what is available:
    the caller decides whether that is allowed.

    Raises:
        UsageError: `text` is not a budget; the message names `option`.
    """
    share = Fraction(1) if text.strip().lower() == "auto" else _share(text, option)
    if share is None:
        return parse_bytes(text, option)
    if available_bytes is None:
        raise UsageError(f"{option}: how much there is is not known, so {_quoted(text)} says nothing; give a size")
    return int(share * available_bytes)


def _share(text: str, option: str) -> Fraction | None:
    """Return the share from 0 to 1 that `text` writes; None if it is written as a size."""
    if not text.strip().endswith("%"):
        return None
    match = _match(_SHARE, text)
    if match is None or (value := Fraction(match["number"].rstrip(".")) / 100) > 1:
        raise UsageError(f"{option}: {_quoted(text)} is no share from 0% to 100%")
    return value


def parse_bandwidth(text: str, option: str) -> float:
    """Return bytes per second from `67.2GB/s`, `62.6GiB/s`, or a plain number of GB/s. Raise `UsageError`."""
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


def counted_matrices(formats: Mapping[str, int]) -> str:
    """Return numbers of matrices by their format as a text, the most first."""
    most_first = Counter(formats).most_common()
    return ", ".join(f"{count} {'matrix' if count == 1 else 'matrices'} in {name}" for name, count in most_first)


def format_bytes(count: float) -> str:
    """Return bytes with three digits and a decimal unit, as disks and bandwidths are sold: `3.21 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
