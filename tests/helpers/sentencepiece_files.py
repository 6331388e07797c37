"""Models of sentencepiece, written without its package: messages of protobuf with the fields that decide something."""

import struct
from collections.abc import Sequence
from pathlib import Path

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Pieces = Sequence[tuple[str, float, int]]

# Byte tokens, and pieces that merge into `▁hello`, better ones first.
WORDS: Pieces = (
    *(("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<turn>", 0.0, USER_DEFINED)),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((piece, -float(rank), NORMAL) for rank, piece in enumerate(("▁h", "el", "▁hel", "lo", "▁hello", "▁▁"))),
    *((letter, -100.0 - rank, NORMAL) for rank, letter in enumerate("▁helowrd1.")),
)


def field(number: int, value: int | bytes) -> bytes:
    """Return a field of a message: a whole number, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def save_model(file: Path, pieces: Pieces = WORDS, kind: int = BPE, prefix: bool = True, extra: bool = False) -> None:
    """Write a model: `prefix` puts a space before texts, `extra` removes rows of spaces."""
    message = b"".join(
        field(1, field(1, name.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + field(3, type_))
        for name, score, type_ in pieces
    )
    trainer = field(3, kind) + field(35, 1) + field(43, (1 << 64) - 1)
    file.write_bytes(message + field(2, trainer) + field(3, field(3, int(prefix)) + field(4, int(extra))))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))
