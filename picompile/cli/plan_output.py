"""A plan's file as an output: what it may overwrite."""

from pathlib import Path

from picompile.cli.checks import require_output_file
from picompile.errors import UsageError


def require_plan_output(path: Path, *, overwrite: bool) -> None:
    """Raises `UsageError` where `path` cannot become a plan: only a plan is ever overwritten."""
    require_output_file(path, "-o", _require_plan, overwrite=overwrite)


def _require_plan(path: Path) -> None:
    from picompile.description import read_object
    from picompile.placement.plan import FORMAT

    try:
        read_object(path, FORMAT, "a plan")
    except UsageError as error:
        raise UsageError(f"{path}: exists and is no plan, so it is not overwritten; choose another file") from error
