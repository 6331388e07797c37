"""What a report is made of: what other commands wrote, folders known by the file that only they have, and plans."""

from collections.abc import Callable, Sequence
from pathlib import Path

from picompile.errors import UsageError
from picompile.predictors import Predictors, load_predictors
from picompile.report.artifact import ArtifactFacts, read_artifact
from picompile.report.plan import PlanFacts, is_json_object, read_plan_facts
from picompile.report.profile import FiringProfile, read_profile

Source = FiringProfile | Predictors | ArtifactFacts | PlanFacts

_WANTED = (
    "give a profile (profile.json), predictors (predictors.json), an artifact (manifest.json) or the file of a plan"
)


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Reads them. Raises `UsageError` for what is none of these, `ArtifactError` for a broken artifact."""
    # All are recognized before the first is read.
    recognized = [(path, _reader(path)) for path in paths]
    return [read(path) for path, read in recognized]


def _reader(path: Path) -> Callable[[Path], Source]:
    if not path.exists():
        raise UsageError(f"{path}: no such folder or file; {_WANTED}")
    if path.is_file() and is_json_object(path):
        return read_plan_facts
    if not path.is_dir():
        raise UsageError(f"{path}: neither a folder nor a plan; {_WANTED}")
    markers = [marker for marker in _READERS if (path / marker).is_file()]
    if not markers:
        raise UsageError(f"{path}: holds none of {', '.join(_READERS)}; {_WANTED}")
    if len(markers) > 1:
        raise UsageError(f"{path}: holds {' and '.join(markers)}, so which is meant is not clear; give one folder each")
    return _READERS[markers[0]]


_READERS: dict[str, Callable[[Path], Source]] = {
    "profile.json": read_profile,
    "predictors.json": load_predictors,
    "manifest.json": read_artifact,
}
