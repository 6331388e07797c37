"""From what a user wrote for MODEL to a path on this machine."""

from pathlib import Path

from picompile.hub.download import download
from picompile.hub.names import parse_model
from picompile.machine.host import host_memory
from picompile.progress import Progress


def resolve_model(text: str, progress: Progress) -> Path:
    """Return the path of the model `text`, which is downloaded first if it is the name of one on the hub.

    Raises what `parse_model` and `download` raise. A path is returned as it is, whether it exists or not.
    """
    found = parse_model(text)
    if isinstance(found, Path):
        return found
    return download(found, progress, host_memory()[0]).path
