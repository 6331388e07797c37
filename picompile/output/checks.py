"""Checks of an output path before any work: is the path free, does its folder exist, is the disk large enough."""

import os
import shutil
from pathlib import Path

from picompile.errors import DoesNotFitError, UsageError


def holds_something(path: Path) -> bool:
    """Return whether anything is at `path` except an empty folder, which a rename may replace."""
    if not os.path.lexists(path):
        return False
    return path.is_symlink() or not path.is_dir() or any(path.iterdir())


def existing_ancestor(path: Path) -> Path:
    """Return the nearest folder above `path` that exists: its file system is the one that `path` will be on."""
    for parent in path.absolute().parents:
        if parent.exists():
            return parent
    return Path("/")


def require_folder_or_nothing(output: Path) -> None:
    """Raise `UsageError` if `output` is a dangling link, or exists and is not a folder."""
    if output.is_symlink() and not output.exists():
        raise UsageError(f"{output}: a link to nowhere; remove it or choose another output")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: exists and is not a folder; choose another output")


def require_parent_folder(output: Path) -> None:
    """Raise `UsageError` if the folder that `output` goes into does not exist."""
    parent = output.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no folder; create it first")


def require_disk_space(output: Path, needed_bytes: int, message: str) -> None:
    """Raise `DoesNotFitError` if the file system of `output` has fewer than `needed_bytes` free.

    Args:
        output: The path to be written; it and the folders above it need not exist yet.
        needed_bytes: Upper bound of what will be written.
        message: Template of the error, with the fields `{output}`, `{folder}` (the nearest existing folder above
            `output`), `{needed}` and `{free}` (sizes with units).

    Raises:
        DoesNotFitError: The disk is too small.
    """
    from picompile_runtime.devices.memory import in_units

    folder = existing_ancestor(output)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        needed, free = in_units(needed_bytes, free_bytes)
        raise DoesNotFitError(message.format(output=output, folder=folder, needed=needed, free=free))
