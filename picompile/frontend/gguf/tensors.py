"""The parameters of a model as tensors of a GGUF file: where the numbers of each lie, how they are moved, and a reader.

`GgufModel` finds that out by the file's metadata and a model of transformers. Where it is known, no more is needed to
read the parameters than the file's header.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.block_codes import STORED
from picompile.frontend.gguf.blocks import PLAIN, pack_f16, part_of, read_blocks, read_rows, read_tensor, repack
from picompile.frontend.gguf.experts import Indices, Stack
from picompile.frontend.gguf.header import GgufHeader, TensorEntry
from picompile.frontend.gguf.mapped import mapped
from picompile.frontend.weight_values import check_values, damaged
from picompile_passes.formats import FORMATS
from picompile_passes.graph.weight_source import as_run, take_rows


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A parameter of the model, and how it is made of tensors of the file.

    Attributes:
        file: the file, or the first of several.
        dtype, shape: what safetensors calls the dtype that the parameter is loaded in, and its shape.
        type: the file's name for how it is stored.
        sources: the names of its tensors in the file; experts' matrices of gate and up are two.
        order: the tensor's row for each row of the parameter; None where they are the same.
        stack: how the tensors of experts are joined; None for all other parameters.
        transposed: the file has the matrix transposed.
        offset: is added to each number, which is float32 then.
        convert: makes the parameter of its tensors where none of these does.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    type: str
    sources: tuple[str, ...]
    order: Indices | None = None
    stack: Stack | None = None
    transposed: bool = False
    offset: float = 0.0
    convert: Callable[[Mapping[str, Tensor]], Tensor] | None = None

    @property
    def name(self) -> str:
        """The name of the tensor in the file, the first of them where there are several."""
        return self.sources[0]

    @property
    def keeps_rows(self) -> bool:
        """Whether each row of the parameter is one row of the tensor."""
        return self.convert is None and not self.transposed and not self.offset

    def to_record(self, order: int | None) -> list[Any]:
        """Return the fields for JSON; `order` stands for the order of rows. `convert` is lost."""
        stack = None if self.stack is None else list(astuple(self.stack))
        moved = [order, stack, self.transposed, self.offset]
        return [self.dtype, list(self.shape), self.type, list(self.sources), *moved]

    @classmethod
    def from_record(cls, file: Path, record: Sequence[Any], orders: Sequence[Indices]) -> "GgufTensor":
        """Return the tensor that `to_record` was asked for; `orders` are the orders of rows by their numbers."""
        dtype, shape, kind, sources, order, stack, transposed, offset = record
        rows = None if order is None else orders[order]
        joined = None if stack is None else Stack(*stack)
        return cls(file, dtype, tuple(shape), kind, tuple(sources), rows, joined, transposed, offset)


class TensorReader:
    """A `WeightSource` over a GGUF file that is mapped into memory; `tensors` are the parameters by name."""

    def __init__(self, header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> None:
        """Raise `UnsupportedModelError` for a file that has become shorter."""
        self.header, self.tensors = header, tensors
        entries = header.tensors.values()
        self._checked: set[str] = set()
        self._data = {file: mapped(file) for file in dict.fromkeys(entry.file for entry in entries)}
        for entry in entries:
            if len(self._data[entry.file]) < entry.offset + entry.size_bytes:
                raise UnsupportedModelError(f"{entry.file}: has become shorter while it was read")

    def names(self) -> Iterable[str]:
        """Return the names of the parameters."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter `name`. Raises `KeyError` for a name that there is not."""
        return self.tensors[name].shape

    def load(self, name: str) -> Tensor:
        """Return the parameter `name`: float32, float16 or bfloat16 as the file has it, quantized types as float32.

        Memory is taken for this parameter alone; what is not converted is mapped from the file, and must not be
        written to. Raises `KeyError` for a name that there is not, `UnsupportedModelError` for NaN and infinity.
        """
        tensor = self.tensors[name]
        entries = [self.header.tensors[source] for source in tensor.sources]
        if tensor.stack is not None:
            values = self._joined(tensor.stack, entries)
        elif tensor.convert is not None:
            values = tensor.convert({entry.name: read_tensor(self._data[entry.file], entry) for entry in entries})
        else:
            values = _moved(tensor, read_tensor(self._data[entries[0].file], entries[0]))
        if values.shape != tensor.shape and without_ones(values.shape) == without_ones(tensor.shape):
            values = values.view(tensor.shape)
        if values.shape != tensor.shape:
            raise UnsupportedModelError(f"{tensor.file}: {name} is {list(values.shape)}, not {list(tensor.shape)}")
        self._check_values(name, values)
        return values

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of the matrix or stack of matrices `name`, as `picompile_passes` asks for them.

        Of experts' matrices no more is read than these rows, or the experts that have them where the file has the
        matrices transposed. Raises as `load` does.
        """
        tensor = self.tensors[name]
        stack = tensor.stack
        if stack is not None and stack.transposed:
            height = tensor.shape[-2]
            first, last = (int(end) // height for end in torch.aminmax(rows))
            entries = [part_of(self.header.tensors[source], first, last + 1) for source in tensor.sources]
            values = take_rows(self._joined(stack, entries), rows - first * height)
        elif len(tensor.shape) == 3 and (stack is not None or (tensor.keeps_rows and tensor.order is None)):
            values = torch.empty(len(rows), tensor.shape[-1], dtype=PLAIN[tensor.dtype])
            for source, (places, own) in zip(tensor.sources, _rows_of(tensor, rows.numpy()), strict=True):
                entry = self.header.tensors[source]
                values[as_run(torch.from_numpy(places))] = read_rows(self._data[entry.file], entry, own)
        else:
            return take_rows(self.load(name), rows)
        check_values(values, f"{self.header.file}: {name}", "file")
        return values

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return the parameter `name` [rows, columns] packed as `format_name`, uint8 [rows, row bytes], or None.

        With `transposed` the rows are those of the transposed matrix, in which down projections are stored by
        artifacts, and PowerInfer's files have them. A parameter of experts has a matrix for each: rows are those of all
        of them. `rows` are the numbers of rows that are wanted, all if it is None. `dequantize_rows` makes of the
        result the same numbers as `load`, bit for bit. None stands for everything that would have to be rounded again.
        Raises as `load` does.
        """
        tensor = self.tensors[name]
        if not 2 <= len(tensor.shape) <= 3:
            return None
        if FORMATS[format_name].scale is None:
            if tensor.dtype != "F16":
                return None
            values = self.load(name)
            matrix = (values.transpose(-1, -2) if transposed else values).flatten(0, -2)
            return pack_f16(matrix if rows is None else matrix[rows])
        if self.stored_format(name, transposed) != format_name:
            return None
        wanted, parts = None if rows is None else rows.numpy(), []
        for source, (places, order) in zip(tensor.sources, _rows_of(tensor, wanted), strict=True):
            if len(places) == 0:
                continue
            entry = self.header.tensors[source]
            blocks = read_blocks(self._data[entry.file], entry)
            whole = len(order) == len(blocks) and is_sorted(order)
            try:
                packed = repack(blocks if whole else blocks[order], entry.type, entry.shape[-1])
            except ValueError as error:
                raise damaged(f"{tensor.file}: {name}", "file") from error
            if packed is None:
                return None
            parts.append((places, packed))
        if len(parts) == 1:
            return parts[0][1]
        result = torch.empty(sum(len(places) for places, _ in parts), parts[0][1].shape[1], dtype=torch.uint8)
        for places, packed in parts:
            result[as_run(torch.from_numpy(places))] = packed
        return result

    def stored_format(self, name: str, transposed: bool = False) -> str | None:
        """Return the format of ours that has the numbers of the parameter `name`, or of its transpose, in its rows.

        None for plain numbers, for types that no format of ours has, and where rows are made of several tensors, but
        for those of experts, which have whole rows of each.
        """
        tensor = self.tensors[name]
        if tensor.stack is not None:
            forms = {STORED.get(self.header.tensors[source].type) for source in tensor.sources}
            return forms.pop() if len(forms) == 1 and transposed == tensor.stack.transposed else None
        if not 2 <= len(tensor.shape) <= 3 or len(tensor.sources) != 1:
            return None
        is_kept = tensor.keeps_rows and (len(tensor.shape) == 2 or tensor.order is None)
        same_rows = transposed == tensor.transposed and (transposed or is_kept)
        return STORED.get(tensor.type) if same_rows else None

    def is_turned(self, name: str) -> bool:
        """Return whether the file has the matrices of the parameter `name` transposed, as gpt-oss's experts."""
        stack = self.tensors[name].stack
        return stack is not None and stack.transposed

    def _joined(self, stack: Stack, entries: Sequence[TensorEntry]) -> Tensor:
        """Return the parameter of experts that `entries` make; numbers of several dtypes become float32."""
        parts = [read_tensor(self._data[entry.file], entry) for entry in entries]
        return stack.join(parts if len({part.dtype for part in parts}) == 1 else [part.float() for part in parts])

    def _check_values(self, name: str, values: Tensor) -> None:
        """Refuse what `checkpoint.py` refuses of safetensors, once for each parameter."""
        if name not in self._checked:
            check_values(values, f"{self.header.file}: {name}", "file")
            self._checked.add(name)


def _moved(tensor: GgufTensor, values: Tensor) -> Tensor:
    """Return the parameter that is made of one tensor by moving rows or adding a number."""
    if tensor.transposed:
        return values.T.contiguous()
    if tensor.order is not None:
        values = values[torch.from_numpy(tensor.order)]
    return values.float() + tensor.offset if tensor.offset else values


def _rows_of(tensor: GgufTensor, wanted: Indices | None) -> list[tuple[Indices, Indices]]:
    """Return for each source of a parameter the places that it fills in the `wanted` rows, and its rows there."""
    if tensor.stack is not None:
        return list(tensor.stack.rows(tensor.shape, wanted, len(tensor.sources)))
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    order = np.arange(math.prod(shape[:-1])) if tensor.order is None else tensor.order
    chosen = order if wanted is None else order[wanted]
    return [(np.arange(len(chosen)), chosen)]


def without_ones(shape: Sequence[int]) -> list[int]:
    """Return a shape without the dimensions of size 1."""
    return [size for size in shape if size != 1]


def is_sorted(order: Indices) -> bool:
    """Return whether `order` is 0, 1, 2, …"""
    return bool(np.array_equal(order, np.arange(len(order))))
