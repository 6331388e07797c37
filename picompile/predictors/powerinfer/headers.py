"""The numbers that GGUF files have for element types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import mmap
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from picompile.errors import UsageError

# struct's letter for each type of a metadata value; strings (8) and arrays (9) are read otherwise.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9

# Number of a tensor type → its name, the elements of a block, and the bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
}

# PowerInfer left llama.cpp before it had the types from 16 on, and its integers had these numbers: ggml.h at d3ebd7c.
POWERINFER_TYPES = {number: row for number, row in TENSOR_TYPES.items() if number < 16} | {
    16: ("I8", 1, 1),
    17: ("I16", 1, 2),
    18: ("I32", 1, 4),
}


# Reading a file's header from front to back, never past the end of the file.


_LENGTH = struct.Struct("<Q")


class HeaderError(Exception):
    """Why a file is refused, without its name."""


class Cursor:
    """A place in `data`, moved on by what is read. Every method raises `HeaderError` where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.at = 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. `what` they are goes into the error."""
        start = self._advance(count, what)
        return self._data[start : self.at]

    def number(self, letter: str, what: str) -> int:
        """The next number, little-endian, of struct's type `letter`; a float for `f` and `d`."""
        start = self._advance(self.size_of(letter), what)
        (value,) = struct.unpack_from("<" + letter, self._data, start)
        return value  # type: ignore[no-any-return]

    def text(self, longest: int, what: str) -> str:
        """The next string: its length in 8 bytes, then UTF-8."""
        length = self.number("Q", what)
        if length > longest:
            raise HeaderError(f"{what} is {length:,} bytes long; {longest} are read")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise HeaderError(f"{what} is not UTF-8") from error

    def skip(self, count: int, what: str) -> None:
        """Moves behind the next `count` bytes."""
        self._advance(count, what)

    def skip_texts(self, count: int, what: str) -> None:
        """Moves behind the next `count` strings, of any length and content."""
        at, unpack, data = self.at, _LENGTH.unpack_from, self._data
        last = self.size - _LENGTH.size
        for _ in range(count):
            if at > last:
                break
            at += _LENGTH.size + unpack(data, at)[0]
        else:
            self._advance(at - self.at, what)
            return
        raise HeaderError(f"cut or forged: {what} reaches to byte {at:,}, and it has {self.size:,}")

    def check_count(self, count: int, smallest_bytes: int, most: int, what: str) -> None:
        """Raises unless `count` things of at least `smallest_bytes` each can follow, and are not more than `most`."""
        if count * smallest_bytes > self.size - self.at:
            raise HeaderError(f"cut or forged: {count:,} {what} do not fit into its {self.size:,} bytes")
        if count > most:
            raise HeaderError(f"{count:,} {what}; at most {most:,} are read")

    @staticmethod
    def size_of(letter: str) -> int:
        """Bytes of a number of struct's type `letter`."""
        return struct.calcsize("<" + letter)

    def _advance(self, count: int, what: str) -> int:
        start, end = self.at, self.at + count
        if end > self.size:
            raise HeaderError(f"cut or forged: {what} reaches to byte {end:,}, and it has {self.size:,}")
        self.at = end
        return start


def shown(text: str | bytes) -> str:
    """A name out of the file as it can be printed: no control characters, not too long."""
    name = text.decode("latin-1") if isinstance(text, bytes) else text
    return name if name.isascii() and name.isprintable() and 0 < len(name) <= 64 else ascii(name[:64])


# The header of a GGUF file, read without trusting it and without the `gguf` package.
#
# What is accepted here is as small as what PowerInfer's own writers make: tensors lie one after the other in the
# order of their entries, up to the end of the file. So a forged size, count or offset contradicts another number, and
# is found.


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
    """The metadata of a GGUF file. `values` has the single numbers and no arrays; `elements` counts those of arrays."""

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


# A first look at a file of `torch.save`: a zip archive of uncompressed entries, one of them a pickle.
#
# The pickle itself is read in the guarded process, by torch's reader for tensors alone.


# A state dict of two matrices pickles into 500 bytes.
_LARGEST_PICKLE_BYTES = 64 << 10
_MOST_ENTRIES = 64


def check_torch_file(file: Path) -> None:
    """Raises `UsageError`, in one line, for what is no such archive, or is larger inside than outside."""
    if not file.is_file():  # opening a pipe would wait for a writer
        raise UsageError(f"{file}: not a file")
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise UsageError(f"{file}: not a file of torch.save: {error}") from error
    pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
    if len(pickles) != 1 or len(entries) > _MOST_ENTRIES:
        raise UsageError(f"{file}: not a file of torch.save: {len(pickles)} pickles in {len(entries)} entries")
    if pickles[0].file_size > _LARGEST_PICKLE_BYTES:
        raise UsageError(f"{file}: a pickle of {pickles[0].file_size:,} bytes is more than a few tensors need")
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > size:
        raise UsageError(f"{file}: its entries are compressed or larger than the file; torch.save writes none such")
