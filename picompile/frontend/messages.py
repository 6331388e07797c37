"""Parts of messages: what a stranger's file says, and what a library says of it, as it can be printed in one line."""

from collections.abc import Sequence


def one_line(error: Exception) -> str:
    """Return the text of an error in one line of bounded length, and its name where the text alone says too little."""
    named = isinstance(error, LookupError | ArithmeticError | TypeError | AttributeError)
    return " ".join(f"{type(error).__name__ + ': ' if named else ''}{error}".split())[:300]


def shown(text: str | bytes) -> str:
    """Return a name out of a file as it can be printed: no control characters, not too long."""
    name = text.decode("latin-1") if isinstance(text, bytes) else text
    return name if name.isascii() and name.isprintable() and 0 < len(name) <= 64 else ascii(name[:64])


def printable(text: str) -> str:
    """Return a text with escapes for what cannot be printed."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shown_text(text: str) -> str:
    """Return a text for a message, in quotes and cut off where it is long."""
    return repr(text if len(text) <= 40 else text[:39] + "…")


def shown_ids(ids: Sequence[int]) -> str:
    """Return token ids for a message, the first ones of many."""
    return f"[{', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''}]"
