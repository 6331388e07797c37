"""Weight formats: the bytes of a row of a matrix.

A matrix is stored row by row. A row holds its data, then its zeros and its scales, then nothing up to a multiple of 64
bytes, so that every row is one aligned, contiguous read. Columns are padded with zeros to K, a multiple of 32. The
zeros of a row are padded to a multiple of 16 bytes.

| format | data of a row | zeros | scales | value |
| --- | --- | --- | --- | --- |
| `f16` | K little-endian float16 | none | none | data |
| `q8` | K int8 | none | K/32 float16 | data × scale of its group of 32 |
| `q6` | K/2 bytes, then 32 bytes for each 128 of K | none | K/32 float16 | (code - 32) × scale of its group |
| `q4m` | K/2 bytes, 16 a group | K/32 bytes | K/32 float16 | (nibble - zero / 16) × scale of its group |
| `q4` | K/2 bytes, 16 a group | none | K/32 float16 | (nibble - 8) × scale of its group |

Byte i of a q4 group holds element i in its low and element i + 16 in its high four bits. q4 follows GGML's Q4_0 in its
arithmetic (the scale is the signed extreme of the group divided by -8), not in its layout: GGML interleaves each scale
with its 16 data bytes, which leaves no row aligned. q4m is q4 with a zero of its own in each group, in sixteenths of a
step: the span of its codes is that of the group's weights, where q4's reaches as far below 0 as above.

q6 has its low four bits as q4 has them. Behind those of the whole row come the high two bits, 32 bytes for each 4
groups: byte (g mod 2) · 16 + i has those of element i of group g at bit 4 · (g div 2), and those of element i + 16 two
bits higher. So 32 bytes of low bits and 32 of high bits make the codes of two groups with one shift and one mask each.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.weight_formats import (
    FORMATS,
    GROUP,
    HIGH_BLOCK,
    ROW_ALIGNMENT_BYTES,
    ZERO_STEPS,
    WeightFormat,
)

__all__ = [
    "FORMATS",
    "GROUP",
    "ROW_ALIGNMENT_BYTES",
    "GroupGrid",
    "WeightFormat",
    "dequantize_rows",
    "group_grid",
    "pack_codes",
    "quantize_rows",
]

# float16 reaches 65504; a bfloat16 checkpoint can hold more, and infinity would spread through every later layer.
_F16_MAX = 65504.0
_HALF = GROUP // 2
_HIGH_GROUPS = HIGH_BLOCK // GROUP


# Rows are packed a block at a time, so that packing needs a few MB beside its input and output, whatever their size. A
# block of 2 MiB in float32 stays in the cache from one step to the next: four times as much takes half as long again.
_BLOCK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class GroupGrid:
    """The values that the weights of each group may take: (code - zero) · scale, for the codes of `form`.

    `scale` is float32 [...], exact in float16, and `zero` float32 like it.
    """

    form: WeightFormat
    scale: Tensor
    zero: Tensor

    def codes(self, groups: Tensor) -> Tensor:
        """Return the codes nearest to `groups` float32 [..., n], as float32; the even one of two."""
        scaled = (groups * _inverse(self.scale).unsqueeze(-1)).add_(self.zero.unsqueeze(-1))
        return scaled.round_().clamp_(self.form.lowest, self.form.highest)

    def values(self, codes: Tensor) -> Tensor:
        """Return the weights that codes [..., n] stand for, float32."""
        return (codes.to(torch.float32) - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)

    def nearest(self, groups: Tensor) -> Tensor:
        """Return the values nearest to `groups` float32 [..., n]."""
        return self.values(self.codes(groups))


def group_grid(groups: Tensor, form: WeightFormat, shrink: float = 1.0) -> GroupGrid:
    """Return the grid that spans each group of weights, float32 [..., 32], or `shrink` times that span.

    What lies outside a smaller span is rounded to its end, and what lies inside more finely.
    """
    if form.zero is None:
        low = groups.amin(dim=-1).clamp_(max=0.0) * shrink
        high = groups.amax(dim=-1).clamp_(min=0.0) * shrink
        scale = _as_f16((high - low) / (form.highest - form.lowest))
        zero = (-low * _inverse(scale) * ZERO_STEPS).round_().clamp_(0.0, 255.0) / ZERO_STEPS
        return GroupGrid(form, scale, zero)
    if form.zero == 0.0:
        scale = _as_f16(groups.abs().amax(dim=-1) * shrink / form.highest)
    else:
        # The code 0 is furthest from the zero, so the extreme gets it, whatever its sign.
        extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        scale = _as_f16(extreme * shrink / -form.zero)
    return GroupGrid(form, scale, torch.full_like(scale, form.zero))


def _as_f16(scale: Tensor) -> Tensor:
    return scale.clamp_(-_F16_MAX, _F16_MAX).to(torch.float16).to(torch.float32)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 where the scale is 0: such a group is all zeros."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)


def quantize_rows(weight: Tensor, format_name: str) -> Tensor:
    """Return `weight` [rows, columns], of any float dtype, packed as uint8 [rows, row_bytes].

    Each group's weights are rounded to the nearest values of the grid that spans them.
    """
    form = FORMATS[format_name]
    rows, columns = weight.shape
    packed = torch.zeros(rows, form.row_bytes(columns), dtype=torch.uint8)
    block = max(1, _BLOCK_ELEMENTS // max(1, columns))
    for start in range(0, rows, block):
        _quantize_block(weight[start : start + block], form, packed[start : start + block])
    return packed


def _quantize_block(weight: Tensor, form: WeightFormat, packed: Tensor) -> None:
    rows, columns = weight.shape
    padded = form.padded_columns(columns)
    values = torch.zeros(rows, padded, dtype=torch.float32)
    values[:, :columns] = weight
    if not form.scale_bytes:
        packed[:, : padded * 2] = values.clamp_(-_F16_MAX, _F16_MAX).to(torch.float16).view(torch.uint8)
        return
    groups = values.view(rows, padded // GROUP, GROUP)
    grid = group_grid(groups, form)
    pack_codes(grid.codes(groups), grid, columns, packed)


def pack_codes(codes: Tensor, grid: GroupGrid, columns: int, packed: Tensor) -> None:
    """Write rows of codes [rows, groups, 32] and their grid [rows, groups] to `packed`.

    `packed` is uint8 [rows, row_bytes] of zeros for rows of `columns` weights.
    """
    form, rows = grid.form, codes.shape[0]
    data = _data_bytes(codes, form).reshape(rows, -1)
    packed[:, : data.shape[1]] = data
    if form.zero is None:
        start = form.zero_offset_bytes(columns)
        packed[:, start : start + grid.zero.shape[1]] = (grid.zero * ZERO_STEPS).to(torch.uint8)
    start = form.scale_offset_bytes(columns)
    scale = grid.scale.to(torch.float16).contiguous().view(torch.uint8)
    packed[:, start : start + scale.shape[1]] = scale


def _data_bytes(codes: Tensor, form: WeightFormat) -> Tensor:
    """Return the data of rows as bytes, uint8 [rows, any, any]."""
    if form.data_bits == 8:
        return codes.to(torch.int8).view(torch.uint8)
    whole = codes.to(torch.uint8)
    low = whole & 15
    nibbles = low[..., :_HALF] | (low[..., _HALF:] << 4)
    if form.data_bits == 4:
        return nibbles
    rows, groups = whole.shape[:2]
    # [rows, blocks, pair of groups, group of the pair, half, element]
    high = F.pad(whole >> 4, (0, 0, 0, -groups % _HIGH_GROUPS)).view(rows, -1, 2, 2, 2, _HALF)
    high = (high << _high_shifts()).sum(dim=(2, 4), dtype=torch.uint8)
    return torch.cat([nibbles.reshape(rows, -1), high.reshape(rows, -1)], dim=1)


def _high_shifts() -> Tensor:
    """Return the bit in its byte at which each pair of groups and half begins, [1, 1, 2, 1, 2, 1]."""
    return torch.tensor([[0, 2], [4, 6]], dtype=torch.uint8).view(1, 1, 2, 1, 2, 1)


def dequantize_rows(packed: Tensor, format_name: str, columns: int) -> Tensor:
    """Return `packed` uint8 [rows, row_bytes] unpacked to float32 [rows, columns]."""
    form = FORMATS[format_name]
    padded = form.padded_columns(columns)
    data = packed[:, : form.zero_offset_bytes(columns)].contiguous()
    if not form.scale_bytes:
        return data.view(torch.float16).to(torch.float32)[:, :columns]
    groups, start = padded // GROUP, form.scale_offset_bytes(columns)
    scale = packed[:, start : start + groups * form.scale_bytes].contiguous().view(torch.float16).to(torch.float32)
    if form.zero is None:
        start = form.zero_offset_bytes(columns)
        zero = packed[:, start : start + groups].to(torch.float32) / ZERO_STEPS
    else:
        zero = torch.full_like(scale, form.zero)
    values = GroupGrid(form, scale, zero).values(_codes(data, form, groups))
    return values.reshape(packed.shape[0], padded)[:, :columns]


def _codes(data: Tensor, form: WeightFormat, groups: int) -> Tensor:
    """Return the codes of rows of data bytes, [rows, groups, 32]."""
    rows = data.shape[0]
    if form.data_bits == 8:
        return data.view(torch.int8).view(rows, groups, GROUP)
    pairs = data[:, : groups * _HALF].view(rows, groups, _HALF)
    low = torch.cat([pairs & 15, pairs >> 4], dim=-1)
    if form.data_bits == 4:
        return low
    high = data[:, groups * _HALF :].view(rows, -1, 1, 2, 1, _HALF)
    return low | (((high >> _high_shifts()) & 3) << 4).reshape(rows, -1, GROUP)[:, :groups]
