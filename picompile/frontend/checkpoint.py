"""A checkpoint folder: the tensors of its safetensors files, as parameters of a model, and its fingerprint."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.activation import check_activation
from picompile.frontend.json_file import read_json_object
from picompile.frontend.model_file import is_gguf, opened_gguf, read_config
from picompile.frontend.tensor_file import TensorHeader, headers_of, opened
from picompile.frontend.weight_values import DTYPES
from picompile.output.files import read_safetensors_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The largest that is known, of a model of 90,000 tensors, has 9 MB.
_MOST_INDEX_BYTES = 64 << 20


def check_folder(folder: Path) -> None:
    """Raise `UsageError` where there is no model folder, `UnsupportedModelError` where it is not in safetensors."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    _check_adapter(folder)
    if not (folder / "config.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))[:3]
        hint = f"; {' and '.join(inside)} in it has one" if inside else ""
        raise UsageError(f"{folder}: no config.json in it; MODEL is a Hugging Face folder{hint}")
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UnsupportedModelError(
            f"{folder}: weights are pickled (.bin), which can run code when read; convert to safetensors: "
            "load with transformers where you trust them and save with save_pretrained"
        )
    raise UnsupportedModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _check_adapter(folder: Path) -> None:
    """Refuse an adapter, which transformers puts on the model that it names: its own weights are no model."""
    if not (folder / "adapter_config.json").is_file():
        return
    if (folder / "config.json").is_file() and not any(folder.glob("adapter_model.*")):
        # The rest of a merge.
        return
    base = read_json_object(folder / "adapter_config.json").get("base_model_name_or_path")
    named = f" of {base[:200]}" if isinstance(base, str) and base.isprintable() and base else ""
    raise UnsupportedModelError(
        f"{folder}: an adapter (LoRA){named}; merge it into its model: load both with peft, and save what "
        "merge_and_unload returns"
    )


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a folder that `check_folder` accepts.

    Raises `UnsupportedModelError` for damaged files.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return headers_of(folder / SINGLE_FILE)
    weight_map = _read_index(index)
    if (folder / SINGLE_FILE).is_file() and set(weight_map.values()) != {SINGLE_FILE}:
        raise UnsupportedModelError(
            f"{folder}: has {SINGLE_FILE} and {INDEX_FILE}, which names other files: two models; take one away"
        )
    shards: dict[str, dict[str, TensorHeader]] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise UnsupportedModelError(f"{index}: names {file}, which is not there")
        shards[file] = headers_of(folder / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise UnsupportedModelError(f"{index}: says that {name} is in {file}, but it is not")
    # Shards may have tensors that the index leaves out, and transformers reads them; of two it takes the last.
    headers: dict[str, TensorHeader] = {}
    for file, shard in shards.items():
        for name, header in shard.items():
            if name in headers:
                raise UnsupportedModelError(f"{folder}: {name} is in {headers[name].file.name} and in {file}")
            headers[name] = header
    return headers


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


# Which tensor of a checkpoint is which parameter of the model.


# Tensors that checkpoints hold besides a model's weights: buffers of old versions of transformers.
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|\.position_ids)$")

_COMPARED_ROWS = 4096


class StoredTensor(Protocol):
    """Facts that are needed of a tensor before it is read, whatever file it is in."""

    @property
    def file(self) -> Path:
        """The file that holds it."""
        ...

    @property
    def dtype(self) -> str:
        """Its dtype, as safetensors names it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def name(self) -> str:
        """Its name in the file."""
        ...


@dataclass(frozen=True)
class ExpectedTensor:
    """A parameter of the model: its shape, and the other names it has where it is tied."""

    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


def match_names(
    folder: Path,
    expected: Mapping[str, ExpectedTensor],
    headers: Mapping[str, StoredTensor],
    prefix: str,
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, str]:
    """Return for each parameter of the model the name of its tensor in the checkpoint.

    A checkpoint saved from the base model lacks `prefix` (`model.`, `transformer.`) in its names; one saved from a
    wrapper may have it once more. Raises `UnsupportedModelError` for a tensor that is missing, of another shape, of a
    dtype that is not read, or one too many.
    """
    found: dict[str, str] = {}
    for name, tensor in expected.items():
        stored = [_stored_names(folder, own, prefix, headers) for own in (name, *tensor.aliases)]
        match = next((candidate for candidate in stored if candidate is not None), None)
        if match is None:
            raise UnsupportedModelError(f"{folder}: no tensor {name}, which config.json asks for")
        _check_tensor(folder, match, headers[match], tensor.shape)
        found[name] = match
    used = {variant for name, t in expected.items() for own in (name, *t.aliases) for variant in _variants(own, prefix)}
    for name in headers:
        if name not in used and not _IGNORED.search(name) and not is_ignored(name):
            raise UnsupportedModelError(
                f"{folder}: holds {headers[name].name}, which the model that config.json describes has no place for"
            )
    return found


def is_stored(name: str, tensor: ExpectedTensor, headers: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a checkpoint has the parameter `name`, under any of its names."""
    return any(variant in headers for own in (name, *tensor.aliases) for variant in _variants(own, prefix))


def ties_hold(expected: Mapping[str, ExpectedTensor], headers: Mapping[str, TensorHeader], prefix: str) -> bool:
    """Return whether tied parameters that a checkpoint holds under several of their names have the same values there.

    transformers does not tie where they differ, whatever config.json says. Reads these tensors, in blocks of rows.
    """
    for name, tensor in expected.items():
        variants = (_variants(own, prefix) for own in (name, *tensor.aliases))
        stored = [found[0] for names in variants if (found := [n for n in names if n in headers])]
        if any(not _equal_tensors(headers, stored[0], other) for other in stored[1:]):
            return False
    return True


def _equal_tensors(headers: Mapping[str, TensorHeader], left: str, right: str) -> bool:
    if headers[left].shape != headers[right].shape or headers[left].dtype != headers[right].dtype:
        return False
    if headers[left].quantized or headers[right].quantized:
        return False
    with opened(headers[left].file) as left_file, opened(headers[right].file) as right_file:
        slices = left_file.get_slice(headers[left].name), right_file.get_slice(headers[right].name)
        starts = range(0, headers[left].shape[0], _COMPARED_ROWS)
        blocks = ([tensor[start : start + _COMPARED_ROWS] for tensor in slices] for start in starts)
        return all(torch.equal(*block) for block in blocks)


def _stored_names(folder: Path, name: str, prefix: str, headers: Mapping[str, Any]) -> str | None:
    """Return the name under which a checkpoint has the parameter `name`, None where it has it not."""
    found = [variant for variant in dict.fromkeys(_variants(name, prefix)) if variant in headers]
    if len(found) > 1:
        raise UnsupportedModelError(f"{folder}: holds {found[0]} and {found[1]}: two tensors for one parameter")
    return found[0] if found else None


def _variants(name: str, prefix: str) -> tuple[str, ...]:
    return (name, name.removeprefix(prefix), prefix + name)


def _check_tensor(folder: Path, name: str, header: StoredTensor, shape: tuple[int, ...]) -> None:
    if header.dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{header.file}: {name} is {header.dtype}; only {', '.join(DTYPES)} are read; use the original checkpoint"
        )
    if header.shape != shape:
        is_turned = getattr(header, "quantized", False) and header.shape == shape[::-1]
        turned = "; quantized matrices whose rows are inputs, as GPT-2's are, are not read" if is_turned else ""
        made = f"{folder / 'config.json'} makes it {list(shape)}"
        raise UnsupportedModelError(f"{header.file}: {name} is {list(header.shape)}, but {made}{turned}")


# The fingerprint of a model, by which a profile or predictors of another one are told.

# Bytes of the start and of the end of each tensor that are hashed. Training changes every one of them; reading all
# would take a minute for each 100 GB.
_SAMPLE_BYTES = 4096


def fingerprint(folder: Path, activation: str | None = None) -> str:
    """Return hex digits that are the same for the same config.json and tensors, however these are spread over files.

    It depends on each tensor's name, dtype and shape and on 4 kB from either end of its data. A GGUF file has a
    fingerprint of its own. With an `activation`, as `load_model` takes it, it is that of the config.json that names
    this activation. Raises `UsageError` or `UnsupportedModelError`, as `load_model` does, for what is no model folder.
    """
    check_activation(activation)
    if is_gguf(folder):
        return opened_gguf(folder).fingerprint(read_config(folder, activation))
    check_folder(folder)
    headers = read_headers(folder)
    config = read_config(folder, activation)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    samples = {
        name: data for file in sorted({header.file for header in headers.values()}) for name, data in _ends(file)
    }
    for name in sorted(headers):
        description = json.dumps([name, headers[name].dtype, headers[name].shape])
        digest.update(len(samples[name]).to_bytes(8, "little") + description.encode() + samples[name])
    return digest.hexdigest()


def _ends(file: Path) -> Iterator[tuple[str, bytes]]:
    """Give each tensor's name and the samples of its data. The header was found whole by `read_headers`."""
    data_start, header = read_safetensors_header(file)
    with file.open("rb") as opened:
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            opened.seek(data_start + start)
            first = opened.read(min(_SAMPLE_BYTES, end - start))
            opened.seek(data_start + max(start, end - _SAMPLE_BYTES))
            yield name, first + opened.read(min(_SAMPLE_BYTES, end - start))
