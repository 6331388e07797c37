"""A plan's file as an output: what it may overwrite."""

import tempfile
from pathlib import Path

from picompile.cli.checks import existing_ancestor
from picompile.errors import UsageError


def require_plan_output(path: Path, *, overwrite: bool) -> None:
    """Raises `UsageError` where `path` cannot become a plan: only a plan is ever overwritten."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; -o names the file to write")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path}: a link to nowhere; remove it or choose another file")
    if path.exists():
        _require_replaceable(path, overwrite=overwrite)
    parent = existing_ancestor(path)
    try:
        # Asking the file system is the only test that holds for root, read-only mounts and quotas alike.
        with tempfile.TemporaryDirectory(dir=parent, prefix=".picompile-"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot write in {parent}: {error.strerror}") from error


def _require_replaceable(path: Path, *, overwrite: bool) -> None:
    from picompile.description import read_object
    from picompile.placement.plan import FORMAT

    if not path.is_file():  # reading from a pipe would wait for a writer
        raise UsageError(f"{path}: not a regular file; choose another")
    try:
        read_object(path, FORMAT, "a plan")
    except UsageError as error:
        raise UsageError(f"{path}: exists and is no plan, so it is not overwritten; choose another file") from error
    if not overwrite:
        raise UsageError(f"{path}: exists; give --force to overwrite it, or choose another file")
