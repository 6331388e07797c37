"""Rows of matrices, packed and unpacked in eager PyTorch."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.formats import (
    E8M0,
    FORMATS,
    GROUP,
    INT8,
    ZERO_STEPS,
    Codec,
    Plane,
    ScaleType,
    compiled,
    rounding_library,
)
from picompile_passes.formats.grids import F16_MAX, BlockScales, GroupGrid, fitted_grid, group_grid

_HALF = GROUP // 2
# Rows are packed a block at a time, so that packing needs a few MB beside its input and output, whatever their size. A
# block of 2 MiB in float32 stays in the cache from one step to the next: four times as much takes half as long again.
_BLOCK_ELEMENTS = 1 << 19


def quantize_rows(weight: Tensor, format_name: str, *, fit: bool = True) -> Tensor:
    """Return `weight` [rows, columns], of any float dtype, packed as uint8 [rows, row_bytes].

    Weights are rounded to the nearest values of their group's grid. In formats that are `fitted` that is the grid which
    leaves the least error (`fitted_grid`), in others, and without `fit`, the one that spans the group, as kernels round
    keys and values for a cache.
    """
    form = FORMATS[format_name]
    rows, columns = weight.shape
    if fit and compiled.rounds(form):
        return compiled.round_rows(weight, form)
    packed = torch.zeros(rows, form.row_bytes(columns), dtype=torch.uint8)
    block = max(1, _BLOCK_ELEMENTS // max(1, columns))
    for start in range(0, rows, block):
        round_block(weight[start : start + block], form, packed[start : start + block], fit=fit)
    return packed


def round_block(weight: Tensor, form: Codec, packed: Tensor, *, fit: bool = True) -> None:
    """Round a few rows and write them to `packed`, as `quantize_rows` does, in PyTorch."""
    rows, columns = weight.shape
    padded = form.padded_columns(columns)
    values = torch.zeros(rows, padded, dtype=torch.float32)
    values[:, :columns] = weight
    if form.scale is None:
        packed[:, : padded * 2] = values.clamp_(-F16_MAX, F16_MAX).to(torch.float16).view(torch.uint8)
        return
    groups = values.view(rows, -1, form.group)
    grid = fitted_grid(groups, form) if fit and form.fitted else group_grid(groups, form)
    pack_codes(grid.codes(groups), grid, columns, packed)


def pack_codes(codes: Tensor, grid: GroupGrid, columns: int, packed: Tensor) -> None:
    """Write rows of codes [rows, groups, weights] and their grid [rows, groups] to `packed`.

    `packed` is uint8 [rows, row_bytes] of zeros for rows of `columns` weights.
    """
    form = grid.form
    if rounding_library.library() is not None and packed.is_contiguous():
        compiled.pack_rows(codes.to(torch.int8 if form.lowest < 0 else torch.uint8), grid, columns, packed)
        return
    pack_in_pytorch(codes, grid, columns, packed)


def pack_in_pytorch(codes: Tensor, grid: GroupGrid, columns: int, packed: Tensor) -> None:
    """Write rows of codes as `pack_codes` does, in PyTorch: the reference of compiled code."""
    form, rows = grid.form, codes.shape[0]
    assert form.scale is not None
    _put(packed, 0, data_bytes(codes.reshape(rows, -1, GROUP), form).reshape(rows, -1))
    start = form.zero_offset_bytes(columns)
    if form.minimum is not None:
        assert grid.minimum is not None
        _put(packed, start, _scale_bytes(grid.minimum, grid.minimum_parts, form.minimum))
    elif form.zero is None:
        _put(packed, start, (grid.zero * ZERO_STEPS).to(torch.uint8))
    _put(packed, form.scale_offset_bytes(columns), _scale_bytes(grid.scale, grid.scale_parts, form.scale))
    start = form.factor_offset_bytes(columns)
    for parts in (grid.scale_parts, grid.minimum_parts):
        if parts is not None:
            start = _put(packed, start, _float16_bytes(parts.factor))


def _put(packed: Tensor, start: int, part: Tensor) -> int:
    """Write a part of rows, uint8 [rows, any], from byte `start` on; return where it ends."""
    packed[:, start : start + part.shape[1]] = part
    return start + part.shape[1]


def _float16_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous().view(torch.uint8)


def _scale_bytes(scale: Tensor, parts: BlockScales | None, kind: ScaleType) -> Tensor:
    """Return scales float32 [rows, groups], made of `parts` if they are in blocks, as bytes, uint8 [rows, any]."""
    if parts is not None:
        return parts.whole.to(torch.uint8)
    if kind == E8M0:
        return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return _float16_bytes(scale)


def _read_scales(packed: Tensor, start: int, count: int, kind: ScaleType, factors: Tensor) -> "Tensor | BlockScales":
    """Return the `count` scales of rows that begin at byte `start`, as float32 [rows, count].

    Those of a type in blocks are multiples of `factors`, float32 [rows, blocks].
    """
    data = packed[:, start : start + count * kind.item_bytes].contiguous()
    if kind.in_blocks:
        whole = data.view(torch.int8) if kind == INT8 else data
        return BlockScales(whole.to(torch.int16), factors)
    if kind == E8M0:
        return (data.to(torch.int32) << 23).view(torch.float32)
    return data.view(torch.float16).to(torch.float32)


def data_bytes(codes: Tensor, form: Codec) -> Tensor:
    """Return the data of rows of codes [rows, groups of 32, 32] as bytes, uint8 [rows, any] or with more dimensions."""
    if form.data_bits == 8:
        return codes.to(torch.int16).to(torch.int8).view(torch.uint8)
    whole = codes.to(torch.uint8)
    return torch.cat([_plane_bytes(whole, plane) for plane in form.planes], dim=1)


def _plane_bytes(codes: Tensor, plane: Plane) -> Tensor:
    """Return a plane's bits of codes uint8 [rows, groups of 32, 32] as bytes, uint8 [rows, any]."""
    rows, groups = codes.shape[:2]
    # [rows, 32 bytes, pair of groups, group of the pair, half, element]
    bits = F.pad((codes >> plane.shift) & ((1 << plane.bits) - 1), (0, 0, 0, -groups % plane.groups))
    bits = bits.view(rows, -1, plane.groups // 2, 2, 2, _HALF)
    placed = (bits << _places(plane)).sum(dim=(2, 4), dtype=torch.uint8).view(rows, -1)
    return placed[:, : plane.size_bytes(groups * GROUP)]


def _places(plane: Plane) -> Tensor:
    """Return the bit in its byte at which each pair of groups and half begins, [1, 1, pairs, 1, 2, 1]."""
    starts = torch.arange(0, 8, plane.bits, dtype=torch.uint8)
    return starts.view(1, 1, plane.groups // 2, 1, 2, 1)


def dequantize_rows(packed: Tensor, format_name: str, columns: int) -> Tensor:
    """Return `packed` uint8 [rows, row_bytes] unpacked to float32 [rows, columns]."""
    form = FORMATS[format_name]
    padded = form.padded_columns(columns)
    data = packed[:, : form.zero_offset_bytes(columns)].contiguous()
    if form.scale is None:
        return data.view(torch.float16).to(torch.float32)[:, :columns]
    grid = _read_grid(packed, form, columns)
    codes = _codes(data, form, padded // GROUP)
    return grid.values(codes.view(len(packed), -1, form.group)).reshape(len(packed), padded)[:, :columns]


def _read_grid(packed: Tensor, form: Codec, columns: int) -> GroupGrid:
    """Return the grid of rows of a format that has scales."""
    assert form.scale is not None
    groups, blocks = form.groups(columns), form.blocks(columns)
    start = form.factor_offset_bytes(columns)
    stored = packed[:, start : start + blocks * form.factor_bytes].contiguous()
    factors = stored.view(torch.float16).to(torch.float32)
    scale = _read_scales(packed, form.scale_offset_bytes(columns), groups, form.scale, factors[:, :blocks])
    start = form.zero_offset_bytes(columns)
    if form.minimum is not None:
        minimum = _read_scales(packed, start, groups, form.minimum, factors[:, -blocks:])
        return GroupGrid.of_parts(form, scale, minimum)
    grid = GroupGrid.of_parts(form, scale)
    if form.zero is None:
        return replace(grid, zero=packed[:, start : start + groups].to(torch.float32) / ZERO_STEPS)
    return grid


def _codes(data: Tensor, form: Codec, groups: int) -> Tensor:
    """Return the codes of rows of data bytes, [rows, groups of 32, 32]."""
    rows = data.shape[0]
    if form.data_bits == 8:
        return data.view(torch.int8).view(rows, groups, GROUP)
    codes, start = torch.zeros(rows, groups, GROUP, dtype=torch.uint8), 0
    for plane in form.planes:
        size = plane.size_bytes(groups * GROUP)
        stored = F.pad(data[:, start : start + size], (0, -size % GROUP)).view(rows, -1, 1, 2, 1, _HALF)
        bits = (stored >> _places(plane)) & ((1 << plane.bits) - 1)
        codes |= bits.reshape(rows, -1, GROUP)[:, :groups] << plane.shift
        start += size
    return codes
