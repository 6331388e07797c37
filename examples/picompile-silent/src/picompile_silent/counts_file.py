"""The file of firing counts: JSON, layer → how often each of its neurons fired, as in {"0": [12, 0, 7]}."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picompile_passes.errors import PassOptionError

Counts = Mapping[int, Sequence[int]]


def read_counts(path: Path) -> Counts:
    """The counts in `path`. Raises `PassOptionError`, in one line, where it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PassOptionError(f"firing counts {path}: {error.strerror}") from error
    except ValueError as error:
        raise PassOptionError(f"firing counts {path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PassOptionError(f"firing counts {path}: must be a JSON object from layer to a list of counts")
    return {_layer(path, key): _numbers(path, key, value) for key, value in content.items()}


def write_counts(path: Path, counts: Counts) -> None:
    """Writes `counts` such that `read_counts` gives them back; one line a layer."""
    lines = [f'  "{layer}": {json.dumps(list(counts[layer]))}' for layer in sorted(counts)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _layer(path: Path, key: str) -> int:
    if not key.isdecimal():
        raise PassOptionError(f"firing counts {path}: {key!r} is not a layer number")
    return int(key)


def _numbers(path: Path, layer: str, value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and value and all(type(count) is int and count >= 0 for count in value)):
        raise PassOptionError(f"firing counts {path}: layer {layer} must be a list of one count a neuron, from 0 on")
    return tuple(value)
