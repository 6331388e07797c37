"""What a report is made of: folders that other commands wrote, each recognized by the file that only it has."""

from collections.abc import Callable, Sequence
from pathlib import Path

from picompile.errors import UsageError
from picompile.predictors import Predictors, load_predictors
from picompile.report.artifact import ArtifactFacts, read_artifact
from picompile.report.profile import FiringProfile, read_profile

Source = FiringProfile | Predictors | ArtifactFacts

_WANTED = "give a profile (profile.json), predictors (predictors.json) or an artifact (manifest.json)"


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Reads the folders. Raises `UsageError` for what is none of these, `ArtifactError` for a broken artifact."""
    # All are recognized before the first is read.
    recognized = [(path, _marker(path)) for path in paths]
    return [_READERS[marker](path) for path, marker in recognized]


def _marker(path: Path) -> str:
    if not path.exists():
        raise UsageError(f"{path}: no such folder; {_WANTED}")
    if not path.is_dir():
        raise UsageError(f"{path}: not a folder; {_WANTED}")
    markers = [marker for marker in _READERS if (path / marker).is_file()]
    if not markers:
        raise UsageError(f"{path}: holds none of {', '.join(_READERS)}; {_WANTED}")
    if len(markers) > 1:
        raise UsageError(f"{path}: holds {' and '.join(markers)}, so which is meant is not clear; give one folder each")
    return markers[0]


_READERS: dict[str, Callable[[Path], Source]] = {
    "profile.json": read_profile,
    "predictors.json": load_predictors,
    "manifest.json": read_artifact,
}
