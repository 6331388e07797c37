"""One artifact of the library, and the file beside it that says what it was made of.

The artifact of the key K is the folder `K`, and its record the file `K.json`, which is written when the artifact is
whole. Its modification time is when it was last used.
"""

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picompile.choices import STORED
from picompile.config import CompileOptions
from picompile.frontend.gguf.parts import file_format, part_files
from picompile.hub import ModelName
from picompile.hub.listing import READ_BESIDE
from picompile.machine.kept import digest, keep, read_kept
from picompile_runtime import ArtifactError
from picompile_runtime.artifact.manifest import read_manifest
from picompile_runtime.version import __version__

_FORMAT = "picompile library 1"
_READ = (*READ_BESIDE, ".safetensors", ".gguf")
_CHOSEN = ("target", "quant", "context", "sequences")


@dataclass(frozen=True)
class Source:
    """The source of an artifact: a model on the hub, or files on this machine.

    Attributes:
        name: the name on the hub, or the path of a checkpoint or a GGUF file.
        is_path: whether it is a path.
        state: names, sizes and times of a path's files, which change with the model; empty for a name.
    """

    name: str
    is_path: bool
    state: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, model: ModelName | Path) -> "Source":
        """Return the source of a model, whose files are looked at if it is a path."""
        if isinstance(model, ModelName):
            return cls(str(model), False)
        path = model.resolve()
        files = part_files(path) if path.is_file() else sorted(path.iterdir())
        status = [(each.name, each.stat()) for each in files if each.is_file() and each.suffix in _READ]
        return cls(str(path), True, tuple((name, each.st_size, each.st_mtime_ns) for name, each in status))


@dataclass(frozen=True)
class Entry:
    """An artifact of the library.

    Attributes:
        folder: the artifact's.
        name, is_path: as of its `Source`.
        also: other names on the hub that stand for the same files, such as ORG/REPO beside ORG/REPO:Q4_K_M.
        commit: the commit of the hub that it was made of; empty for a path.
        downloads: files that were downloaded for it.
        options: what it was compiled for, of what a user can choose.
        quant: its weight format; for a GGUF file whose numbers it keeps, what the file calls it.
        context: its context in tokens.
        size_bytes: the bytes of its files.
        used_s: when it was last used, in seconds since 1970.
    """

    folder: Path
    name: str
    is_path: bool
    commit: str
    downloads: tuple[str, ...]
    options: Mapping[str, Any]
    quant: str
    context: int
    size_bytes: int
    used_s: float
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.name, *self.also)

    def to_json(self) -> dict[str, Any]:
        """Return what `picompile list --json` says of it."""
        lists = {"downloads": list(self.downloads), "also": list(self.also)}
        return asdict(self) | {"folder": str(self.folder)} | lists

    @property
    def is_ready(self) -> bool:
        """Whether this version can run it: an artifact of another version may have another schema."""
        try:
            read_manifest(self.folder)
        except ArtifactError:
            return False
        return True

    def replaces(self, other: "Entry") -> bool:
        """Return whether `other` was made for the same use, of another version of the model or by another picompile."""
        same = (self.is_path, self.options) == (other.is_path, other.options)
        return same and self.name in other.names and self.folder != other.folder


def key_of(source: Source, options: CompileOptions) -> str:
    """Return the key of the artifact that `options` make of `source`."""
    return digest({"source": asdict(source), "options": _chosen(options), "version": __version__})[:32]


def _chosen(options: CompileOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _CHOSEN}


def record_path(folder: Path) -> Path:
    """Return the file beside an artifact that says what it was made of."""
    return folder.with_name(f"{folder.name}.json")


def write_record(
    folder: Path, model: Path, source: Source, options: CompileOptions, commit: str, downloads: tuple[Path, ...]
) -> None:
    """Write the record of the artifact in `folder`, which is whole and was made of the files at `model`."""
    manifest = read_manifest(folder)
    own = file_format(model) if manifest.quant == STORED and model.suffix == ".gguf" else None
    content: dict[str, Any] = {
        "format": _FORMAT,
        "name": source.name,
        "is_path": source.is_path,
        "commit": commit,
        "downloads": [str(path) for path in downloads],
        "options": _chosen(options),
        "quant": own or manifest.quant,
        "context": manifest.context,
        "size_bytes": sum(file.size_bytes for file in manifest.files.values()),
    }
    keep(record_path(folder), content)


def read_entry(folder: Path) -> Entry | None:
    """Return the entry of the artifact in `folder`; None if there is none, or its record is damaged."""
    path = record_path(folder)
    if not folder.is_dir():
        return None
    try:
        data: Mapping[str, Any] = read_kept(path, {"format": _FORMAT}).data
        return Entry(
            folder,
            data["name"],
            data["is_path"],
            data["commit"],
            tuple(data["downloads"]),
            data["options"],
            data["quant"],
            data["context"],
            data["size_bytes"],
            path.stat().st_mtime,
            tuple(data.get("also", ())),
        )
    except (OSError, ArtifactError, KeyError, TypeError):
        return None


def add_name(entry: Entry, name: str) -> None:
    """Note in the record that `name` stands for the same model."""
    path = record_path(entry.folder)
    with suppress(OSError, ArtifactError):  # removed meanwhile
        data = {key: value for key, value in read_kept(path, {"format": _FORMAT}).data.items() if key != "sha256"}
        keep(path, data | {"also": [*entry.also, name]})


def touch(entry: Entry) -> None:
    """Note that the artifact is used now."""
    with suppress(OSError):  # on a read-only disk the order of removal is another
        os.utime(record_path(entry.folder))


class InUse:
    """A shared lock on an artifact's folder, which keeps `rm` away; the system frees it with the process."""

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Free the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def is_in_use(folder: Path) -> bool:
    """Return whether another process, or another part of this one, uses the artifact."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
