"""The folder that training works in: what it is of, what is done, and what it depends on.

| file | is |
| --- | --- |
| `work/training.json` | the inputs, and whether training is complete |
| `work/layers/000.safetensors` | the candidates of a layer |
| `work/choice.json` | each layer's target, the limits, and the perplexities that were measured |
| `predictors.json`, `predictors.safetensors` | the result, written last |
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picompile.errors import UsageError
from picompile.predictors.load import FACTS_FILE, WEIGHTS_FILE
from picompile.profiling.files import read_notes, write_json

_FORMAT, _SCHEMA = "picompile-training", 1


@dataclass(frozen=True)
class Workplace:
    """A folder of predictors that are being trained."""

    folder: Path

    @property
    def work(self) -> Path:
        """What is kept beside the result."""
        return self.folder / "work"

    def layer_file(self, layer: int) -> Path:
        """Where the candidates of a layer lie."""
        return self.work / "layers" / f"{layer:03d}.safetensors"

    def read(self, name: str) -> dict[str, Any]:
        """A description in the work folder; empty where there is none that can be read."""
        return read_notes(self.work / name)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a description."""
        write_json(self.work / name, content)

    @property
    def complete(self) -> bool:
        """Whether predictors are there."""
        return (self.folder / FACTS_FILE).is_file()

    def holds(self, inputs: str) -> bool:
        """Whether the predictors that are there are complete and of these inputs."""
        return self.complete and self.read("training.json").get("inputs") == inputs

    def check(self, inputs: str, *, overwrite: bool) -> None:
        """Refuses a folder that may not be used. Raises `UsageError`."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: exists and is not a folder; choose another output")
        ours = (self.work / "training.json").is_file() or (self.folder / FACTS_FILE).is_file()
        if not ours and any(path.name != "work" for path in self.folder.iterdir()):
            raise UsageError(f"{self.folder}: exists and has no {FACTS_FILE}, so it is not overwritten")
        if self.complete and not overwrite and not self.holds(inputs):
            raise UsageError(f"{self.folder}: holds predictors of other inputs; give --force to overwrite them")

    def open(self, inputs: str, candidates: str) -> str:
        """Makes the folder ready. Candidates that `candidates` tells to be of the same inputs are kept.

        Returns a word on what was found, empty where nothing was.
        """
        known = self.read("training.json")
        for name in (FACTS_FILE, WEIGHTS_FILE):
            (self.folder / name).unlink(missing_ok=True)
        if known and known.get("candidates") != candidates:
            shutil.rmtree(self.work)
        (self.work / "layers").mkdir(parents=True, exist_ok=True)
        for leftover in (*self.work.rglob(".*.tmp"), *self.work.rglob("*.data")):
            leftover.unlink()
        if known.get("inputs") != inputs:
            (self.work / "choice.json").unlink(missing_ok=True)
            description = {"format": _FORMAT, "schema": _SCHEMA, "inputs": inputs, "candidates": candidates}
            self.write("training.json", description)
        if not known:
            return ""
        if known.get("candidates") != candidates:
            return "was begun from other inputs, and starts anew"
        begun = known.get("inputs") == inputs and any(self.work.glob("layers/*.safetensors"))
        return "was begun, and goes on" if begun else ""


def digest(*parts: object) -> str:
    """Hex digits of what `json` makes of `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
