"""The weights of a GGUF file each of whose parameters is one tensor, read without a model of transformers.

`GgufModel` finds which tensor is which parameter. Where that is known, no more is needed to read them than the header
and the order of rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.block_codes import STORED
from picompile.frontend.gguf.blocks import pack_f16, read_blocks, read_tensor, repack
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.mapped import mapped
from picompile.frontend.weight_values import check_values, damaged
from picompile_passes.formats import FORMATS


@dataclass(frozen=True)
class PlainPlace:
    """A parameter that is one tensor of the file, `source`, in the dtype and shape that it is loaded in.

    `order` has the tensor's row for each row of the parameter; None where they are the same.
    """

    source: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None


class PlainWeights:
    """A `WeightSource` over a file with this `header`; `places` has the parameters by name.

    It gives the tensors that `GgufWeights` gives, bit by bit, and refuses the same.
    """

    def __init__(self, header: GgufHeader, places: Mapping[str, PlainPlace]) -> None:
        """Raise `UnsupportedModelError` for a file that has become shorter, `KeyError` for a tensor it lacks."""
        self._header, self._places = header, places
        entries = [header.tensors[place.source] for place in places.values()]
        self._data = {file: mapped(file) for file in {entry.file: None for entry in entries}}
        for entry in entries:
            if len(self._data[entry.file]) < entry.offset + entry.size_bytes:
                raise UnsupportedModelError(f"{entry.file}: has become shorter while it was read")

    def names(self) -> Iterable[str]:
        """Return the names of the parameters."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter `name`. Raises `KeyError` for a name that there is not."""
        return self._places[name].shape

    def load(self, name: str) -> Tensor:
        """Return the parameter `name`, as `GgufModel.load` does: it must not be written to."""
        place = self._places[name]
        entry = self._header.tensors[place.source]
        values = read_tensor(self._data[entry.file], entry)
        if place.order is not None:
            values = values[torch.tensor(place.order)]
        values = values.view(place.shape)
        check_values(values, f"{self._header.file}: {name}", "file")
        return values

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return the rows of the parameter `name` without rounding them again, or None, as `GgufModel.packed` does."""
        place = self._places[name]
        entry = self._header.tensors[place.source]
        if not 2 <= len(place.shape) <= 3:
            return None
        if FORMATS[format_name].scale is None:
            if place.dtype != "F16":
                return None
            values = self.load(name)
            matrix = (values.transpose(-1, -2) if transposed else values).flatten(0, -2)
            return pack_f16(matrix if rows is None else matrix[rows])
        is_kept = len(place.shape) == 2 or place.order is None
        if transposed or not is_kept or STORED.get(entry.type) != format_name:
            return None
        blocks = read_blocks(self._data[entry.file], entry)
        chosen = None if place.order is None else np.array(place.order, np.int64)
        if rows is not None:
            chosen = rows.numpy() if chosen is None else chosen[rows.numpy()]
        try:
            return repack(blocks if chosen is None else blocks[chosen], entry.type, entry.shape[-1])
        except ValueError as error:
            raise damaged(f"{self._header.file}: {name}", "file") from error
