"""The blocks of GGML's tensor types: unpacked to numbers, or repacked as rows of ours without rounding again."""

import math
import mmap
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from picompile.frontend.gguf.block_codes import STORED, read_codes
from picompile.frontend.gguf.header import TensorEntry
from picompile.frontend.gguf.tensor_types import TENSOR_TYPES
from picompile_passes.formats import E8M0, FORMATS
from picompile_passes.formats.grids import has_powers
from picompile_passes.formats.packing import pack_codes
from picompile_passes.graph.weight_source import as_run, take_rows

Bytes = npt.NDArray[np.uint8]

# Types that are numbers, not blocks, and what torch calls them.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types that the `gguf` package unpacks.
UNPACKED = frozenset(
    {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
        *("MXFP4", "NVFP4"),
        *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
    }
)

_BLOCKS = {name: (elements, size_bytes) for name, elements, size_bytes in TENSOR_TYPES.values()}
# Unpacking takes some 16 bytes for an element beside the result.
_STEP_ELEMENTS = 1 << 20


def row_bytes(type_name: str, columns: int) -> int:
    """Return the bytes of a row of `columns` numbers."""
    elements, size_bytes = _BLOCKS[type_name]
    return columns // elements * size_bytes


def read_tensor(data: mmap.mmap, entry: TensorEntry) -> Tensor:
    """Return a tensor of the mapped file `data` in the file's shape; it must not be written to."""
    if entry.type in PLAIN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory that must not be written to
            flat = torch.frombuffer(data, dtype=PLAIN[entry.type], count=math.prod(entry.shape), offset=entry.offset)
        return flat.view(entry.shape)
    return unpack(read_blocks(data, entry), entry.type, entry.shape[-1]).view(entry.shape)


def read_blocks(data: mmap.mmap, entry: TensorEntry) -> Bytes:
    """Return the bytes of a tensor of the mapped file `data`, uint8 [rows, row bytes]."""
    stored = np.frombuffer(data, np.uint8, entry.size_bytes, entry.offset)
    return stored.reshape(-1, row_bytes(entry.type, entry.shape[-1]))


def read_rows(data: mmap.mmap, entry: TensorEntry, rows: npt.NDArray[np.int64]) -> Tensor:
    """Return some rows of a tensor of the mapped file `data`, [rows, columns], counted over all its matrices."""
    if entry.type in PLAIN:
        return take_rows(read_tensor(data, entry), torch.from_numpy(rows))
    run = as_run(torch.from_numpy(rows))
    return unpack(read_blocks(data, entry)[run if isinstance(run, slice) else rows], entry.type, entry.shape[-1])


def part_of(entry: TensorEntry, first: int, last: int) -> TensorEntry:
    """Return the matrices from `first` to before `last` of a tensor that is a stack of them."""
    size_bytes, count = entry.size_bytes // entry.shape[0], last - first
    start = entry.offset + first * size_bytes
    return replace(entry, shape=(count, *entry.shape[1:]), offset=start, size_bytes=count * size_bytes)


def unpack(data: Bytes, type_name: str, columns: int) -> Tensor:
    """Return blocks uint8 [rows, row bytes] as float32 [rows, columns], a few rows at a time."""
    kind = GGMLQuantizationType[type_name]
    values = torch.empty(len(data), columns, dtype=torch.float32)
    target = values.numpy()
    with np.errstate(all="ignore"):
        for start, stop in _steps(len(data), columns):
            target[start:stop] = dequantize(data[start:stop], kind)
    return values


def repack(data: Bytes, type_name: str, columns: int) -> Tensor | None:
    """Return blocks uint8 [rows, row bytes] as rows of the format that has their numbers: the same in other places.

    None where a scale of MXFP4 is so large that weights are infinite, or below the numbers that float32 has whole.
    Raises `ValueError` for scales that are no numbers.
    """
    form, size_bytes = FORMATS[STORED[type_name]], _BLOCKS[type_name][1]
    packed = torch.zeros(len(data), form.row_bytes(columns), dtype=torch.uint8)
    for start, stop in _steps(len(data), columns):
        codes, grid = read_codes(data[start:stop], type_name, size_bytes, form)
        if form.data_bits == 8:
            codes = codes.view(torch.int8)
        if form.scale == E8M0 and not has_powers(grid.scale, form):
            return None
        for values in (grid.scale, grid.minimum):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError("scales that are no numbers")
        pack_codes(codes, grid, columns, packed[start:stop])
    return packed


def pack_f16(values: Tensor) -> Tensor:
    """Return float16 [rows, columns] as rows of f16, uint8."""
    form, (rows, columns) = FORMATS["f16"], values.shape
    packed = torch.zeros(rows, form.row_bytes(columns) // 2, dtype=torch.float16)
    packed[:, :columns] = values
    return packed.view(torch.uint8)


def _steps(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _STEP_ELEMENTS // max(1, columns))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))
