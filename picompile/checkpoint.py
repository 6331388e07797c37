"""Weights of a Hugging Face folder: safetensors, sharded or not, read one tensor at a time.

Everything that can be wrong with a checkpoint and shows in its headers is found before any weight is read.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from picompile.errors import UnsupportedModelError, UsageError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The names that safetensors has for the dtypes we read, and ours for them.
DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# Tensors that checkpoints hold besides a model's weights: buffers of old versions of transformers, and predictors that
# the authors of Bamboo trained for their own runtime.
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|\.position_ids|\.mlp\.predictor\..*)$")

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor lies and what it is. `dtype` as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpectedTensor:
    """A parameter of the model: its shape, and the other names it has where it is tied."""

    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


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
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(f"{index}: not an index of safetensors files: {error!r}") from error
    raise UnsupportedModelError(f"{index}: names files outside its folder")


def _headers_of_file(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
            return {name: TensorHeader(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise UnsupportedModelError(f"{file}: truncated or damaged: {_one_line(error)}") from error


def match_names(
    folder: Path, expected: Mapping[str, ExpectedTensor], headers: Mapping[str, TensorHeader], prefix: str
) -> dict[str, str]:
    """For each parameter of the model, the name of its tensor in the checkpoint.

    A checkpoint saved from the base model lacks `prefix` (`model.`, `transformer.`) in its names; one saved from a
    wrapper may have it once more. Raises `UnsupportedModelError` for a tensor that is missing, of another shape, of a
    dtype that is not read, or one too many.
    """
    found: dict[str, str] = {}
    for name, tensor in expected.items():
        candidates = [variant for own in (name, *tensor.aliases) for variant in _variants(own, prefix)]
        match = next((candidate for candidate in candidates if candidate in headers), None)
        if match is None:
            raise UnsupportedModelError(f"{folder}: no tensor {name}, which config.json asks for")
        _check_tensor(folder, match, headers[match], tensor.shape)
        found[name] = match
    used = {variant for name, t in expected.items() for own in (name, *t.aliases) for variant in _variants(own, prefix)}
    for name in headers:
        if name not in used and not _IGNORED.search(name):
            raise UnsupportedModelError(
                f"{folder}: holds {name}, which the model that config.json describes has no place for"
            )
    return found


def _variants(name: str, prefix: str) -> tuple[str, ...]:
    return (name, name.removeprefix(prefix), prefix + name)


def _check_tensor(folder: Path, name: str, header: TensorHeader, shape: tuple[int, ...]) -> None:
    if header.dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{header.file}: {name} is {header.dtype}; only {', '.join(DTYPES)} are read; use the original checkpoint"
        )
    if header.shape != shape:
        raise UnsupportedModelError(
            f"{header.file}: {name} is {list(header.shape)}, but {folder / 'config.json'} makes it {list(shape)}"
        )


class FolderWeights:
    """A `WeightSource` over a folder. Only one shard is open at a time, and only what is asked for is read."""

    def __init__(self, headers: Mapping[str, TensorHeader], names: Mapping[str, str]) -> None:
        self._headers = headers
        self._names = dict(names)
        self._file: Path | None = None
        self._handle: Any = None
        self._open = contextlib.ExitStack()

    def names(self) -> Iterable[str]:
        """The names of the model's parameters."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the parameter `name`, from the header. Raises `KeyError` for a name that there is not."""
        return self._headers[self._names[name]].shape

    def load(self, name: str) -> Tensor:
        """The parameter `name` in the checkpoint's dtype, mapped from the file: it must not be written to.

        Raises `KeyError` for a name that there is not, `UnsupportedModelError` for a file that has changed since.
        """
        stored = self._names[name]
        file = self._headers[stored].file
        try:
            if self._file != file:
                self.close()
                self._handle = self._open.enter_context(safe_open(str(file), framework="pt", device="cpu"))
                self._file = file
            tensor = self._handle.get_tensor(stored)
        except (SafetensorError, OSError, ValueError) as error:
            raise UnsupportedModelError(f"{file}: cannot read {stored}: {_one_line(error)}") from error
        if not isinstance(tensor, Tensor):
            raise UnsupportedModelError(f"{file}: {stored} is not a tensor")
        return tensor

    def close(self) -> None:
        """Closes the shard that is open, if one is."""
        self._open.close()
        self._file = self._handle = None

    @property
    def dtype(self) -> str:
        """`f32`, `f16` or `bf16`: what most bytes of the checkpoint are."""
        sizes = dict.fromkeys(_ELEMENT_BYTES, 0)
        for stored in self._names.values():
            header = self._headers[stored]
            sizes[header.dtype] += torch.Size(header.shape).numel() * _ELEMENT_BYTES[header.dtype]
        return DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


class ModuleWeights:
    """A `WeightSource` over the parameters of a module in memory."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)

    def names(self) -> Iterable[str]:
        """The names of the parameters."""
        return self._parameters.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the parameter `name`. Raises `KeyError` for a name that there is not."""
        return tuple(self._parameters[name].shape)

    def load(self, name: str) -> Tensor:
        """The parameter `name` itself, on the CPU. Raises `KeyError` for a name that there is not."""
        return self._parameters[name].detach().to("cpu")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
