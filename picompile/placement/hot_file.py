"""The file of `compile --hot`: neuron numbers by layer number, as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picompile.errors import UsageError
from picompile.quantities import parse_count, shortened


def read_hot(path: Path) -> Mapping[int, Sequence[int]]:
    """Return the hot neurons of each layer that the file `path` names. Raise `UsageError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object from layer to a list of neurons")
    return {_layer(path, key): _neurons(path, key, value) for key, value in content.items()}


def _layer(path: Path, key: str) -> int:
    number = parse_count(key)
    if number is None:
        raise UsageError(f"{path}: {shortened(repr(key))} is not a layer number")
    return number


def _neurons(path: Path, layer: str, value: Any) -> tuple[int, ...]:
    numbers = isinstance(value, list) and all(type(neuron) is int and neuron >= 0 for neuron in value)
    if not numbers:
        raise UsageError(f"{path}: layer {layer} must be a list of neuron numbers, from 0 on")
    if len(set(value)) != len(value):
        raise UsageError(f"{path}: layer {layer} names a neuron twice")
    return tuple(sorted(value))
