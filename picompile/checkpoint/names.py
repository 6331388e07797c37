"""Which tensor of a checkpoint is which parameter of the model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from picompile.checkpoint.headers import TensorHeader, open_file
from picompile.errors import UnsupportedModelError

# The names that safetensors has for the dtypes we read, and ours for them.
DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# Tensors that checkpoints hold besides a model's weights: buffers of old versions of transformers, and predictors that
# the authors of Bamboo trained for their own runtime.
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|\.position_ids|\.mlp\.predictor\..*)$")

_COMPARED_ROWS = 4096


@dataclass(frozen=True)
class ExpectedTensor:
    """A parameter of the model: its shape, and the other names it has where it is tied."""

    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


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


def ties_hold(expected: Mapping[str, ExpectedTensor], headers: Mapping[str, TensorHeader], prefix: str) -> bool:
    """Whether tied parameters that a checkpoint holds under several of their names have the same values there.

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
    with open_file(headers[left].file) as left_file, open_file(headers[right].file) as right_file:
        slices = left_file.get_slice(left), right_file.get_slice(right)
        starts = range(0, headers[left].shape[0], _COMPARED_ROWS)
        blocks = ([tensor[start : start + _COMPARED_ROWS] for tensor in slices] for start in starts)
        return all(torch.equal(*block) for block in blocks)


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
