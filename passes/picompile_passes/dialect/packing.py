"""`quantize` and `dequantize`: a matrix as bytes, and back."""

from typing import Any

import torch
from torch import Tensor

from picompile_passes.dialect.operator import operator
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows, quantize_rows


def _bytes(weight: Tensor, format: str, **_: Any) -> Tensor:
    return weight.new_empty((weight.shape[0], FORMATS[format].row_bytes(int(weight.shape[1]))), dtype=torch.uint8)


@operator(part="packing", dimensions={"weight": "NK"}, result=_bytes, forms=("packing",))
def quantize(weight: Tensor, format: str) -> Tensor:
    """packed = weight in one of `FORMATS`: a matrix [rows, columns] as bytes, uint8 [rows, row_bytes]."""
    return quantize_rows(weight, format)


def _floats(packed: Tensor, columns: int, **_: Any) -> Tensor:
    return packed.new_empty((packed.shape[0], columns), dtype=torch.float32)


@operator(part="packing", dimensions={"packed": "NB"}, result=_floats, forms=("packing",))
def dequantize(packed: Tensor, format: str, columns: int) -> Tensor:
    """weight = the matrix that bytes stand for: uint8 [rows, row_bytes] → float32 [rows, columns]."""
    return dequantize_rows(packed, format, columns).contiguous()
