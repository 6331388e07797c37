"""The folder of the library: artifacts are made once, found again, and removed when they take too much of the disk."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from picompile.config import CompileOptions
from picompile.errors import UsageError
from picompile.frontend.model_file import require_model
from picompile.hub import ModelName, download
from picompile.library.entry import (
    Entry,
    Source,
    add_name,
    is_in_use,
    key_of,
    read_entry,
    record_path,
    touch,
    write_record,
)
from picompile.library.options import LibraryOptions
from picompile.machine.host import host_memory
from picompile.machine.kept import cache_folder
from picompile.output.lock import Lock, acquire
from picompile.progress import Progress
from picompile.quantities import parse_bytes

FOLDER_VARIABLE = "PICOMPILE_MODELS"
BUDGET_VARIABLE = "PICOMPILE_MODELS_BUDGET"
_BUDGET_BYTES = 100 * 10**9
_POLL_S = 0.2


def library_folder() -> Path:
    """Return the folder of the library: PICOMPILE_MODELS, or `models` in the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named).expanduser().absolute() if named else cache_folder() / "models"


@dataclass(frozen=True)
class Library:
    """The library in `folder`."""

    folder: Path = field(default_factory=library_folder)

    def entries(self) -> list[Entry]:
        """Return the artifacts, the last used one first."""
        if not self.folder.is_dir():
            return []
        found = (read_entry(path.with_suffix("")) for path in self.folder.glob("*.json"))
        return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used_s)

    def named(self, name: str) -> list[Entry]:
        """Return the artifacts of the model that `name` names: as `list` shows it, or as a path."""
        path = str(Path(name).resolve())
        return [entry for entry in self.entries() if (path if entry.is_path else name) in entry.names]

    def obtain(
        self, model: ModelName | Path, options: LibraryOptions, progress: Progress, *, refresh: bool = False
    ) -> Entry:
        """Return the artifact of `model`, which is downloaded and compiled first if need be.

        Of several processes that ask for one artifact, one compiles it, and the others wait. With `refresh`, the hub is
        asked whether there is a newer commit.

        Raises what `download` and `compile_model` raise, and `UsageError` for a path without a model.
        """
        if isinstance(model, Path):
            require_model(model)
        source = Source.of(model)
        folder = self.folder / key_of(source, options.compile_options())
        entry = None if refresh else self._found(source, options)
        if entry is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._making(folder, source, progress):
                entry = None if refresh else self._found(source, options)
                entry = entry or self._make(model, source, folder, options, progress)
        touch(entry)
        return entry

    def _found(self, source: Source, options: LibraryOptions) -> Entry | None:
        """Return the artifact of `source`, which may have been made by another name; None if there is none."""
        compile_options = options.compile_options()
        own = _ready(self.folder / key_of(source, compile_options))
        if own is not None or source.is_path:
            return own
        named = (entry for entry in self.entries() if not entry.is_path and source.name in entry.names)
        return next((each for each in named if self._is_current(each, compile_options)), None)

    def _is_current(self, entry: Entry, options: CompileOptions) -> bool:
        """Return whether this version made the entry of a model on the hub with `options`, and can run it."""
        return entry.folder.name == key_of(Source(entry.name, False), options) and entry.is_ready

    def _make(
        self, model: ModelName | Path, source: Source, folder: Path, options: LibraryOptions, progress: Progress
    ) -> Entry:
        path, commit, files = self._local(model, progress)
        current = _ready(folder)
        if current is not None and current.commit == commit:
            return current
        compile_options = options.compile_options()
        for other in self.entries():
            if files and other.downloads == tuple(map(str, files)) and self._is_current(other, compile_options):
                add_name(other, source.name)
                progress.say(f"{source.name} is {other.name}, which is compiled already")
                return replace(other, also=(*other.also, source.name))
        given = f" with {' '.join(options.given)}" if options.given else ""
        progress.say(f"compiling {source.name}{given} for this machine; it is kept, so that this is done once")
        from picompile.compile import compile_model

        compile_model(path, folder, compile_options, progress)
        write_record(folder, path, source, compile_options, commit, files)
        entry = _ready(folder)
        if entry is None:
            raise UsageError(f"{folder}: was removed while it was made; run the command again")
        self._remove_older(entry)
        self.trim(entry, progress)
        return entry

    def _local(self, model: ModelName | Path, progress: Progress) -> tuple[Path, str, tuple[Path, ...]]:
        """Return the model's path on this machine, its commit on the hub, and the files that were downloaded for it."""
        if isinstance(model, Path):
            return model, "", ()
        found = download(model, progress, host_memory()[0])
        return found.path, found.commit, found.files

    def remove(self, entry: Entry) -> None:
        """Remove an artifact. Raise `UsageError` if a process uses it."""
        if is_in_use(entry.folder):
            raise UsageError(f"{entry.name} is in use by another picompile; end that first")
        _remove(entry.folder)

    def trim(self, kept: Entry, progress: Progress) -> None:
        """Remove artifacts until the library keeps its budget: the least recently used first, and never `kept`."""
        budget_bytes = self.budget_bytes()
        entries = self.entries()
        total_bytes = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if total_bytes <= budget_bytes:
                break
            if entry.folder == kept.folder or is_in_use(entry.folder):
                continue
            _remove(entry.folder)
            total_bytes -= entry.size_bytes
            progress.say(f"removed the compiled {entry.name}, the least recently used; {BUDGET_VARIABLE} allows more")

    def budget_bytes(self) -> int:
        """Return the bytes that all artifacts may take: PICOMPILE_MODELS_BUDGET, or 100 GB, or half of a smaller disk.

        Raises:
            UsageError: the variable is no size.
        """
        if text := os.environ.get(BUDGET_VARIABLE):
            return parse_bytes(text, BUDGET_VARIABLE)
        return min(_BUDGET_BYTES, shutil.disk_usage(self.folder).total // 2)

    def _remove_older(self, made: Entry) -> None:
        """Remove artifacts that `made` replaces, since files have changed or picompile has."""
        for entry in self.entries():
            if made.replaces(entry) and not is_in_use(entry.folder):
                _remove(entry.folder)

    @contextmanager
    def _making(self, folder: Path, source: Source, progress: Progress) -> Iterator[None]:
        """Keep other processes from making the same artifact while the block runs; wait for one that does."""
        lock = self._lock(folder, source, progress)
        try:
            yield
        finally:
            lock.release()

    def _lock(self, folder: Path, source: Source, progress: Progress) -> Lock:
        is_told = False
        while True:
            try:
                return acquire(folder.with_name(f"{folder.name}.making"), wait_s=0)
            except UsageError:
                if not is_told:
                    progress.say(f"another picompile makes {source.name}; waiting for it")
                is_told = True
                time.sleep(_POLL_S)


def _ready(folder: Path) -> Entry | None:
    """Return the entry of an artifact that can be run, else None."""
    entry = read_entry(folder)
    return entry if entry is not None and entry.is_ready else None


def _remove(folder: Path) -> None:
    # The record first: without it there is no artifact.
    record_path(folder).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
