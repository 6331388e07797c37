"""The path of an artifact that is to be written."""

import os
from pathlib import Path

from picompile.errors import UsageError
from picompile.output.place import holds_something, require_parent_folder


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `UsageError` for a path that cannot be written; asked before any work is done."""
    parent = output.absolute().parent
    if holds_something(output):
        if not overwrite:
            raise UsageError(f"{output} exists; choose another place or overwrite it with --overwrite")
        if not (output / "manifest.json").is_file():
            raise UsageError(f"{output} exists and is no artifact; it will not be overwritten")
    require_parent_folder(output)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{parent} is not writable")
