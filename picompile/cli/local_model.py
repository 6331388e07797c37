"""The MODEL of a command as a path on this machine, which is checked before anything heavy is imported."""

from pathlib import Path

from picompile.cli.progress import progress
from picompile.frontend.model_file import require_model
from picompile.hub import resolve_model


def local_model(text: str) -> Path:
    """Return the path of the model `text`, after downloading it if it is a name on the hub.

    Raises:
        UsageError: there is no such model.
    """
    with progress() as shown:
        path = resolve_model(text, shown)
    require_model(path)
    return path
