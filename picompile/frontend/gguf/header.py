"""The header of a GGUF file, read without trusting it and without the `gguf` package.

What is accepted here is as small as what llama.cpp's and PowerInfer's own writers make: tensors lie one after the other
in the order of their entries, up to the end of the file. So a forged size, count or offset contradicts another number,
and is found.
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from picompile.errors import UsageError
from picompile.frontend.gguf.cursor import Cursor, HeaderError
from picompile.frontend.gguf.tensor_types import (
    ARRAY,
    FLOAT32,
    MAGICS,
    POWERINFER_MAGIC,
    POWERINFER_TYPES,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    UINT32,
    unread_type,
)
from picompile.frontend.messages import shown
from picompile.frontend.stand_ins import refuse_stand_in

VERSIONS = (2, 3)

# A 70-billion-parameter model has 1,000 tensors, 30 values, and three arrays with an element for each token.
_MOST_TENSORS = _MOST_VALUES = 65_536
MOST_ELEMENTS = 1_000_000
_LONGEST_KEY, _LONGEST_NAME = 256, 64
_MOST_DIMENSIONS = 4
_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 65_536

_ALIGNMENT_KEY = "general.alignment"
_TYPED_KEYS = {_ALIGNMENT_KEY: UINT32, "powerinfer.sparse_threshold": FLOAT32}

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `shape` as numpy has it, slowest dimension first; `offset` counts from the start of `file`."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    file: Path = field(compare=False)


@dataclass(frozen=True)
class ArrayPlace:
    """An array of the metadata: the number of its elements' type, how many there are, and where the first one is."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a GGUF file.

    `values` has the single numbers; `texts` has the places of the strings, and `arrays` those of the arrays.
    `metadata.py` reads what lies at these places.
    """

    file: Path
    magic: bytes
    values: dict[str, float]
    tensors: dict[str, TensorEntry]
    texts: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, ArrayPlace] = field(default_factory=dict)


def read_header(file: Path, most_elements: int = MOST_ELEMENTS) -> GgufHeader:
    """Return the header of `file`, whose arrays may have `most_elements` elements together.

    Raises `UsageError`, in one line, for what is no GGUF file, is cut, or contradicts itself.
    """
    return at_file(file, lambda cursor: _read(file, cursor, most_elements))


def at_file(file: Path, read: Callable[[Cursor], _Result]) -> _Result:
    """Return what `read` makes of a cursor at the start of `file`. Raises `UsageError` where that cannot be read."""
    if not file.is_file():  # opening a pipe would wait for a writer
        raise UsageError(f"{file}: not a file")
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            if size < 24:
                raise HeaderError(f"{size} bytes are no GGUF file")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return read(Cursor(data))
    except HeaderError as error:
        refuse_stand_in(file, UsageError)
        raise UsageError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read(file: Path, cursor: Cursor, most_elements: int) -> GgufHeader:
    magic = cursor.take(4, "the magic")
    if magic not in MAGICS:
        raise HeaderError(f"not a GGUF file: it starts with {shown(magic)}, not with PWRI or GGUF")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
        raise HeaderError("a big-endian file; convert it anew" if turned else f"version {version}; 2 and 3 are read")
    tensor_count, value_count = cursor.number("Q", "the tensor count"), cursor.number("Q", "the value count")
    # The shortest entries there can be: an empty name and one dimension, an empty key and one byte.
    cursor.check_count(tensor_count, 32, _MOST_TENSORS, "tensors")
    cursor.check_count(value_count, 13, _MOST_VALUES, "metadata values")
    values = _Values(most_elements)
    for _ in range(value_count):
        values.read(cursor)
    types = POWERINFER_TYPES if magic == POWERINFER_MAGIC else TENSOR_TYPES
    tensors = _read_tensors(file, cursor, tensor_count, types, _alignment(values.numbers))
    return GgufHeader(
        file,
        magic,
        values=values.numbers,
        tensors=tensors,
        texts=values.texts,
        arrays=values.arrays,
    )


class _Values:
    """The metadata read so far."""

    def __init__(self, most_elements: int) -> None:
        self.numbers: dict[str, float] = {}
        self.texts: dict[str, int] = {}
        self.arrays: dict[str, ArrayPlace] = {}
        self._elements = 0
        self._most_elements = most_elements

    def read(self, cursor: Cursor) -> None:
        """Read the next key and its value, or the place of it."""
        key = cursor.text(_LONGEST_KEY, "a key")
        if key in self.numbers or key in self.texts or key in self.arrays:
            raise HeaderError(f"the key {shown(key)} is there twice")
        kind = cursor.number("I", f"the type of {shown(key)}")
        if _TYPED_KEYS.get(key, kind) != kind:
            raise HeaderError(f"{key} is of type {kind}, not {_TYPED_KEYS[key]}")
        if kind in SCALARS:
            self.numbers[key] = cursor.number(SCALARS[kind], shown(key))
        elif kind == STRING:
            self.texts[key] = cursor.at
            cursor.skip_texts(1, shown(key))
        elif kind == ARRAY:
            self.arrays[key] = _skip_array(cursor, shown(key), self._most_elements - self._elements)
            self._elements += self.arrays[key].count
        else:
            raise HeaderError(f"{shown(key)} is of type {kind}, which there is not")


def _skip_array(cursor: Cursor, what: str, most: int) -> ArrayPlace:
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    if kind not in SCALARS and kind != STRING:
        raise HeaderError(f"{what} is an array of type {kind}; only numbers and strings are read")
    element_bytes = 8 if kind == STRING else cursor.size_of(SCALARS[kind])
    cursor.check_count(count, element_bytes, most, f"elements in {what}")
    place = ArrayPlace(kind, count, cursor.at)
    if kind == STRING:
        cursor.skip_texts(count, what)
    else:
        cursor.skip(count * element_bytes, what)
    return place


def _alignment(values: dict[str, float]) -> int:
    alignment = int(values.get(_ALIGNMENT_KEY, _ALIGNMENT))
    if not 8 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise HeaderError(f"{_ALIGNMENT_KEY} is {alignment}, not a power of two from 8 to {_LARGEST_ALIGNMENT}")
    return alignment


def _read_tensors(
    file: Path, cursor: Cursor, count: int, types: dict[int, tuple[str, int, int]], alignment: int
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    end = 0
    for _ in range(count):
        entry = _read_tensor(file, cursor, types)
        if entry.name in entries:
            raise HeaderError(f"the tensor {shown(entry.name)} is there twice")
        if entry.offset != _padded(end, alignment):
            raise HeaderError(
                f"{shown(entry.name)} lies at {entry.offset}; after the tensor before it is {_padded(end, alignment)}"
            )
        end = entry.offset + entry.size_bytes
        entries[entry.name] = entry
    start = _padded(cursor.at, alignment)
    _check_end(cursor.size, start + end, alignment)
    return {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}


def _read_tensor(file: Path, cursor: Cursor, types: dict[int, tuple[str, int, int]]) -> TensorEntry:
    """One entry, its offset still counted from the start of the data."""
    name = cursor.text(_LONGEST_NAME, "a tensor's name")
    dimensions = cursor.number("I", shown(name))
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise HeaderError(f"{shown(name)} has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are read")
    sizes = tuple(int(cursor.number("Q", shown(name))) for _ in range(dimensions))
    kind, offset = cursor.number("I", shown(name)), cursor.number("Q", shown(name))
    if kind not in types:
        raise HeaderError(f"{shown(name)} is of tensor {unread_type(kind)}")
    type_name, block, block_bytes = types[kind]
    elements = 1
    for size in sizes:
        elements *= size
    if elements == 0 or sizes[0] % block:
        raise HeaderError(f"{shown(name)} has dimensions {list(sizes)}, which {type_name} cannot have")
    return TensorEntry(
        name, type=type_name, shape=sizes[::-1], offset=offset, size_bytes=elements // block * block_bytes, file=file
    )


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _check_end(size: int, end: int, alignment: int) -> None:
    if end > size:
        raise HeaderError(f"cut: its tensors need {end:,} bytes, and it has {size:,}")
    if size > _padded(end, alignment):
        raise HeaderError(f"{size - end:,} bytes follow after its last tensor")
