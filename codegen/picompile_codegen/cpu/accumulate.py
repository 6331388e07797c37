"""Sums of rows of a packed matrix, weighted by the activations of many tokens: y = h · w.

This is a feed-forward block's way down in prefill. The matrix has a row for each *input*, so a task takes a block of
columns and goes through all rows; no two tasks add to the same output.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.bfloat16 import pair_words
from picompile_codegen.cpu.byte_tiles import QUADS, ByteBlock, ByteInputs, byte_tile, multiply_tile, signed_offset
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix, MatrixRow, groups_of
from picompile_codegen.cpu.panels import (
    ChunkSums,
    TokenPanels,
    float_tile,
    multiply_panels,
    wide,
    word_columns,
    words_of,
)
from picompile_codegen.cpu.quantized import byte_inverse, byte_scale, pack_bytes
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    local,
    local_vectors,
    loop,
    maximum,
    minimum,
    parallel,
)
from picompile_codegen.cpu.vector import at, splat, splat_int
from picompile_passes.formats import GROUP

# 96 columns are a whole number of every tile's outputs, and of cache lines of float16. By 256 rows they are 96 KiB of
# float32: a panel, which shares the second-level cache with the inputs.
_BLOCK_GROUPS = 3
_BLOCK_COLUMNS = _BLOCK_GROUPS * GROUP
_SLICE_ROWS = 256
# Groups of 32 rows that are kept as bytes at a time: 96 KiB as well.
_SLICE_GROUPS = 32


@dataclass(frozen=True)
class ReductionInputs:
    """h of a chunk, packed: float32, and bytes where the matrix has bytes as well. A kernel uses one of them.

    Both are declared for all instruction sets, whose kernels have the same arguments.
    """

    panels: TokenPanels
    quantized: ByteInputs | None

    @classmethod
    def declare(
        cls, function: KernelFunction, name: str, rows: int, count: int, matrix: KernelMatrix
    ) -> "ReductionInputs":
        """Declare memory for `count` activations of at most `rows` tokens."""
        panels = TokenPanels.declare(function, name, rows, count)
        quantized = None if matrix.scale is None else ByteInputs.declare(function, name, rows, count)
        # Without an instruction for dot products of int8, float32 is faster than converting columns to int8.
        return cls(panels, None if isa.current().bytes_dot == "maddubs" else quantized)

    def pack(self, h: KernelTensor, tokens: Expr, count: int) -> None:
        """Take in `tokens` rows of h float32 [rows, count]."""
        (self.panels if self.quantized is None else self.quantized).pack(h, tokens, count)


@dataclass(frozen=True)
class Reduction:
    """y[t] = Σ h[t, i] · w[row_of(i)] + bias for i below `count`. y [rows, columns] is float32."""

    matrix: KernelMatrix
    count: int
    row_of: Callable[[Expr], Expr]
    bias: KernelTensor | None
    y: KernelTensor

    @property
    def tasks(self) -> int:
        """The number of tasks, each with its columns of y."""
        return -(-self.matrix.groups // _BLOCK_GROUPS)


def accumulate(reduction: Reduction, h: ReductionInputs, tokens: Expr, *, when_worth: bool) -> None:
    """Compute y of all tokens, given inputs that are packed."""
    with parallel(reduction.tasks, when_worth=when_worth) as task:
        first_group = bind(task * _BLOCK_GROUPS)
        tile = float_tile() if h.quantized is None else byte_tile()
        sums = ChunkSums.zeros(reduction.y.rows, tokens, _BLOCK_COLUMNS, tile.lanes)
        if h.quantized is None:
            _accumulate_floats(reduction, first_group, h=h.panels, tokens=tokens, sums=sums)
        else:
            _accumulate_bytes(reduction, first_group, h=h.quantized, tokens=tokens, sums=sums)
        sums.emit(tokens, first_group * GROUP, reduction.matrix.columns, reduction.bias, reduction.y)


def _accumulate_floats(reduction: Reduction, first_group: Expr, h: TokenPanels, tokens: Expr, sums: ChunkSums) -> None:
    """Unpack a slice of rows at a time, and multiply."""
    tile, tiles = float_tile(), bind(float_tile().count(tokens))
    rows_kept, lanes = words_of(min(_SLICE_ROWS, h.columns)), tile.lanes
    weights = local_vectors(rows_kept, _BLOCK_COLUMNS // lanes, lanes=lanes)
    with loop(0, -(-h.columns // _SLICE_ROWS)) as index:
        start = bind(index * _SLICE_ROWS)
        rows = bind(minimum(_SLICE_ROWS, h.columns - start))
        unpack = _unpack if word_columns() == 1 else _unpack_pairs
        unpack(reduction, start, rows, first_group, weights)
        with loop(0, tiles) as number, loop(0, _BLOCK_COLUMNS // tile.outputs) as part:
            multiply_panels(
                weights,
                x=h,
                columns=(start, rows),
                tile=number,
                sums=sums,
                first_vector=bind(part * tile.vectors),
                fetch=lambda _: None,
            )


def _unpack(reduction: Reduction, first_row: Expr, rows: Expr, first_group: Expr, weights: KernelTensor) -> None:
    """Unpack a block's columns of some rows to float32. Rows past the last one repeat it: their inputs are zero."""
    lanes = isa.current().wide_lanes
    with loop(0, rows) as i:
        row = _part_of_row(reduction, first_row + i, first_group)
        with loop(0, minimum(_BLOCK_GROUPS, reduction.matrix.groups - first_group)) as group:
            for v, value in enumerate(wide(list(row.group(group).weights()), lanes)):
                weights[i, group * (GROUP // lanes) + v] = value


def _unpack_pairs(reduction: Reduction, first_row: Expr, rows: Expr, first_group: Expr, weights: KernelTensor) -> None:
    """Unpack as `_unpack` does, to words of two rows in bfloat16."""
    lanes = float_tile().lanes
    with loop(0, rows // 2) as i:
        pair = [_part_of_row(reduction, first_row + 2 * i + k, first_group) for k in range(2)]
        with loop(0, minimum(_BLOCK_GROUPS, reduction.matrix.groups - first_group)) as group:
            values = [wide(list(row.group(group).weights()), lanes) for row in pair]
            for v, (first, second) in enumerate(zip(*values, strict=True)):
                weights[i, group * (GROUP // lanes) + v] = pair_words(first, second)


def _part_of_row(reduction: Reduction, number: Expr, first_group: Expr) -> MatrixRow:
    row = bind(reduction.row_of(minimum(number, reduction.count - 1)))
    return reduction.matrix.part_of_row(row, first_group, _BLOCK_GROUPS)


def _accumulate_bytes(reduction: Reduction, first_group: Expr, h: ByteInputs, tokens: Expr, sums: ChunkSums) -> None:
    """Unpack a few groups of rows at a time, turn them into bytes by columns, and multiply."""
    tile, tiles = byte_tile(), bind(byte_tile().count(tokens))
    vectors, total = _BLOCK_COLUMNS // tile.lanes, groups_of(reduction.count)
    weights = local_vectors(GROUP, vectors, lanes=tile.lanes)
    block = ByteBlock.declare(vectors, min(_SLICE_GROUPS, total), signed_offset() != 0, 127)
    with loop(0, -(-total // _SLICE_GROUPS)) as index:
        start = bind(index * _SLICE_GROUPS)
        groups = bind(minimum(_SLICE_GROUPS, total - start))
        with loop(0, groups) as group:
            _unpack(
                reduction, first_row=bind((start + group) * GROUP), rows=GROUP, first_group=first_group, weights=weights
            )
            with loop(0, vectors) as vector:
                _requantize(weights, block, group, vector)
        with loop(0, tiles) as number, loop(0, vectors // tile.vectors) as part:
            first = bind(part * tile.vectors)
            multiply_tile(
                block,
                first_vector=first,
                groups=(start, groups),
                x=h.rows,
                tokens=tokens,
                number=number,
                sums=sums,
                first_output=first,
            )


def _requantize(weights: KernelTensor, block: ByteBlock, group: Expr, vector: Expr) -> None:
    """Turn a vector of columns of 32 unpacked rows into bytes; a column's scale is its largest magnitude over 127."""
    lanes = byte_tile().lanes
    whole = at(0, lanes)
    largest, visible = local(lanes), local(lanes)
    largest[whole] = splat(0.0, lanes)
    visible[whole] = splat(0.0, lanes)
    with loop(0, GROUP) as i:
        largest[whole] = maximum(largest[whole], tirx.abs(weights[i, vector]))
    top = bind(largest[whole])
    inverse = bind(byte_inverse(top, lanes))
    with loop(0, QUADS) as quad:
        values = [bind(weights[4 * quad + i, vector] * inverse) for i in range(4)]
        visible[whole] = visible[whole] + ((values[0] + values[1]) + (values[2] + values[3]))
        word = pack_bytes([bind(tirx.Cast(f"int32x{lanes}", tirx.nearbyint(value))) for value in values], lanes)
        if block.is_unsigned:
            word = bind(word ^ splat_int(-0x7F7F7F80, lanes))
        quads = tirx.reinterpret(f"{block.dtype}x{4 * lanes}", word)
        block.weights[group * QUADS + quad, vector] = quads
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    block.scales[group, vector] = byte_scale(top, visible[whole], lanes)
