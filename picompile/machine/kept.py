"""Files of measurements in the user's cache folder: JSON objects with the sha256 of their content."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from picompile.errors import PicompileError
from picompile.output import writing_file
from picompile_runtime import ArtifactError
from picompile_runtime.artifact.fields import Fields, parse_object


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/picompile. Raise `RuntimeError` if this user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "picompile"


def read_kept(path: Path, expected: Mapping[str, Any]) -> Fields:
    """Return the content of a file.

    Raises:
        OSError: there is no such file.
        ArtifactError: it is damaged, or a field is not what `expected` has.
    """
    fields = parse_object(path.read_bytes(), str(path))
    content = dict(fields.data)
    if content.pop("sha256", None) != digest(content) or any(content.get(key) != expected[key] for key in expected):
        raise ArtifactError(f"{path} is damaged, or of something else")
    return fields


def keep(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file; another process that reads it meanwhile sees the old or the new content.

    A file that cannot be written is done without.
    """
    with suppress(OSError, PicompileError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing_file(path, overwrite=True) as file:
            file.write((json.dumps({**content, "sha256": digest(content)}, indent=1) + "\n").encode())


def digest(content: Mapping[str, Any]) -> str:
    """Return the sha256 of an object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
