"""Values and patterns of JSON schemas that llguidance would silently change: rejected here, or rewritten.

1. It reads numbers as floats of 64 bits, so that integers beyond 2^53 become other ones.
2. It leaves control characters out of a constant text if they cannot be written, which they cannot without `\\u`.
3. If a class of a pattern has all control characters, it allows every escape, `\\"` and `\\\\` included, whether the
   class has them or not.
"""

from __future__ import annotations

import re
from typing import Any

from picompile_runtime.errors import RequestError

_LARGEST = 2**53
_TOO_LARGE = "integers beyond 2^53 are not supported"
_MOST_COUNT = 2**31 - 1
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
# Those that have an escape of their own can be written.
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
# How a pattern can name a control character.
_CONTROL = re.compile(r"\\(?:x[01]|u00[01]|u\{0*1?[0-9a-fA-F]\}|0|c)|[\x00-\x1f]")


def check_value(value: Any) -> None:
    """Raise RequestError if a value of `const` or `enum` could not be written as it is."""
    if isinstance(value, str) and (found := _UNWRITABLE.search(value)) is not None:
        raise _unusable(f"the control character U+{ord(found[0]):04X} is not supported in const and enum")
    if isinstance(value, list):
        for each in value:
            check_value(each)
    if isinstance(value, dict):
        for name, each in value.items():
            check_value(name)
            check_value(each)
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise _unusable(f"{_TOO_LARGE}; let them be texts, as other APIs do with ids")


def check_keyword(name: str, value: Any) -> None:
    """Raise RequestError if a keyword has a number that would become another one."""
    if name in _NUMBERS and isinstance(value, int | float) and abs(value) > _LARGEST:
        raise _unusable(_TOO_LARGE)
    if name in _COUNTS and isinstance(value, int | float) and value > _MOST_COUNT:
        raise _unusable(f"{name} may be {_MOST_COUNT} at most")


def safe_pattern(pattern: str) -> str:
    """Return a pattern whose classes do not have all control characters: one that cannot be written is left out."""
    parts, place = [], 0
    while place < len(pattern):
        is_class = pattern[place] == "["
        end = _end_of_class(pattern, place) if is_class else place + 1 + (pattern[place] == "\\")
        part = pattern[place:end]
        parts.append(_safe_class(part) if is_class else part)
        place = end
    return "".join(parts)


def _end_of_class(pattern: str, start: int) -> int:
    """Return where the class ends that begins at `start`, those in it included."""
    place, depth = start, 0
    while place < len(pattern):
        letter = pattern[place]
        depth += (letter == "[") - (letter == "]")
        place += 1 + (letter == "\\")
        if not depth:
            return place
    return len(pattern)


def _safe_class(text: str) -> str:
    if text in ("[]", "[^]") or not text.endswith("]"):
        return text
    if text.startswith("[^"):
        return rf"{text[:-1]}\x01]"
    return rf"[{text}&&[^\x01]]" if _CONTROL.search(text) else text


def _unusable(why: str) -> RequestError:
    return RequestError(f"the JSON schema cannot be used: {why}")
