"""Messages in protobuf's wire format, read without a description of their fields.

From protobuf.dev, "Encoding": a message is a row of fields; each has a number and one of four kinds of values.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class MessageError(Exception):
    """Bytes that are no message."""


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field of a message: a whole number, or bytes.

    Numbers of fixed size come as their bytes. Raises `MessageError` for bytes that are no message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise MessageError(f"a field of kind {kind}")
        if number == 0 or size > len(data) - at:
            raise MessageError("a field that ends behind the message")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a whole number of variable length, and the place behind it."""
    value = 0
    for place, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, at + place + 1
    raise MessageError("a number without an end")
