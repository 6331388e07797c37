"""The header of a GGUF file, read without trusting it and without the `gguf` package.

What is accepted here is as small as what PowerInfer's own writers make: tensors lie one after the other in the order of
their entries, up to the end of the file. So a forged size, count or offset contradicts another number, and is found.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path

from picompile.errors import UsageError
from picompile.importing.cursor import Cursor, HeaderError, shown
from picompile.importing.gguf_types import (
    ARRAY,
    FLOAT32,
    POWERINFER_TYPES,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    UINT32,
)

GGUF_MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
VERSIONS = (2, 3)

# A 70-billion-parameter model has 1,000 tensors, 30 values, and three arrays with an element for each token.
_MOST_TENSORS = _MOST_VALUES = 65_536
_MOST_ELEMENTS = 1_000_000
_LONGEST_KEY, _LONGEST_NAME = 256, 64
_MOST_DIMENSIONS = 4
_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 65_536

_ALIGNMENT_KEY = "general.alignment"
_TYPED_KEYS = {_ALIGNMENT_KEY: UINT32, "powerinfer.sparse_threshold": FLOAT32}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `shape` as numpy has it, slowest dimension first; `offset` counts from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself. `values` has the single numbers and no arrays; `elements` counts those of arrays."""

    file: Path
    magic: bytes
    values: dict[str, float]
    tensors: dict[str, TensorEntry]
    elements: int


def read_header(file: Path) -> GgufHeader:
    """The header of `file`.

    Raises `UsageError`, in one line, for what is no GGUF file, is cut, or contradicts itself.
    """
    if not file.is_file():  # opening a pipe would wait for a writer
        raise UsageError(f"{file}: not a file")
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            if size < 24:
                raise HeaderError(f"{size} bytes are no GGUF file")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(file, Cursor(data))
    except HeaderError as error:
        raise UsageError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read(file: Path, cursor: Cursor) -> GgufHeader:
    magic = cursor.take(4, "the magic")
    if magic not in (GGUF_MAGIC, POWERINFER_MAGIC):
        raise HeaderError(f"not a GGUF file: it starts with {shown(magic)}, not with PWRI or GGUF")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
        raise HeaderError("a big-endian file; convert it anew" if turned else f"version {version}; 2 and 3 are read")
    tensor_count, value_count = cursor.number("Q", "the tensor count"), cursor.number("Q", "the value count")
    # The shortest entries there can be: an empty name and one dimension, an empty key and one byte.
    cursor.check_count(tensor_count, 32, _MOST_TENSORS, "tensors")
    cursor.check_count(value_count, 13, _MOST_VALUES, "metadata values")
    values, elements = _read_values(cursor, value_count)
    types = POWERINFER_TYPES if magic == POWERINFER_MAGIC else TENSOR_TYPES
    tensors = _read_tensors(cursor, tensor_count, types, _alignment(values))
    return GgufHeader(file, magic, values, tensors, elements)


def _read_values(cursor: Cursor, count: int) -> tuple[dict[str, float], int]:
    """The numbers among the metadata, and how many elements its arrays have together."""
    values: dict[str, float] = {}
    keys: set[str] = set()
    elements = 0
    for _ in range(count):
        key = cursor.text(_LONGEST_KEY, "a key")
        if key in keys:
            raise HeaderError(f"the key {shown(key)} is there twice")
        keys.add(key)
        kind = cursor.number("I", f"the type of {shown(key)}")
        if _TYPED_KEYS.get(key, kind) != kind:
            raise HeaderError(f"{key} is of type {kind}, not {_TYPED_KEYS[key]}")
        if kind in SCALARS:
            values[key] = cursor.number(SCALARS[kind], shown(key))
        elif kind == STRING:
            cursor.skip_texts(1, shown(key))
        elif kind == ARRAY:
            elements += _skip_array(cursor, shown(key), _MOST_ELEMENTS - elements)
        else:
            raise HeaderError(f"{shown(key)} is of type {kind}, which there is not")
    return values, elements


def _skip_array(cursor: Cursor, what: str, most: int) -> int:
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    if kind not in SCALARS and kind != STRING:
        raise HeaderError(f"{what} is an array of type {kind}; only numbers and strings are read")
    element_bytes = 8 if kind == STRING else cursor.size_of(SCALARS[kind])
    cursor.check_count(count, element_bytes, most, f"elements in {what}")
    if kind == STRING:
        cursor.skip_texts(count, what)
    else:
        cursor.skip(count * element_bytes, what)
    return count


def _alignment(values: dict[str, float]) -> int:
    alignment = int(values.get(_ALIGNMENT_KEY, _ALIGNMENT))
    if not 8 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise HeaderError(f"{_ALIGNMENT_KEY} is {alignment}, not a power of two from 8 to {_LARGEST_ALIGNMENT}")
    return alignment


def _read_tensors(
    cursor: Cursor, count: int, types: dict[int, tuple[str, int, int]], alignment: int
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    end = 0
    for _ in range(count):
        entry = _read_tensor(cursor, types)
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
    return {e.name: TensorEntry(e.name, e.type, e.shape, start + e.offset, e.size_bytes) for e in entries.values()}


def _read_tensor(cursor: Cursor, types: dict[int, tuple[str, int, int]]) -> TensorEntry:
    """One entry, its offset still counted from the start of the data."""
    name = cursor.text(_LONGEST_NAME, "a tensor's name")
    dimensions = cursor.number("I", shown(name))
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise HeaderError(f"{shown(name)} has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are read")
    sizes = tuple(int(cursor.number("Q", shown(name))) for _ in range(dimensions))
    kind, offset = cursor.number("I", shown(name)), cursor.number("Q", shown(name))
    if kind not in types:
        raise HeaderError(f"{shown(name)} is of tensor type {kind}, which there is not")
    type_name, block, block_bytes = types[kind]
    elements = 1
    for size in sizes:
        elements *= size
    if elements == 0 or sizes[0] % block:
        raise HeaderError(f"{shown(name)} has dimensions {list(sizes)}, which {type_name} cannot have")
    return TensorEntry(name, type_name, sizes[::-1], offset, elements // block * block_bytes)


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _check_end(size: int, end: int, alignment: int) -> None:
    if end > size:
        raise HeaderError(f"cut: its tensors need {end:,} bytes, and it has {size:,}")
    if size > _padded(end, alignment):
        raise HeaderError(f"{size - end:,} bytes follow after its last tensor")
