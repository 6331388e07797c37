"""JSON files of a checkpoint, which come from anywhere: read within bounds, and refused in one line."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.stand_ins import refuse_stand_in

# The largest config.json that is known, one with a label for each of 100,000 classes, has 5 MB.
MOST_CONFIG_BYTES = 16 << 20
_LONGEST_REASON = 300


def read_json_object(file: Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Read the JSON object in `file`.

    Raises `UnsupportedModelError` for what is no UTF-8, no JSON, no object, or longer than `most_bytes`, and for an
    object in which a key stands twice: readers differ in which of the two they take.
    """
    try:
        content = json.loads(read_text(file, most_bytes), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{file}: not readable as JSON: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file}: not a JSON object")
    return content


def read_text(file: Path, most_bytes: int) -> str:
    """Read UTF-8 text of at most `most_bytes`. Raises `UnsupportedModelError`."""
    try:
        with file.open("rb") as opened:
            data = opened.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise UnsupportedModelError(f"{file}: has more than {most_bytes >> 20} MiB, as no such file of a model has")
        refuse_stand_in(file, content=data)
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{file}: cannot be read: {_reason(error)}") from error


def token_ids(content: Mapping[str, Any], key: str, file: Path | str) -> tuple[int, ...]:
    """Return the token ids that `key` has in a JSON file: none, one, or a list of them.

    Raises `UnsupportedModelError` for anything but whole numbers from 0.
    """
    value = content.get(key)
    listed = value if isinstance(value, list) else () if value is None else (value,)
    if any(type(item) is not int or not 0 <= item < 2**31 for item in listed):
        raise UnsupportedModelError(
            f"{file}: {key} must be a token id or a list of them, whole numbers from 0, not {repr(value)[:60]}"
        )
    return tuple(listed)


def _reason(error: Exception) -> str:
    """Return the text of an error in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:_LONGEST_REASON]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {repeated[:60]!r} stands twice in an object")
    return found
