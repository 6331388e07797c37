"""The work folder of training: its inputs and its progress.

| file | contents |
| --- | --- |
| `work/training.json` | the inputs, and whether training is complete |
| `work/layers/000.safetensors` | the candidates of a layer |
| `work/choice.json` | each layer's target, the limits, and the measured perplexities |
| `predictors.json`, `predictors.safetensors` | the result, written last |

An existing result stays until a new one replaces it, in one step with the notes on it.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from picompile.errors import UsageError
from picompile.output import OutputPath, explaining_write_errors, link_tree
from picompile.output.leftovers import sync_folder, sync_tree
from picompile.output.place import require_folder_or_nothing
from picompile.predictors.files import FACTS_FILE, WEIGHTS_FILE
from picompile.predictors.profile.files import read_notes, write_json

_FORMAT, _SCHEMA = "picompile-training", 1
_NOTES = "training.json"
# Holds the files of the first result until they are moved into place one by one.
_NEXT = "next"


@dataclass(frozen=True)
class TrainingDirectory:
    """A folder of predictors that are being trained."""

    folder: Path

    @property
    def work(self) -> Path:
        """The folder of files that are kept beside the result."""
        return self.folder / "work"

    def layer_file(self, layer: int) -> Path:
        """Return the file of a layer's candidates."""
        return self.work / "layers" / f"{layer:03d}.safetensors"

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON object from the work folder; empty if it cannot be read."""
        return read_notes(self.work / name)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON object to the work folder."""
        write_json(self.work / name, content)

    @property
    def complete(self) -> bool:
        """Whether the folder holds predictors."""
        return (self.folder / FACTS_FILE).is_file()

    def holds(self, inputs: str) -> bool:
        """Return whether the folder holds complete predictors of these inputs."""
        return self.complete and self._made() == inputs

    def _made(self) -> str | None:
        """Return the inputs of the predictors in the folder; None if there are none."""
        notes = self.read(_NOTES)
        made = notes.get("made")
        return made if self.complete and isinstance(made, str) else None

    def check(self, inputs: str, *, overwrite: bool) -> None:
        """Raise `UsageError` if the folder must not be used."""
        require_folder_or_nothing(self.folder)
        if not self.folder.exists():
            return
        ours = (self.work / _NOTES).is_file() or (self.folder / FACTS_FILE).is_file()
        if not ours and any(path.name != "work" for path in self.folder.iterdir()):
            raise UsageError(f"{self.folder}: exists and has no {FACTS_FILE}, so it is not overwritten")
        if self.complete and not overwrite and not self.holds(inputs):
            raise UsageError(f"{self.folder}: holds predictors of other inputs; give --overwrite to overwrite them")

    def open(self, inputs: str, candidates: str) -> str:
        """Prepare the folder. Its candidates are kept if their inputs have the hash `candidates`.

        Returns:
            A message about what was found; empty if nothing was.
        """
        known = self.read(_NOTES)
        if known and known.get("candidates") != candidates:
            # Removed before the notes are changed: these would say that the candidates are of these inputs.
            shutil.rmtree(self.work / "layers", ignore_errors=True)
        (self.work / "layers").mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work / _NEXT, ignore_errors=True)
        for leftover in (*self.work.rglob(".*.tmp"), *self.work.rglob("*.data")):
            leftover.unlink()
        if known.get("inputs") != inputs:
            (self.work / "choice.json").unlink(missing_ok=True)
            description = {"format": _FORMAT, "schema": _SCHEMA, "inputs": inputs, "candidates": candidates}
            self.write(_NOTES, {**description, "made": self._made()})
        if not known:
            return ""
        if known.get("candidates") != candidates:
            return "was begun from other inputs, and starts anew"
        begun = known.get("inputs") == inputs and any(self.work.glob("layers/*.safetensors"))
        return "was begun, and goes on" if begun else ""

    @contextmanager
    def publishing(self, output: OutputPath) -> Iterator[Path]:
        """Yield a folder for the two files of the result, which are published when the block succeeds.

        If the folder holds a result, a new folder with everything else from this one replaces it at `output`.
        Otherwise the two files are moved, `predictors.json` last: a reader finds no result until both are there.
        """
        notes = self.read(_NOTES)
        notes["made"] = notes.get("inputs")
        if self.complete:
            with output.folder() as folder:
                link_tree(self.folder, folder, _is_replaced)
                yield folder
                write_json(folder / "work" / _NOTES, notes)
            return
        folder = self.work / _NEXT
        with explaining_write_errors(self.folder, folder):
            folder.mkdir(exist_ok=True)
            yield folder
            sync_tree(folder)
            self.write(_NOTES, notes)
            for name in (WEIGHTS_FILE, FACTS_FILE):
                (folder / name).replace(self.folder / name)
                sync_folder(self.folder)
            folder.rmdir()


def _is_replaced(path: PurePath) -> bool:
    return str(path) in (FACTS_FILE, WEIGHTS_FILE, "work/tried", f"work/{_NEXT}", f"work/{_NOTES}")


def digest(*parts: object) -> str:
    """Return the SHA-256 of `parts` as JSON, in hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
