"""Weight formats: the bytes of a row of a matrix.

A matrix is stored row by row. A row holds its data, then its scales, then zeros up to a multiple of 64 bytes, so that
every row is one aligned, contiguous read. Columns are padded with zeros to a multiple of 32.

| format | data of a row of K columns | scales | value |
| --- | --- | --- | --- |
| `f16` | K little-endian float16 | none | data |
| `q8` | K int8 | K/32 float16 | data × scale of its group of 32 |
| `q4` | K/2 bytes, 16 a group | K/32 float16 | (nibble - 8) × scale of its group of 32 |

Byte i of a q4 group holds element i in its low and element i + 16 in its high four bits. q4 follows GGML's Q4_0 in its
arithmetic (the scale is the signed extreme of the group divided by -8), not in its layout: GGML interleaves each scale
with its 16 data bytes, which leaves no row aligned.
"""

import torch
from torch import Tensor

from picompile_passes.weight_formats import FORMATS, GROUP, ROW_ALIGNMENT_BYTES, WeightFormat

__all__ = ["FORMATS", "GROUP", "ROW_ALIGNMENT_BYTES", "WeightFormat", "dequantize_rows", "quantize_rows"]

# float16 reaches 65504; a bfloat16 checkpoint can hold more, and infinity would spread through every later layer.
_F16_MAX = 65504.0


# Rows are packed a block at a time, so that packing needs a few MB beside its input and output, whatever their size.
_BLOCK_ELEMENTS = 1 << 21


def quantize_rows(weight: Tensor, format_name: str) -> Tensor:
    """Return `weight` [rows, columns], of any float dtype, packed as uint8 [rows, row_bytes]."""
    form = FORMATS[format_name]
    rows, columns = weight.shape
    packed = torch.zeros(rows, form.row_bytes(columns), dtype=torch.uint8)
    block = max(1, _BLOCK_ELEMENTS // max(1, columns))
    for start in range(0, rows, block):
        _pack_block(weight[start : start + block], form, packed[start : start + block])
    return packed


def _pack_block(weight: Tensor, form: WeightFormat, packed: Tensor) -> None:
    rows, columns = weight.shape
    padded = form.padded_columns(columns)
    values = torch.zeros(rows, padded, dtype=torch.float32)
    values[:, :columns] = weight
    if form.name == "f16":
        packed[:, : padded * 2] = values.clamp_(-_F16_MAX, _F16_MAX).to(torch.float16).view(torch.uint8)
        return
    groups = values.view(rows, padded // GROUP, GROUP)
    data, scale = _quantize_q8(groups) if form.name == "q8" else _quantize_q4(groups)
    offset = form.scale_offset_bytes(columns)
    packed[:, :offset] = data.reshape(rows, offset)
    packed[:, offset : offset + scale.shape[1] * 2] = scale.contiguous().view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale in float32, and 0 where the scale is 0: such a group is all zeros."""
    wide = scale.to(torch.float32)
    return torch.where(wide == 0, torch.zeros_like(wide), 1.0 / wide)


def _quantize_q8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = (groups.abs().amax(dim=-1) / 127.0).clamp_(max=_F16_MAX).to(torch.float16)
    data = (groups * _inverse(scale).unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
    return data.view(torch.uint8), scale


def _quantize_q4(groups: Tensor) -> tuple[Tensor, Tensor]:
    extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    scale = (extreme / -8.0).clamp_(-_F16_MAX, _F16_MAX).to(torch.float16)
    nibbles = (groups * _inverse(scale).unsqueeze(-1)).round_().clamp_(-8, 7).add_(8.0).to(torch.uint8)
    half = GROUP // 2
    return nibbles[..., :half] | (nibbles[..., half:] << 4), scale


def dequantize_rows(packed: Tensor, format_name: str, columns: int) -> Tensor:
    """Return `packed` uint8 [rows, row_bytes] unpacked to float32 [rows, columns]."""
    form = FORMATS[format_name]
    rows = packed.shape[0]
    padded = form.padded_columns(columns)
    offset = form.scale_offset_bytes(columns)
    data = packed[:, :offset].contiguous()
    if format_name == "f16":
        return data.view(torch.float16).to(torch.float32)[:, :columns]
    scale_bytes = packed[:, offset : offset + padded // GROUP * form.scale_bytes].contiguous()
    scale = scale_bytes.view(torch.float16).to(torch.float32).unsqueeze(-1)
    if format_name == "q8":
        values = data.view(torch.int8).view(rows, -1, GROUP).to(torch.float32)
    else:
        pairs = data.view(rows, -1, GROUP // 2)
        values = torch.cat([pairs & 0xF, pairs >> 4], dim=-1).to(torch.float32) - 8.0
    return (values * scale).reshape(rows, padded)[:, :columns]
