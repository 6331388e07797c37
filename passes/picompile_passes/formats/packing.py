"""Rows of matrices, packed and unpacked in eager PyTorch, and the grids of values that groups of weights may take."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.formats import (
    E8M0,
    FLOAT16,
    FORMATS,
    GROUP,
    HIGH_GROUPS,
    ZERO_STEPS,
    Codec,
    ScaleType,
)

# float16 reaches 65504; a bfloat16 checkpoint can hold more, and infinity would spread through every later layer.
_F16_MAX = 65504.0
# Powers of two that are scales: normal float32 numbers, and no weight is beyond float16.
_EXPONENTS = (-126, 13)
_HALF = GROUP // 2


# Rows are packed a block at a time, so that packing needs a few MB beside its input and output, whatever their size. A
# block of 2 MiB in float32 stays in the cache from one step to the next: four times as much takes half as long again.
_BLOCK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class GroupGrid:
    """The values that the weights of each group may take, as `Codec` defines them for the codes of `form`.

    `scale` is float32 [...], exact in the format's type of scales, and `zero` float32 like it.
    """

    form: Codec
    scale: Tensor
    zero: Tensor

    def codes(self, groups: Tensor) -> Tensor:
        """Return the codes nearest to `groups` float32 [..., n], as float32; the even one of two."""
        scaled = groups * _inverse(self.scale).unsqueeze(-1)
        if self.form.table:
            return _nearest_in_table(scaled, self.form)
        return scaled.add_(self.zero.unsqueeze(-1)).round_().clamp_(self.form.lowest, self.form.highest)

    def values(self, codes: Tensor) -> Tensor:
        """Return the weights that codes [..., n] stand for, float32."""
        if self.form.table:
            return _table_values(self.form)[codes.to(torch.int64)] * self.scale.unsqueeze(-1)
        return (codes.to(torch.float32) - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)

    def nearest(self, groups: Tensor) -> Tensor:
        """Return the values nearest to `groups` float32 [..., n]."""
        return self.values(self.codes(groups))


def group_grid(groups: Tensor, form: Codec, shrink: float = 1.0) -> GroupGrid:
    """Return the grid that spans each group of weights, float32 [..., 32], or `shrink` times that span.

    What lies outside a smaller span is rounded to its end, and what lies inside more finely.
    """
    if form.scale == E8M0:
        return _best_power(groups, form, shrink)
    if form.zero is None:
        low = groups.amin(dim=-1).clamp_(max=0.0) * shrink
        high = groups.amax(dim=-1).clamp_(min=0.0) * shrink
        scale = _as_f16((high - low) / (form.highest - form.lowest))
        zero = (-low * _inverse(scale) * ZERO_STEPS).round_().clamp_(0.0, 255.0) / ZERO_STEPS
        return GroupGrid(form, scale, zero)
    values = _extremes(form)
    furthest = float(values[values.abs().argmax()])
    if bool((values == -furthest).any()):
        scale = groups.abs().amax(dim=-1) * shrink / abs(furthest)
    else:
        # One value is further from 0 than all others, so the extreme gets it, whatever its sign.
        extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        scale = extreme * shrink / furthest
    scale = _as_f16(scale)
    return GroupGrid(form, scale, torch.full_like(scale, form.zero))


def _extremes(form: Codec) -> Tensor:
    """Return values over their scale, with the least and the greatest among them, of a format with one zero."""
    return _table_values(form) if form.table else torch.tensor([form.lowest, form.highest]) - (form.zero or 0.0)


def _as_f16(scale: Tensor) -> Tensor:
    return scale.clamp_(-_F16_MAX, _F16_MAX).to(torch.float16).to(torch.float32)


def _best_power(groups: Tensor, form: Codec, shrink: float) -> GroupGrid:
    """Return grids whose scales are powers of two: of the two that span most and all of a group, the nearer one.

    The first is the scale of the OCP specification, 2^(floor(log2 of the largest weight) - floor(log2 of the largest
    value)).
    """
    largest = groups.abs().amax(dim=-1) * shrink
    most = math.floor(math.log2(float(_extremes(form).abs().max())))
    exponents = (torch.frexp(largest).exponent - 1 - most).clamp_(*_EXPONENTS)
    grids = []
    for more in (0, 1):
        scale = torch.ldexp(torch.ones_like(largest), (exponents + more).clamp_(*_EXPONENTS))
        scale = torch.where(largest == 0, 0.0, scale)
        grids.append(GroupGrid(form, scale, torch.full_like(scale, form.zero or 0.0)))
    errors = [(grid.nearest(groups) - groups).square_().sum(dim=-1) for grid in grids]
    scale = torch.where(errors[1] < errors[0], grids[1].scale, grids[0].scale)
    return GroupGrid(form, scale, grids[0].zero)


def _table_values(form: Codec) -> Tensor:
    return torch.tensor(form.table, dtype=torch.float32) * form.table_step


def _nearest_in_table(scaled: Tensor, form: Codec) -> Tensor:
    """Return the codes of the values in the format's table that are nearest to `scaled`; the even code of two."""
    values, codes = _table_values(form).sort(stable=True)
    middles = (values[1:] + values[:-1]) / 2
    # A number at a middle goes below it: where the code above is the even one, the border is the next number below.
    below = torch.nextafter(middles, torch.tensor(-torch.inf))
    borders = torch.where(codes[1:] % 2 == 0, below, middles)
    return codes.to(torch.float32)[torch.bucketize(scaled, borders)]


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


def _quantize_block(weight: Tensor, form: Codec, packed: Tensor) -> None:
    rows, columns = weight.shape
    padded = form.padded_columns(columns)
    values = torch.zeros(rows, padded, dtype=torch.float32)
    values[:, :columns] = weight
    if form.scale is None:
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
    data = data_bytes(codes, form).reshape(rows, -1)
    packed[:, : data.shape[1]] = data
    if form.zero is None:
        start = form.zero_offset_bytes(columns)
        packed[:, start : start + grid.zero.shape[1]] = (grid.zero * ZERO_STEPS).to(torch.uint8)
    assert form.scale is not None
    start = form.scale_offset_bytes(columns)
    scale = _scale_bytes(grid.scale, form.scale)
    packed[:, start : start + scale.shape[1]] = scale


def _scale_bytes(scale: Tensor, kind: ScaleType) -> Tensor:
    """Return scales float32 [rows, groups] as bytes, uint8 [rows, any]."""
    if kind == FLOAT16:
        return scale.to(torch.float16).contiguous().view(torch.uint8)
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def _scales(data: Tensor, kind: ScaleType) -> Tensor:
    """Return the scales that bytes [rows, any] stand for, float32 [rows, groups]."""
    if kind == FLOAT16:
        return data.view(torch.float16).to(torch.float32)
    return (data.to(torch.int32) << 23).view(torch.float32)


def data_bytes(codes: Tensor, form: Codec) -> Tensor:
    """Return the data of rows of codes [rows, groups, 32] as bytes, uint8 [rows, any, any] or [rows, any]."""
    if form.data_bits == 8:
        return codes.to(torch.int8).view(torch.uint8)
    whole = codes.to(torch.uint8)
    low = whole & 15
    nibbles = low[..., :_HALF] | (low[..., _HALF:] << 4)
    if form.data_bits == 4:
        return nibbles
    rows, groups = whole.shape[:2]
    # [rows, blocks, pair of groups, group of the pair, half, element]
    high = F.pad(whole >> 4, (0, 0, 0, -groups % HIGH_GROUPS)).view(rows, -1, 2, 2, 2, _HALF)
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
    if form.scale is None:
        return data.view(torch.float16).to(torch.float32)[:, :columns]
    groups, start = padded // GROUP, form.scale_offset_bytes(columns)
    scale = _scales(packed[:, start : start + groups * form.scale_bytes].contiguous(), form.scale)
    if form.zero is None:
        start = form.zero_offset_bytes(columns)
        zero = packed[:, start : start + groups].to(torch.float32) / ZERO_STEPS
    else:
        zero = torch.full_like(scale, form.zero)
    values = GroupGrid(form, scale, zero).values(_codes(data, form, groups))
    return values.reshape(packed.shape[0], padded)[:, :columns]


def _codes(data: Tensor, form: Codec, groups: int) -> Tensor:
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
