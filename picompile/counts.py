"""Whole numbers, as options and texts have them."""

import operator

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
