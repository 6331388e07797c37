"""Predictors and statistics out of files of torch.save; in the guarded process only."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from picompile.predictors.powerinfer.handover import Part, RefusedError

# Shares of the tokens, which some write in place of counts, become counts in this many.
SHARE_TOKENS = 1_000_000


def read_files(files: Mapping[str, str]) -> list[Part]:
    """Return `layers.N.fc1` and `layers.N.fc2` from each layer's state dict. Raises `RefusedError`."""
    parts = []
    for layer, file in files.items():
        state, name_of_file = _load(file), os.path.basename(file)
        names = {f"{part}.weight": part for part in ("fc1", "fc2")}
        if not isinstance(state, Mapping) or set(state) != set(names):
            raise RefusedError(f"{name_of_file} holds {_contents(state)}, not fc1.weight and fc2.weight")
        for name, part in names.items():
            tensor = _tensor(state[name], f"{name} of {name_of_file}", file)
            parts.append(_part(f"layers.{layer}.{part}", tensor, "F16", f"{name} of {name_of_file}"))
    return parts


def read_activations(files: Mapping[str, str]) -> list[Part]:
    """Return `layers.N.counts` from each layer's statistics: the tensor's numbers, or shares turned into counts.

    Raises `RefusedError` for what is no list of numbers from zero.
    """
    parts = []
    for layer, file in files.items():
        origin = os.path.basename(file)
        tensor = _tensor(_load(file), origin, file)
        if tensor.dim() != 1:
            raise RefusedError(f"{origin} is {list(tensor.shape)}, not one number a neuron")
        values = tensor.double()
        if not bool((torch.isfinite(values) & (values >= 0) & (values <= 1 << 52)).all()):
            raise RefusedError(f"{origin} holds values that are no counts")
        shares = bool((values != values.round()).any()) and bool((values <= 1).all())
        counts = (values * SHARE_TOKENS if shares else values).round().long()
        parts.append(_part(f"layers.{layer}.counts", counts, "I64", origin))
    return parts


def _load(file: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RefusedError(f"{os.path.basename(file)}: torch.load(weights_only=True) refuses it: {text}") from error


def _tensor(value: object, what: str, file: str) -> torch.Tensor:
    """`value` if it is a plain tensor that lies in `file` as a whole."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
        raise RefusedError(f"{what} is no tensor of numbers")
    # Strides of zero make a tensor of any size from one number.
    if value.numel() == 0 or value.numel() * value.element_size() > os.path.getsize(file):
        raise RefusedError(f"{what} is {list(value.shape)}, which is not what its file has")
    return value.detach()


def _part(name: str, tensor: torch.Tensor, dtype: str, origin: str) -> Part:
    def load() -> npt.NDArray[Any]:
        # numpy has no bfloat16.
        array: npt.NDArray[Any] = (tensor if dtype == "I64" else tensor.float()).numpy()
        return np.ascontiguousarray(array)

    return Part(name, tuple(tensor.shape), dtype, load, origin)


def _contents(state: object) -> str:
    return ", ".join(map(str, list(state)[:4])) if isinstance(state, Mapping) else f"a {type(state).__name__}"
