"""Reads JSON that came with an artifact one field at a time, and checks each field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from picompile_runtime.errors import ArtifactError


def parse_object(text: bytes, where: str, *, unique: bool = True) -> Fields:
    """Return the JSON object in `text`.

    Raises ArtifactError if it is none, or if an object in it has a key twice: readers of JSON disagree on which of two
    equal keys counts. Without `unique`, keys may be there twice and the last one counts, as in Python.
    """
    try:
        return Fields(json.loads(text, object_pairs_hook=_unique if unique else None), where)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: is not valid JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:80]!r} is there twice")
    return found


class Fields:
    """One JSON object, and where it is. Every getter raises ArtifactError if its field is missing or wrong."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ArtifactError(f"{where}: must be a JSON object")
        self.data: dict[str, Any] = data
        self.where = where

    def wrong(self, key: str, must: str) -> ArtifactError:
        """Return the error that says what the field `key` must be."""
        found = repr(self.data[key])[:40] if key in self.data else "missing"
        return ArtifactError(f"{self.where}: {key} must be {must}, but is {found}")

    def integer(self, key: str, least: int = 0, most: int = 2**47) -> int:
        """Return an integer from `least` to `most`."""
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def optional_integer(self, key: str, least: int = 0, most: int = 2**47) -> int | None:
        """Return an integer from `least` to `most`, or None if the field is missing."""
        return self.integer(key, least, most) if key in self.data else None

    def one_of(self, key: str, known: Sequence[str]) -> str:
        """Return a word that is in `known`, the first of them if the field is missing."""
        if key not in self.data:
            return known[0]
        if (word := self.text(key)) not in known:
            raise self.wrong(key, f"one of {', '.join(known)}")
        return word

    def text(self, key: str) -> str:
        """Return a non-empty string."""
        value = self.data.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape: one to eight positive integers whose product fits the address space."""
        value, size = self.data.get(key), 1
        if not isinstance(value, list) or not 1 <= len(value) <= 8:
            raise self.wrong(key, "a list of one to eight sizes")
        for extent in value:
            if not isinstance(extent, int) or isinstance(extent, bool) or extent < 1:
                raise self.wrong(key, "a list of positive integers")
            size *= extent
        if size > 2**47:
            raise self.wrong(key, "a shape of at most 2^47 elements")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self.data.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def object(self, key: str) -> Fields:
        """Return a JSON object."""
        if not isinstance(self.data.get(key), dict):
            raise self.wrong(key, "an object")
        return Fields(self.data[key], f"{self.where}: {key}")

    def objects(self, key: str) -> list[Fields]:
        """Return a list of JSON objects."""
        value = self.data.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return [Fields(item, f"{self.where}: {key}[{index}]") for index, item in enumerate(value)]

    def members(self) -> dict[str, Fields]:
        """Return this object's own members by name; they must all be objects."""
        return {key: Fields(item, f"{self.where}: {key}") for key, item in self.data.items()}
