"""The weight sources: a folder's files, read one tensor at a time, and a module in memory."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.checkpoint.headers import READ_ERRORS, TensorHeader, one_line, open_file
from picompile.checkpoint.names import DTYPES
from picompile.errors import UnsupportedModelError

_LARGEST_F16 = 65504.0
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def _check_values(tensor: Tensor, name: str) -> None:
    """Refuses NaN and infinity, which would reach every logit, and a matrix that float16 cannot hold.

    One core checks 8 GB a second; to read and pack them takes many times as long. Raises `UnsupportedModelError`.
    """
    if not tensor.numel():
        return
    least, most = (float(end) for end in torch.aminmax(tensor))
    if not math.isfinite(least) or not math.isfinite(most):
        raise UnsupportedModelError(f"{name} has NaN or infinite values: the checkpoint is damaged")
    if tensor.ndim > 1 and max(-least, most) > _LARGEST_F16:
        raise UnsupportedModelError(
            f"{name} has values up to {max(-least, most):.4g}, and weights are kept in float16, which ends at 65504"
        )


class FolderWeights:
    """A `WeightSource` over a folder. Only one shard is open at a time, and only what is asked for is read."""

    def __init__(self, headers: Mapping[str, TensorHeader], names: Mapping[str, str]) -> None:
        self._headers = headers
        self._names = dict(names)
        self._checked: set[str] = set()
        self._file: Path | None = None
        self._handle: Any = None
        self._opened = contextlib.ExitStack()

    def names(self) -> Iterable[str]:
        """The names of the model's parameters."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the parameter `name`, from the header. Raises `KeyError` for a name that there is not."""
        return self._headers[self._names[name]].shape

    def load(self, name: str) -> Tensor:
        """The parameter `name` in the checkpoint's dtype, mapped from the file: it must not be written to.

        Raises `KeyError` for a name that there is not, `UnsupportedModelError` for a file that has changed since and
        for values that no model has.
        """
        stored = self._names[name]
        file = self._headers[stored].file
        try:
            if self._file != file:
                self.close()
                self._handle = self._opened.enter_context(open_file(file))
                self._file = file
            tensor = self._handle.get_tensor(stored)
        except READ_ERRORS as error:
            raise UnsupportedModelError(f"{file}: cannot read {stored}: {one_line(error)}") from error
        if not isinstance(tensor, Tensor):
            raise UnsupportedModelError(f"{file}: {stored} is not a tensor")
        if stored not in self._checked:
            _check_values(tensor, f"{file}: {stored}")
            self._checked.add(stored)
        return tensor

    def close(self) -> None:
        """Closes the shard that is open, if one is."""
        self._opened.close()
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
