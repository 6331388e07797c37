"""What the headers of a folder's safetensors files say: which tensors there are, of which shape and dtype."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from picompile.errors import UnsupportedModelError, UsageError
from picompile.json_file import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The largest that is known, of a model of 90,000 tensors, has 9 MB.
_MOST_INDEX_BYTES = 64 << 20

# What reading a file can end with.
READ_ERRORS = (SafetensorError, OSError, ValueError)


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor lies and what it is. `dtype` as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def check_folder(folder: Path) -> None:
    """Raises `UsageError` where there is no model folder, `UnsupportedModelError` where it is not in safetensors."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no config.json in it; MODEL is a Hugging Face folder")
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UnsupportedModelError(
            f"{folder}: weights are pickled (.bin), which can run code when read; convert to safetensors: "
            "load with transformers where you trust them and save with save_pretrained"
        )
    raise UnsupportedModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """The headers of all tensors of a folder that `check_folder` accepts.

    Raises `UnsupportedModelError` for damaged files.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return _headers_of_file(folder / SINGLE_FILE)
    weight_map = _read_index(index)
    if (folder / SINGLE_FILE).is_file() and set(weight_map.values()) != {SINGLE_FILE}:
        raise UnsupportedModelError(
            f"{folder}: has {SINGLE_FILE} and {INDEX_FILE}, which names other files: two models; take one away"
        )
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise UnsupportedModelError(f"{index}: names {name}, which is not there")
        headers |= _headers_of_file(folder / name)
    for name, file in weight_map.items():
        if name not in headers or headers[name].file != folder / file:
            raise UnsupportedModelError(f"{index}: says that {name} is in {file}, but it is not")
    return {name: headers[name] for name in weight_map}


def _read_index(index: Path) -> dict[str, str]:
    content = read_json_object(index, _MOST_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(content.get("metadata", {}), dict):
        raise UnsupportedModelError(f"{index}: not an index of safetensors files: metadata is no object")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UnsupportedModelError(f"{index}: not an index of safetensors files: weight_map has no names of files")
    if any(Path(file).name != file or file in ("", "..") or len(file) > 200 for file in weight_map.values()):
        raise UnsupportedModelError(f"{index}: names files outside its folder")
    if not weight_map:
        raise UnsupportedModelError(f"{index}: names no tensors")
    return weight_map


def _headers_of_file(file: Path) -> dict[str, TensorHeader]:
    try:
        with open_file(file) as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
            return {name: TensorHeader(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except READ_ERRORS as error:
        raise UnsupportedModelError(f"{file}: truncated or damaged: {one_line(error)}") from error


def open_file(file: Path) -> contextlib.AbstractContextManager[Any]:
    """One safetensors file, as a context. Raises what `READ_ERRORS` names where it cannot be read."""
    handle: contextlib.AbstractContextManager[Any] = safe_open(str(file), framework="pt", device="cpu")
    return handle


def one_line(error: Exception) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(error).split())
