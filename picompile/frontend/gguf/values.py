"""The numbers of a GGUF file's metadata under the keys of its architecture, each checked when it is asked for."""

import math
import struct
from dataclasses import dataclass

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import read_array
from picompile.frontend.messages import shown

_MOST_COUNT = (1 << 31) - 1
_LONGEST_LIST = 16_384


@dataclass(frozen=True)
class MetadataValues:
    """The metadata of `header` whose keys begin with `architecture`.

    Every method returns None for a key that is not there, and raises `UnsupportedModelError` for a value of another
    kind.
    """

    header: GgufHeader
    architecture: str

    def key(self, name: str) -> str:
        """Return the key that `name` has in this file."""
        return f"{self.architecture}.{name}"

    def count(self, name: str) -> int | None:
        """Return a whole number from 0. A list, which has one number for each layer, stands for its only value."""
        key = self.key(name)
        value: object = self.header.values.get(key)
        if key in self.header.arrays:
            listed = self.counts(name) or []
            if not listed:
                raise self._error(name, "is an empty list")
            if len(set(listed)) != 1:
                raise self._error(name, "differs between layers, which is not supported")
            value = listed[0]
        if key in self.header.texts:
            raise self._error(name, "is a text, not a number")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value <= _MOST_COUNT:
            raise self._error(name, f"is {value!r:.40}, not a whole number from 0 to {_MOST_COUNT}")
        return value

    def counts(self, name: str) -> list[int] | None:
        """Return a list of whole numbers from 0."""
        place = self.header.arrays.get(self.key(name))
        if place is None:
            return None
        listed = read_array(self.header, self.key(name)) if place.count <= _LONGEST_LIST else None
        if listed is None or not all(type(number) is int and 0 <= number <= _MOST_COUNT for number in listed):
            raise self._error(name, f"is not a list of at most {_LONGEST_LIST} whole numbers")
        return listed

    def flags(self, name: str) -> list[bool] | None:
        """Return a list of truth values, which some writers keep as whole numbers; None for what is no list."""
        if self.key(name) not in self.header.arrays:
            return None
        place = self.header.arrays[self.key(name)]
        listed = read_array(self.header, self.key(name)) if place.count <= _LONGEST_LIST else None
        if listed is None or not all(element in (0, 1) for element in listed):
            raise self._error(name, f"is not a list of at most {_LONGEST_LIST} truth values")
        return [bool(element) for element in listed]

    def positive(self, name: str) -> float | None:
        """Return a finite number above 0, as the decimal that it was most likely written as."""
        value = self.header.values.get(self.key(name))
        if value is None:
            if self.key(name) in self.header.texts or self.key(name) in self.header.arrays:
                raise self._error(name, "is not a number")
            return None
        if isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise self._error(name, f"is {value!r:.40}, not a number from 0")
        return shortest(value) or None

    def above_zero(self, name: str) -> float | None:
        """Return a finite number above 0; a number of 0 is an error here, not as good as none."""
        found = self.positive(name)
        if found is None and self.key(name) in self.header.values:
            raise self._error(name, "is 0, and must be above it")
        return found

    def _error(self, name: str, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.header.file}: {shown(self.key(name))} {reason}")


def shortest(value: float) -> float:
    """Return the number of fewest digits that is `value` as a float32: 1e-05 for 9.999999747378752e-06."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((shorter for shorter in candidates if _as_float32(shorter) == value), float(value))


def _as_float32(value: float) -> float:
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.inf
    return float(rounded)


def embedding_rows(header: GgufHeader) -> int | None:
    """Return the tokens of the embedding, None for a file that has no such matrix."""
    entry = header.tensors.get("token_embd.weight")
    return entry.shape[0] if entry is not None and len(entry.shape) == 2 else None
