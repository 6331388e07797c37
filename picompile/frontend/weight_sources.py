"""The weight sources of safetensors files, read one tensor at a time, and of modules in memory."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.tensor_file import TensorHeader, explaining
from picompile.frontend.weight_values import DTYPES, check_values
from picompile_passes.graph.weight_source import as_run, take_rows

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Codes(Protocol):
    """Quantized matrices of a checkpoint: `frontend.stored.StoredMatrices`."""

    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor `name` is one of them."""
        ...

    def load(self, name: str) -> Tensor:
        """Return its values in float32."""
        ...

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return the values of some of its rows."""
        ...

    def packed(self, name: str, format_name: str, rows: Tensor | None = None) -> Tensor | None:
        """Return its rows packed, where that is exact: all, or those with the numbers `rows`."""
        ...

    def is_turned(self, name: str) -> bool:
        """Return whether it is a stack of transposes of the matrices whose rows are packed."""
        ...

    def stored_format(self, name: str) -> str | None:
        """Return the format that has its numbers, None where there is none."""
        ...

    def rounds_again(self, format_name: str, transposed: bool = False) -> str | None:
        """Return what they are, such as AWQ, where `format_name` rounds their rows or columns again; else None."""
        ...


class FolderWeights:
    """A `WeightSource` over a folder. Only one shard is open at a time, and only what is asked for is read."""

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        names: Mapping[str, str],
        codes: Codes | None = None,
        zeros: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`codes` has the matrices that the files hold quantized, `zeros` the shapes of parameters that are zero."""
        self._zeros = dict(zeros or {})
        self._headers = headers
        self._codes = codes
        self._names = dict(names)
        self._checked: set[str] = set()
        self._stored: dict[str, str | None] | None = None
        self._file: Path | None = None
        self._handle: Any = None
        self._opened = contextlib.ExitStack()

    def names(self) -> Iterable[str]:
        """Return the names of the model's parameters."""
        return (*self._names, *self._zeros)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter `name`, from the header. Raises `KeyError` for a name that there is not."""
        if name in self._zeros:
            return self._zeros[name]
        return self._headers[self._names[name]].shape

    def load(self, name: str) -> Tensor:
        """Return the parameter `name` in the checkpoint's dtype, mapped from the file: it must not be written to.

        A stack of experts' matrices is copied from the files each time that it is asked for.

        Raises `KeyError` for a name that there is not, `UnsupportedModelError` for a file that has changed since and
        for values that no model has.
        """
        if name in self._zeros:
            return torch.zeros(self._zeros[name])
        header = self._headers[self._names[name]]
        return self.load_rows(name, _all_rows(header)).view(header.shape) if header.parts else self._tensor(header)

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of the matrix or stack of matrices `name`, as `picompile_passes` asks for them.

        `rows` are counted over all matrices. No other expert's tensor is read than those that have one of them, and the
        tensor of a file is mapped. Raises as `load` does.
        """
        if name in self._zeros:
            return torch.zeros(len(rows), self._zeros[name][-1])
        header = self._headers[self._names[name]]
        if not header.parts:
            return self._rows(header, rows)
        values = torch.empty(len(rows), header.shape[-1], dtype=_TORCH_DTYPES.get(header.dtype, torch.float32))
        for part, places, own in _by_part(header, rows):
            values[as_run(places)] = self._rows(part, own)
        return values

    def _rows(self, header: TensorHeader, rows: Tensor) -> Tensor:
        """Return some rows of the tensor of a file, or of the matrices that it stands for."""
        if self._codes is None or not self._codes.is_quantized(header.name):
            return take_rows(self._tensor(header), rows)
        values = self._codes.load_rows(header.name, rows)
        check_values(values, f"{header.file}: {header.name}", "checkpoint")
        return values

    def _tensor(self, header: TensorHeader) -> Tensor:
        """Return the tensor of a file, or the matrix that several stand for."""
        file, stored = header.file, header.name
        if self._codes is not None and self._codes.is_quantized(stored):
            values = self._codes.load(stored)
            check_values(values, f"{file}: {stored}", "checkpoint")
            return values
        with explaining(file, f"cannot read {stored}"):
            if self._file != file:
                self.close()
                self._handle = self._opened.enter_context(safe_open(str(file), framework="pt", device="cpu"))
                self._file = file
            tensor = self._handle.get_tensor(stored)
        if not isinstance(tensor, Tensor):
            raise UnsupportedModelError(f"{file}: {stored} is not a tensor")
        if stored not in self._checked:
            check_values(tensor, f"{file}: {stored}", "checkpoint")
            self._checked.add(stored)
        return tensor

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return the rows of a matrix that the files hold quantized, packed without rounding them again, or None.

        uint8 [rows, row bytes] in `format_name`. None stands for everything else, and for rows that would have to be
        `transposed`: those that the files have are rows of the parameter, or of its transposes where it is among
        `turned`. `rows` are the numbers of those that are wanted, all if it is None.
        """
        if name in self._zeros:
            return None
        if self._codes is None or transposed != self._is_turned(name):
            return None
        header = self._headers[self._names[name]]
        if not header.parts:
            only = header.name
            return self._codes.packed(only, format_name, rows) if self._codes.is_quantized(only) else None
        wanted = _all_rows(header) if rows is None else rows
        result: Tensor | None = None
        for part, places, own in _by_part(header, wanted):
            packed = self._codes.packed(part.name, format_name, own) if self._codes.is_quantized(part.name) else None
            if packed is None:
                return None
            if result is None:
                result = torch.empty(len(wanted), packed.shape[1], dtype=torch.uint8)
            result[as_run(places)] = packed
        return result

    def turned(self) -> frozenset[str]:
        """Return the parameters that are stacks of transposes of the matrices whose rows are packed."""
        return frozenset(name for name in self._names if self._is_turned(name))

    def _is_turned(self, name: str) -> bool:
        codes = self._codes
        return codes is not None and any(
            codes.is_quantized(stored) and codes.is_turned(stored) for stored in self._stored_names(name)
        )

    def _stored_names(self, name: str) -> list[str]:
        """Return the names of the tensors that the parameter `name` is made of, in the order of its rows."""
        header = self._headers[self._names[name]]
        return [part.name for parts in header.parts for part in parts] or [header.name]

    def stored(self) -> Mapping[str, str | None]:
        """Return the format that has the numbers of each quantized matrix, by parameter; None where there is none."""
        codes = self._codes
        if codes is None:
            return {}
        # Found once: it takes all scales and zeros.
        if self._stored is None:
            tensors = {name: self._stored_names(name) for name in self._names}
            quantized = {name: parts for name, parts in tensors.items() if any(map(codes.is_quantized, parts))}
            self._stored = {name: _only(map(self._format, parts)) for name, parts in quantized.items()}
        return self._stored

    def _format(self, stored: str) -> str | None:
        codes = self._codes
        return codes.stored_format(stored) if codes is not None and codes.is_quantized(stored) else None

    def rounds_again(self, format_name: str, transposed: bool = False) -> str | None:
        """Return what the matrices are that `format_name` rounds a second time, such as AWQ; None where it does not.

        With `transposed` it is asked of matrices whose columns are packed as rows.
        """
        return None if self._codes is None else self._codes.rounds_again(format_name, transposed)

    def close(self) -> None:
        """Close the shard that is open, if one is."""
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


def _all_rows(header: TensorHeader) -> Tensor:
    """Return the numbers of all rows of a stack of matrices."""
    return torch.arange(header.shape[0] * header.shape[1])


def _by_part(header: TensorHeader, rows: Tensor) -> Iterator[tuple[TensorHeader, Tensor, Tensor]]:
    """Yield the parts of a stack that have some of `rows`: the part, the places of its rows in `rows`, and its rows."""
    ends = torch.tensor([part.shape[0] for part in header.parts[0]]).cumsum(0)
    expert, row = rows // header.shape[1], rows % header.shape[1]
    kind = torch.bucketize(row, ends, right=True)
    row = row - torch.cat([torch.zeros(1, dtype=torch.int64), ends])[kind]
    numbers, order = (expert * len(ends) + kind).sort(stable=True)
    counts = torch.bincount(numbers)
    found = counts.nonzero().flatten().tolist()
    for number, places in zip(found, torch.split(order, counts[found].tolist()), strict=True):
        yield header.parts[number // len(ends)][number % len(ends)], places, row[places]


def _only(formats: Iterable[str | None]) -> str | None:
    """Return the one format of several matrices, None where they have no format or several."""
    found = set(formats)
    return found.pop() if len(found) == 1 else None


class ModuleWeights:
    """A `WeightSource` over the parameters of a module in memory."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)

    def names(self) -> Iterable[str]:
        """Return the names of the parameters."""
        return self._parameters.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter `name`. Raises `KeyError` for a name that there is not."""
        return tuple(self._parameters[name].shape)

    def load(self, name: str) -> Tensor:
        """Return the parameter `name` itself, on the CPU. Raises `KeyError` for a name that there is not."""
        return self._parameters[name].detach().to("cpu")
