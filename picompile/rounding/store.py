"""The folder of rounded matrices, and a weight source that reads it.

| file | contents |
| --- | --- |
| `rounding.json` | a hash of the inputs, and whether the folder is complete |
| `layers/000.safetensors` | the rounded matrices of a segment of the graph, packed |
| `state.safetensors` | the live values of every window behind the last segment that is done, until all are |

Every file appears whole, and a segment's file before the state behind it: so whenever a process ends, the next one
continues, and ends with the same bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from picompile.predictors.profile.files import read_notes, read_tensors, write_json, write_tensors
from picompile.predictors.profile.state import StateFile
from picompile.rounding.matrices import MatrixKey
from picompile_passes.graph.weight_source import WeightSource, load_rows

_NOTES = "rounding.json"
_FORMAT, _SCHEMA = "picompile-rounding", 1
_STATE = "state.safetensors"


@dataclass(frozen=True)
class RoundingDirectory:
    """A folder for rounded matrices. `inputs` is a hash of everything that they depend on."""

    folder: Path
    inputs: str

    @property
    def state(self) -> StateFile:
        """The state of an unfinished run."""
        return StateFile(self.folder / _STATE)

    @property
    def complete(self) -> bool:
        """Whether the folder has all matrices, made from the same inputs."""
        notes = read_notes(self.folder / _NOTES)
        return notes.get("inputs") == self.inputs and notes.get("complete") is True

    def open(self) -> bool:
        """Make or clear the folder; return whether it has an unfinished run of the same inputs to go on with."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for temporary in self.folder.rglob(".*.tmp"):
            temporary.unlink()
        known = read_notes(self.folder / _NOTES).get("inputs") == self.inputs
        if not known:
            for path in (*self.folder.glob("layers/[0-9]*.safetensors"), self.folder / _STATE):
                path.unlink(missing_ok=True)
            self._write_notes(complete=False)
        (self.folder / "layers").mkdir(exist_ok=True)
        return known

    def write(self, segment: int, matrices: Mapping[MatrixKey, Tensor], forms: Mapping[MatrixKey, str]) -> None:
        """Write the rounded matrices of a segment."""
        names = {key: f"{key.parameter}.T" if key.transposed else key.parameter for key in matrices}
        tensors = {names[key]: packed for key, packed in matrices.items()}
        write_tensors(self._file(segment), tensors, {names[key]: forms[key] for key in matrices})

    def finish(self) -> None:
        """Mark the folder as complete, and remove the files that only an unfinished run needs."""
        self._write_notes(complete=True)
        (self.folder / _STATE).unlink(missing_ok=True)

    def _file(self, segment: int) -> Path:
        return self.folder / "layers" / f"{segment:03d}.safetensors"

    def _write_notes(self, *, complete: bool) -> None:
        notes = {"format": _FORMAT, "schema": _SCHEMA, "inputs": self.inputs, "complete": complete}
        write_json(self.folder / _NOTES, notes)

    def add_to(self, weights: "RoundedWeights", segment: int, forms: Mapping[MatrixKey, str]) -> None:
        """Let `weights` have the matrices of a segment that was written."""
        for key, form in forms.items():
            weights.add(key, form, self._file(segment))


class RoundedWeights:
    """The weight source `base` with rounded matrices, where files have them in the requested format."""

    def __init__(self, base: WeightSource) -> None:
        """Begin with no rounded matrix."""
        self.base = base
        self._files: dict[MatrixKey, tuple[str, Path]] = {}

    def add(self, key: MatrixKey, form: str, file: Path) -> None:
        """Take the matrix `key` in the format `form` from a file of `RoundingDirectory`."""
        self._files[key] = form, file

    def onto(self, base: WeightSource) -> "RoundedWeights":
        """Return a source of the same rounded matrices, and of what else `base` has."""
        other = RoundedWeights(base)
        other._files = dict(self._files)
        return other

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` without reading it. Raise `KeyError` for an unknown name."""
        return self.base.shape(name)

    def load(self, name: str) -> Tensor:
        """Return the tensor `name` as it is before rounding. Raise `KeyError` for an unknown name."""
        return self.base.load(name)

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of the tensor `name` as they are before rounding. Raise `KeyError` for an unknown name."""
        return load_rows(self.base, name, rows)

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return the rounded rows of a matrix, or `base`'s rows in that format; None if there are none.

        `rows` are the numbers of those that are wanted, all if it is None.
        """
        form, file = self._files.get(MatrixKey(name, transposed), ("", None))
        if file is None or form != format_name:
            packed = getattr(self.base, "packed", None)
            return None if packed is None else packed(name, format_name, transposed, *(() if rows is None else (rows,)))
        stored = f"{name}.T" if transposed else name
        rounded = read_tensors(file, only=stored)[0][stored]
        return rounded if rows is None else rounded[rows]
