"""Reading the JSON descriptions of profiles and predictors, with an error for each kind of damage.

`picompile_runtime.artifact.fields.Fields` reads single fields, as for artifacts; this module adds what artifacts do not
need.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from picompile.choices import MOST_LAYERS
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.json_file import read_json_object
from picompile_runtime import ArtifactError
from picompile_runtime.artifact.fields import Fields

# Plans list the neurons of each layer; none comes near.
_MOST_BYTES = 1 << 30


def read_object(path: Path, format_name: str, what: str) -> dict[str, Any]:
    """Return the JSON object in `path`, whose `format` must be `format_name`.

    Raises:
        UsageError: The file cannot be read or has another format; `what` names in words what it must be.
    """
    try:
        content = read_json_object(path, _MOST_BYTES)
    except UnsupportedModelError as error:
        raise UsageError(str(error)) from error
    if content.get("format") != format_name:
        raise UsageError(f"{path}: is not {what}")
    # File names need not be valid text: halves of surrogate pairs are valid JSON, but cannot be printed.
    printable: dict[str, Any] = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    return printable


def check_schema(path: Path, content: dict[str, Any], schema: int, advice: str) -> None:
    """Raise `UsageError` if the description has another schema version."""
    if content.get("schema") != schema:
        found = repr(content.get("schema"))[:40]
        raise UsageError(f"{path}: has schema {found}, not {schema}; {advice}")


@contextmanager
def adding_advice(advice: str) -> Iterator[None]:
    """Turn an error of `Fields` inside the block into a `UsageError` that ends in `advice`."""
    try:
        yield
    except ArtifactError as error:
        raise UsageError(f"{error}; {advice}") from error


def layer_number(fields: Fields) -> int:
    """Return the field `layer`."""
    value = fields.data.get("layer")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_LAYERS:
        raise fields.wrong("layer", f"an integer from 0 to {MOST_LAYERS - 1}, beyond which no model has layers")
    return value


def check_order(fields: Fields, layers: Sequence[int]) -> None:
    """Raise if the description has no layers, or their numbers do not rise."""
    if not layers or list(layers) != sorted(set(layers)):
        raise fields.wrong("layers", "a list of layers in order, each once")


def number(fields: Fields, key: str, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> float:
    """Return a number from `least` to `most`; neither bound can be infinite."""
    value = fields.data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounded = least > -sys.float_info.max
        raise fields.wrong(key, f"a number from {least:.4g} to {most:.4g}" if bounded else "a finite number")
    return float(value)


def figure(fields: Fields, key: str) -> float | None:
    """Return a measured figure; None if it is missing or not finite."""
    value = fields.data.get(key)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return number(fields, key)


def choice(fields: Fields, key: str, known: Sequence[str]) -> str:
    """Return a field that must be one of the texts `known`."""
    value = fields.data.get(key)
    if not isinstance(value, str) or value not in known:
        raise fields.wrong(key, f"one of {', '.join(known)}")
    return value
