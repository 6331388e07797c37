"""Names that people spell in other ways: in capitals, with spaces, or nearly right."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_SEPARATORS = re.compile(r"[\s_-]+")
_MOST_NEAR = 3


def squashed(text: str) -> str:
    """Return a name in small letters without spaces, hyphens and underscores, for comparing it with others."""
    return _SEPARATORS.sub("", text.lower())


def find_name(text: str, names: Iterable[str]) -> str | None:
    """Return the name that `text` spells, in any case and however it is separated; None if none or several match."""
    wanted, found = squashed(text), [*names]
    if text in found:
        return text
    matching = [name for name in found if squashed(name) == wanted]
    return matching[0] if len(matching) == 1 else None


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return a question that names what is spelled nearly like `text`, as `did you mean a or b?`; '' if nothing is."""
    by_squashed = {squashed(name): name for name in names}
    near = [by_squashed[each] for each in get_close_matches(squashed(text), by_squashed, _MOST_NEAR)]
    return f"did you mean {' or '.join(near)}?" if near else ""
