"""Sums of rows of a packed matrix, weighted by the activations of many tokens: y = h · w.

This is a feed-forward block's way down in prefill. The matrix has a row for each *input*, so a task takes a block of
columns and goes through all rows; no two tasks add to the same output.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.byte_tiles import (
    BYTE_TILE_TOKENS,
    QUADS,
    ByteBlock,
    block_rows,
    multiply_tile,
    signed_offset,
)
from picompile_codegen.cpu.linear import TILE_TOKENS
from picompile_codegen.cpu.matrix import KernelMatrix, groups_of, lane_counts
from picompile_codegen.cpu.quantized import BYTES, QuantizedRows, byte_inverse, byte_scale, pack_bytes
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    in_slices,
    local,
    loop,
    maximum,
    minimum,
    select,
    token_tiles,
    when,
)
from picompile_codegen.cpu.vector import LANES, at, fma, load, splat, splat_int, store
from picompile_passes.weight_formats import GROUP

# 128 columns are at least one whole cache line of a row in every format; by 32 rows they are 16 KiB of float32.
_BLOCK_GROUPS = 4
_BLOCK_ROWS = 32
# Groups of 32 rows that are kept as bytes at a time: 16 KiB of them.
_SLICE_GROUPS = 4


@dataclass(frozen=True)
class Reduction:
    """y[t] = Σ h[t, i] · w[row_of(i)] + bias for i below `count`. h [rows, count] and y [rows, columns] are float32."""

    matrix: KernelMatrix
    count: int
    row_of: Callable[[Expr], Expr]
    h: KernelTensor
    bias: KernelTensor | None
    y: KernelTensor


@dataclass(frozen=True)
class _ColumnBlock:
    """Some rows and groups of columns, unpacked: `weights` float32 [_BLOCK_ROWS, _BLOCK_GROUPS · GROUP]."""

    reduction: Reduction
    weights: KernelTensor
    first_row: Expr
    rows: int
    first_group: Expr
    is_first: bool

    def each_group(self, body: Callable[[Expr, tuple[int, ...]], None]) -> None:
        """Runs `body(group within the block, lane counts)` for the groups that the matrix has."""
        full, rest = divmod(self.reduction.matrix.columns, GROUP)
        with loop(0, minimum(_BLOCK_GROUPS, full - self.first_group)) as group:
            body(group, lane_counts(GROUP))
        if rest:
            with when(full < self.first_group + _BLOCK_GROUPS):
                body(full - self.first_group, lane_counts(rest))


def column_blocks(reduction: Reduction) -> int:
    """Return how many blocks of columns there are."""
    return -(-reduction.matrix.groups // _BLOCK_GROUPS)


def accumulate_columns(reduction: Reduction, block: Expr, quantized: QuantizedRows | None, tokens: Expr) -> None:
    """Compute block number `block` of y's columns, for all tokens. `quantized` is h in bytes, where they are used."""
    if quantized is None:
        _accumulate_floats(reduction, block, tokens)
    else:
        _accumulate_bytes(reduction, block, quantized, tokens)


def _accumulate_bytes(reduction: Reduction, block: Expr, quantized: QuantizedRows, tokens: Expr) -> None:
    """Unpack a few groups of rows at a time, turn them into bytes by columns, multiply, and add to y."""
    weights = local(_BLOCK_ROWS, _BLOCK_GROUPS * GROUP)
    first_group, total = bind(block * _BLOCK_GROUPS), groups_of(reduction.count)
    parts, together = _BLOCK_GROUPS * GROUP // LANES, block_rows() // LANES
    target = ByteBlock.declare(parts, _SLICE_GROUPS, signed_offset() != 0)
    with loop(0, -(-total // _SLICE_GROUPS)) as index:
        start = bind(index * _SLICE_GROUPS)
        groups = bind(minimum(_SLICE_GROUPS, total - start))
        with loop(0, groups) as group:
            _unpack(_ColumnBlock(reduction, weights, bind((start + group) * GROUP), GROUP, first_group, False))
            with loop(0, parts) as part:
                _requantize(weights, target, group, part)
        with token_tiles(tokens, BYTE_TILE_TOKENS) as chosen, loop(0, parts // together) as number:
            column = bind(first_group * GROUP + number * together * LANES)
            sums = multiply_tile(target, number * together, together, groups, start, quantized, chosen)
            _add_columns(reduction, column, sums, start)


def _requantize(weights: KernelTensor, block: ByteBlock, group: Expr, part: Expr) -> None:
    """Turn eight columns of 32 unpacked rows into bytes; a column's scale is its largest magnitude over 127."""
    column = bind(part * LANES)
    largest, visible = local(LANES), local(LANES)
    largest[at(0)] = splat(0.0)
    visible[at(0)] = splat(0.0)
    with loop(0, GROUP) as i:
        largest[at(0)] = maximum(largest[at(0)], tirx.abs(weights[i, at(column)]))
    top = bind(largest[at(0)])
    inverse = bind(byte_inverse(top))
    with loop(0, QUADS) as quad:
        values = [bind(weights[4 * quad + i, at(column)] * inverse) for i in range(4)]
        visible[at(0)] = visible[at(0)] + ((values[0] + values[1]) + (values[2] + values[3]))
        word = pack_bytes([bind(tirx.Cast(f"int32x{LANES}", tirx.nearbyint(value))) for value in values])
        if block.is_unsigned:
            word = bind(word ^ splat_int(-0x7F7F7F80))
        quads = tirx.reinterpret(f"{block.weights.dtype}x{BYTES}", word)
        block.weights[(group * QUADS + quad) * block.parts + part, at(0, BYTES)] = quads
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    block.scales[group * block.parts + part, at(0)] = byte_scale(top, visible[at(0)])


def _add_columns(reduction: Reduction, column: Expr, sums: list[tuple[Expr, int, Expr]], start: Expr) -> None:
    """Add the sums of eight columns of each token and part to y, those that exist; `start` 0 begins with the bias."""
    full, rest = divmod(reduction.matrix.columns, LANES)

    def add(part: int, valid: int) -> None:
        first = column + part * LANES
        of_part = [(token, value) for token, other, value in sums if other == part]
        # All have been read before any is written: the tokens of a tile may be the same.
        begin = _beginning(reduction, first, valid)
        totals = [
            bind(select(start > 0, load(reduction.y, token, first, valid=valid), begin) + value)
            for token, value in of_part
        ]
        for (token, _), value in zip(of_part, totals, strict=True):
            store(reduction.y, token, first, value=value, valid=valid)

    for part in range(block_rows() // LANES):
        if not reduction.matrix.columns % (_BLOCK_GROUPS * GROUP):
            add(part, LANES)
            continue
        with when(column + part * LANES < full * LANES):
            add(part, LANES)
        if rest:
            with when(column + part * LANES == full * LANES):
                add(part, rest)


def _beginning(reduction: Reduction, column: Expr, valid: int) -> Expr:
    """Return the first value of eight columns of y: the bias or 0."""
    return splat(0.0) if reduction.bias is None else load(reduction.bias, column, valid=valid)


def _accumulate_floats(reduction: Reduction, block: Expr, tokens: Expr) -> None:
    weights = local(_BLOCK_ROWS, _BLOCK_GROUPS * GROUP)
    first_group = bind(block * _BLOCK_GROUPS)

    def one_slice(first_row: Expr, rows: int, is_first: bool) -> None:
        unpacked = _ColumnBlock(reduction, weights, first_row, rows, first_group, is_first)
        _unpack(unpacked)
        with token_tiles(tokens, TILE_TOKENS) as chosen:
            unpacked.each_group(lambda group, counts: _add_tile(unpacked, chosen, group, counts))

    in_slices(reduction.count, _BLOCK_ROWS, one_slice)


def _unpack(block: _ColumnBlock) -> None:
    with loop(0, block.rows) as i:
        number = bind(block.reduction.row_of(minimum(block.first_row + i, block.reduction.count - 1)))
        row = block.reduction.matrix.part_of_row(number, block.first_group, _BLOCK_GROUPS)

        def unpack(group: Expr, counts: tuple[int, ...]) -> None:
            for v, value in zip(range(len(counts)), row.group(group).weights(), strict=False):
                store(block.weights, i, group * GROUP + v * LANES, value=value)

        block.each_group(unpack)


def _add_tile(block: _ColumnBlock, tokens: list[Expr], group: Expr, counts: tuple[int, ...]) -> None:
    """Add a block's products to TILE_TOKENS tokens of one group of y's columns."""
    y, count = block.reduction.y, len(counts)
    column = bind((block.first_group + group) * GROUP)
    places = [(t * count + v, token, v) for t, token in enumerate(tokens) for v in range(count)]
    sums = local(len(places), LANES)
    for place, token, v in places:
        first = column + v * LANES
        sums[place, at(0)] = (
            _beginning(block.reduction, first, counts[v]) if block.is_first else load(y, token, first, valid=counts[v])
        )
    with loop(0, block.rows) as i:
        factors = [bind(splat(block.reduction.h[token, block.first_row + i])) for token in tokens]
        # Vector by vector, so that a single register of weights is needed beside the sums and the factors.
        for v in range(count):
            weight = bind(load(block.weights, i, group * GROUP + v * LANES))
            for t, factor in enumerate(factors):
                place = t * count + v
                sums[place, at(0)] = fma(factor, weight, sums[place, at(0)])
    # All have been read before any is written: the tokens of a tile may be the same.
    for place, token, v in places:
        store(y, token, column + v * LANES, value=sums[place, at(0)], valid=counts[v])
