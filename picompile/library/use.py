"""From the text that a user gives for MODEL to an artifact."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from picompile.errors import UsageError
from picompile.frontend.model_file import holds_model
from picompile.hub import ModelName, parse_model
from picompile.hub.names import FORMS, hidden_name
from picompile.library.entry import Entry, InUse
from picompile.library.options import LibraryOptions
from picompile.library.store import Library
from picompile.progress import Progress

_MANIFEST = "manifest.json"


class OpenModel:
    """An artifact that a command uses; in a `with` block, `picompile rm` does not remove it meanwhile.

    Attributes:
        artifact: its folder.
        name: what the user calls it: the name on the hub, or the name of a folder or file.
        also: other names on the hub that stand for it.
    """

    def __init__(self, artifact: Path, name: str, lock: InUse | None = None, also: Sequence[str] = ()) -> None:
        self.artifact, self.name, self._lock, self.also = artifact, name, lock, tuple(also)

    def __enter__(self) -> "OpenModel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()


def open_model(text: str, options: LibraryOptions, progress: Progress) -> OpenModel:
    """Return the artifact of the MODEL `text`: an artifact, a checkpoint, a GGUF file, or a name on the hub.

    Anything but an artifact is compiled the first time, and found in the library after that, without asking the hub.

    Raises:
        UsageError: there is no such file, folder or model, or an option applies to no artifact that exists already.
    """
    model = parse_model(text)
    if isinstance(model, Path) and _is_artifact(model):
        if options.given:
            raise UsageError(
                f"{text}: {options.given[0]} applies to a model that is compiled for this; the artifact has its own"
            )
        return OpenModel(model, model.resolve().name or "model")
    _require_any(text, model)
    entry, name = Library().obtain(model, options, progress), _short(model)
    others = () if entry.is_path else [each for each in entry.names if each != name]
    return OpenModel(entry.folder, name, InUse(entry.folder), others)


def open_entry(entry: Entry) -> OpenModel:
    """Return the artifact of an entry of the library."""
    name = _short(Path(entry.name)) if entry.is_path else entry.name
    return OpenModel(entry.folder, name, InUse(entry.folder), entry.also)


def open_compiled(text: str) -> Path:
    """Return the artifact of the MODEL `text`, which must be compiled already.

    Raises:
        UsageError: there is no such file or folder, or the model was not compiled.
    """
    model = parse_model(text)
    if isinstance(model, Path) and _is_artifact(model):
        return model
    _require_any(text, model)
    found = Library().named(text if isinstance(model, Path) else str(model))
    if not found:
        raise UsageError(f"{text}: not compiled yet; picompile chat, run, serve and compile do that")
    return found[0].folder


def _is_artifact(path: Path) -> bool:
    """Return whether a path is to be opened as an artifact: a folder that is one, or at least holds no other model."""
    return path.is_dir() and ((path / _MANIFEST).exists() or not holds_model(path))


def _require_any(text: str, model: ModelName | Path) -> None:
    if isinstance(model, Path) and not model.exists():
        raise UsageError(f"{text}: no such file or folder; a model on the hub is named {FORMS}{hidden_name(text)}")


def _short(model: ModelName | Path) -> str:
    if isinstance(model, ModelName):
        return str(model)
    return model.resolve().stem if model.is_file() else model.resolve().name
