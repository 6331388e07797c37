"""Detection of the kind of a user's SOURCE, by names and headers alone."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.gguf.header import GgufHeader, TensorEntry, read_header
from picompile.frontend.json_file import read_json_object
from picompile.predictors.powerinfer.torch_file import check_torch_file
from picompile.quantities import LARGEST_FLOAT32

PARTS = ("fc1", "fc2")
READ_TYPES = ("F32", "F16", "Q4_0", "Q8_0")

_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]*)\.(fc1|fc2)\.weight")
_PREDICTOR = re.compile(r"model_(0|[1-9][0-9]*)\.pt")
_ACTIVATION = re.compile(r"activation_(0|[1-9][0-9]*)\.pt")
_SPARSE_THRESHOLD = "powerinfer.sparse_threshold"
_LARGEST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class PredictorSource:
    """The files of predictors: one GGUF file, `header`, or `files`, a torch file a layer; one of them is given.

    `threshold` is the sparse threshold that is written there. `activations` are the files with activation statistics
    by layer; there may be none.
    """

    path: Path
    threshold: float
    header: GgufHeader | None = None
    files: dict[int, Path] = field(default_factory=dict)
    activations: dict[int, Path] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """The shapes of each layer's `fc1` and `fc2`, where they are known before anything is read."""
        return {layer: {part: t.shape for part, t in parts.items()} for layer, parts in self.tensors.items()}

    @property
    def tensors(self) -> dict[int, dict[str, TensorEntry]]:
        """The predictors' tensors in the GGUF file by layer and part; empty where there is none."""
        found: dict[int, dict[str, TensorEntry]] = {}
        for name, entry in (self.header.tensors if self.header else {}).items():
            if match := _TENSOR.fullmatch(name):
                found.setdefault(int(match[1]), {})[match[2]] = entry
        return found


def find_source(path: Path) -> PredictorSource:
    """Return the source at `path`: a PowerInfer GGUF file, a folder with one, or a folder of `model_N.pt`.

    Raises `UsageError`, in one line, for anything else, and for files whose headers are not in order.
    """
    if path.is_dir():
        return _find_in_folder(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if not path.is_file():
        raise UsageError(f"{path}: neither a file nor a folder")
    return _gguf_source(path)


def _find_in_folder(folder: Path) -> PredictorSource:
    models = sorted(folder.glob("*.gguf"))
    if len(models) > 1:
        raise UsageError(f"{folder}: holds {len(models)} GGUF files; name one of them, as {models[0]}")
    if models:
        return _gguf_source(models[0])
    files = _numbered(folder, _PREDICTOR)
    if files:
        return PredictorSource(folder, _configured_threshold(folder), files=files, activations=_activations(folder))
    if _numbered(folder, _ACTIVATION) or _numbered(folder / "activation", _ACTIVATION):
        raise UsageError(f"{folder}: holds activation statistics, but no predictors: no *.gguf and no model_N.pt")
    raise UsageError(f"{folder}: neither *.gguf nor model_0.pt is there, so it holds none of PowerInfer's predictors")


def _gguf_source(file: Path) -> PredictorSource:
    header = read_header(file)
    threshold = _threshold(file, _SPARSE_THRESHOLD, header.values.get(_SPARSE_THRESHOLD, 0.0))
    source = PredictorSource(file, threshold, header, activations=_activations(file.parent))
    if not source.tensors:
        split = any(name.endswith(".gpu_idx") for name in header.tensors)
        what = "a GPU split; name the model that it was made for" if split else "a model without predictors"
        raise UsageError(f"{file}: holds no tensor blk.0.fc1.weight: {what}; PowerInfer's are in *.powerinfer.gguf")
    for parts in source.tensors.values():
        for entry in parts.values():
            if entry.type not in READ_TYPES:
                raise UsageError(f"{file}: {entry.name} is {entry.type}; read are {', '.join(READ_TYPES)}")
    return source


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """The files of `folder` that `pattern` matches by their number, each with a header in order."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    for path in found.values():
        check_torch_file(path)
    return dict(sorted(found.items()))


def _activations(folder: Path) -> dict[int, Path]:
    return _numbered(folder / "activation", _ACTIVATION) or _numbered(folder, _ACTIVATION)


def _configured_threshold(folder: Path) -> float:
    file = folder / "config.json"
    if not file.is_file():
        return 0.0
    try:
        value = read_json_object(file, _LARGEST_CONFIG_BYTES).get("sparse_threshold")
    except UnsupportedModelError as error:
        raise UsageError(str(error)) from error
    return 0.0 if value is None else _threshold(file, "sparse_threshold", value)


def _threshold(file: Path, name: str, value: object) -> float:
    """Return `value` rounded to float32, with which PowerInfer compares."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_FLOAT32:
        raise UsageError(f"{file}: {name} is {str(value)[:40]!r}, not a number of float32")
    return float(value)
