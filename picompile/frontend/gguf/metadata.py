"""Strings and arrays of a GGUF file's metadata, from the places that its header has for them, within bounds."""

import struct
from typing import Any

from picompile.frontend.gguf.cursor import Cursor, HeaderError
from picompile.frontend.gguf.header import ArrayPlace, GgufHeader, at_file
from picompile.frontend.gguf.tensor_types import FLOAT32, FLOAT64, SCALARS, STRING
from picompile.frontend.messages import shown

# The longest chat templates have 20 kB.
_LONGEST_TEXT_BYTES = 4 << 20
# Tokens and merges: the longest token that is known, of spaces, has 1 kB, and all tokens of Gemma have 3 MB.
_LONGEST_ELEMENT_BYTES = 8 << 10
_MOST_ARRAY_BYTES = 64 << 20


def read_text(header: GgufHeader, key: str) -> str | None:
    """Return the string of `key`, None where there is none. Raises `UsageError` for one that is too long, or no UTF-8.

    A file that has changed since its header was read is refused, or read as another string; it is not read past its
    end.
    """
    if key not in header.texts:
        return None

    def read(cursor: Cursor) -> str:
        cursor.skip(header.texts[key], shown(key))
        return cursor.text(_LONGEST_TEXT_BYTES, shown(key))

    return at_file(header.file, read)


def read_array(header: GgufHeader, key: str) -> list[Any] | None:
    """Return the elements of `key`, numbers or strings, None where it is no array. Raises as `read_text` does."""
    place = header.arrays.get(key)
    if place is None:
        return None
    what = shown(key)
    return at_file(header.file, lambda cursor: _elements(cursor, place, what))


def _elements(cursor: Cursor, place: ArrayPlace, what: str) -> list[Any]:
    cursor.skip(place.offset, what)
    if place.kind != STRING:
        letter = SCALARS[place.kind]
        data = cursor.take(place.count * cursor.size_of(letter), what)
        return list(struct.unpack(f"<{place.count}{letter}", data))
    start = cursor.at
    texts = []
    for _ in range(place.count):
        texts.append(cursor.text(_LONGEST_ELEMENT_BYTES, f"an element of {what}"))
        if cursor.at - start > _MOST_ARRAY_BYTES:
            raise HeaderError(f"{what} has more than {_MOST_ARRAY_BYTES >> 20} MiB")
    return texts


def is_array_of(header: GgufHeader, key: str, kind: type) -> bool:
    """Return whether `key` is an array whose elements are strings (`str`), floats, or whole numbers (`int`)."""
    place = header.arrays.get(key)
    if place is None:
        return False
    found = str if place.kind == STRING else float if place.kind in (FLOAT32, FLOAT64) else int
    return found is kind
