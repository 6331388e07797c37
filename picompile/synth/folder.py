"""The folder of a checkpoint: what must hold before anything is written."""

import shutil
from pathlib import Path

from picompile.errors import DoesNotFitError, UsageError
from picompile_runtime.memory import in_units

# Configuration and tokenizer.
_OTHER_BYTES = 16 << 20


def check_free(output: Path) -> None:
    """Refuses a place that is taken. Raises `UsageError`."""
    parent = output.absolute().parent
    empty = output.is_dir() and not output.is_symlink() and not any(output.iterdir())
    if not empty and (output.exists() or output.is_symlink()):
        raise UsageError(f"{output} exists; choose another place or remove it first")
    if not parent.is_dir():
        raise UsageError(f"{parent} is no folder; create it first")


def check_disk(output: Path, needed_bytes: int) -> None:
    """Refuses a place that cannot hold the checkpoint. Raises `DoesNotFitError`."""
    parent = output.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < needed_bytes + _OTHER_BYTES:
        wanted, there = in_units(needed_bytes + _OTHER_BYTES, free)
        raise DoesNotFitError(f"the checkpoint needs {wanted}, and the disk of {parent} has {there} free")
