"""A kept structure, and its bytes: a JSON object, and the files and numbers that it names behind it."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Structure:
    """An artifact without weights and tokenizer, and how its weights are made.

    Attributes:
        manifest: the contents of manifest.json without its records of files and its own hash.
        eos_token_ids: the tokens that end an answer by the model's config; the tokenizer adds its own.
        vocabulary: the number of tokens that the model has rows for.
        said: lines that the user was told about the structure.
        files: the artifact's other files by name.
        constants: the constants that packed tensors are made of (see `constants`).
        tensors: the packed tensors in their order: name, dtype, shape and layout.
        numbers: the bytes of those packed tensors that depend on no weights, by name.
        places: how each parameter is made of tensors of the file, by name (`GgufTensor.to_record`).
        orders: orders of rows.
    """

    manifest: Mapping[str, Any]
    eos_token_ids: list[int]
    vocabulary: int
    said: list[str]
    files: Mapping[str, bytes]
    constants: list[list[Any]]
    tensors: list[list[Any]]
    numbers: Mapping[str, bytes]
    places: Mapping[str, list[Any]]
    orders: list[list[int]]

    def to_bytes(self) -> bytes:
        """Return the structure as `read_structure` reads it."""
        content = dict(vars(self))
        blobs = [*self.files.values(), *self.numbers.values()]
        for name in ("files", "numbers"):
            content[name] = {key: len(blob) for key, blob in content[name].items()}
        head = json.dumps(content).encode()
        return b"".join((_LENGTH.pack(len(head)), head, *blobs))


def read_structure(data: bytes) -> Structure:
    """Return the structure that `to_bytes` wrote. Raises `ValueError` for other bytes."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        content = json.loads(data[_LENGTH.size : at])
        for name in ("files", "numbers"):
            blobs = {}
            for key, size in content[name].items():
                blobs[key] = data[at : at + size]
                at += size
            content[name] = blobs
        if at != len(data):
            raise ValueError(f"{len(data)} bytes, not {at}")
        return Structure(**content)
    except (struct.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no structure: {error}") from error
