"""A model of sentencepiece (`tokenizer.model`, `spiece.model`): its pieces, and how a text is prepared for them.

Numbers of fields are those of google/sentencepiece's src/sentencepiece_model.proto.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.protobuf import MessageError, fields

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Gemma's has 4 MB and 262,144 pieces.
_MOST_BYTES, _MOST_PIECES = 64 << 20, 1 << 19
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """A model of sentencepiece.

    Attributes:
        pieces: the pieces; the id is the place.
        scores: the score of each.
        types: the type of each (`NORMAL` and others).
        kind: how a text is cut, `UNIGRAM` or `BPE`, or another number.
        ids: the ids of `unk`, `bos`, `eos` and `pad`, of those that it has.
        add_dummy_prefix: whether a space is put before a text.
        remove_extra_whitespaces: whether spaces at the ends, and rows of them, are dropped.
        byte_fallback: whether unknown letters become bytes.
        escape_whitespaces: whether a space is the letter U+2581 of pieces.
        whitespace_as_suffix: whether the space of a word stands behind it, and the one before a text behind the text.
        rewrites_answers: whether a table rewrites what is decoded.
        charsmap: the table of the normalizer, compiled; empty for none.
    """

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    kind: int
    ids: Mapping[str, int]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    byte_fallback: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool
    rewrites_answers: bool
    charsmap: bytes


def read_sentencepiece(file: Path) -> SentencePieceModel | None:
    """Return the model in a file; None where the file is something else, such as a vocabulary of tiktoken.

    Raises `UnsupportedModelError` for a model that cuts or prepares texts in a way that is not read here.
    """
    with file.open("rb") as opened:
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UnsupportedModelError(f"{file}: has more than {_MOST_BYTES >> 20} MiB, as no such file of a model has")
    try:
        model = _read(memoryview(data))
    except (MessageError, UnicodeDecodeError, struct.error, TypeError):
        return None
    if not model.pieces:
        return None
    if reason := _not_read(model):
        raise UnsupportedModelError(f"{file}: {reason}")
    return model


def _not_read(model: SentencePieceModel) -> str | None:
    """Return why texts cannot be cut or written as the model says, in the words of its fields; None where they can."""
    if model.kind not in (UNIGRAM, BPE):
        return "its pieces are words or letters, which no decoder has; BPE and unigram are read"
    if model.whitespace_as_suffix:
        return "treat_whitespace_as_suffix is set: spaces stand behind words, and only spaces before words are read"
    if not model.escape_whitespaces:
        return "escape_whitespaces is not set: pieces have spaces as they are, and only those with U+2581 are read"
    if model.rewrites_answers:
        return "denormalizer_spec has a table that rewrites decoded texts, which is not read"
    return None


def _read(data: memoryview) -> SentencePieceModel:
    pieces: list[tuple[str, float, int]] = []
    parts: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}, _DENORMALIZER: {}}
    for number, value in fields(data):
        if number == _PIECES:
            pieces.append(_piece(_message(value)))
        elif number in parts:
            parts[number] |= dict(fields(_message(value)))
        if len(pieces) > _MOST_PIECES:
            raise MessageError("more pieces than any vocabulary has")
    trainer, normalizer = parts[_TRAINER], parts[_NORMALIZER]
    ids = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
    numbers = {name: _signed(trainer.get(field, default)) for name, (field, default) in ids.items()}
    return SentencePieceModel(
        pieces=tuple(piece for piece, _, _ in pieces),
        scores=tuple(score for _, score, _ in pieces),
        types=tuple(kind for _, _, kind in pieces),
        kind=int(trainer.get(3, UNIGRAM)),
        ids={name: number for name, number in numbers.items() if 0 <= number < len(pieces)},
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        byte_fallback=bool(trainer.get(35, 0)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
        rewrites_answers=bool(parts[_DENORMALIZER].get(2)),
        charsmap=bytes(_message(normalizer.get(2, memoryview(b"")))),
    )


def _piece(message: memoryview) -> tuple[str, float, int]:
    found = dict(fields(message))
    text, score = bytes(_message(found[1])).decode(), found.get(2, memoryview(bytes(4)))
    return text, struct.unpack("<f", _message(score))[0], int(found.get(3, NORMAL))


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise MessageError("a number where a message is")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
