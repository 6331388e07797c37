"""Sums of rows of a packed matrix, weighted by the activations of many tokens: y = h · w.

This is a feed-forward block's way down in prefill. The matrix has a row for each *input*, so a task takes a block of
columns and goes through all rows; no two tasks add to the same output.
"""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.kernels.matrix import Matrix, lane_counts
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, in_slices, local, loop, minimum, when
from picompile_codegen.kernels.tiles import tile_tokens, token_tiles
from picompile_codegen.kernels.vector import LANES, at, fma, load, splat, store
from picompile_passes.dialect.formats import GROUP

# 128 columns are at least one whole cache line of a row in every format; by 32 rows they are 16 KiB of float32.
_BLOCK_GROUPS = 4
_BLOCK_ROWS = 32


@dataclass(frozen=True)
class Reduction:
    """y[t] = Σ h[t, i] · w[row_of(i)] + bias for i below `count`. h [rows, count] and y [rows, columns] are float32."""

    matrix: Matrix
    count: int
    row_of: Callable[[Expr], Expr]
    h: Tensor
    bias: Tensor | None
    y: Tensor


@dataclass(frozen=True)
class _Block:
    """Some rows and groups of columns, unpacked: `weights` float32 [_BLOCK_ROWS, _BLOCK_GROUPS · GROUP]."""

    reduction: Reduction
    weights: Tensor
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
    """How many blocks of columns there are."""
    return -(-reduction.matrix.groups // _BLOCK_GROUPS)


def accumulate_columns(reduction: Reduction, block: Expr, tokens: Expr) -> None:
    """Computes block number `block` of y's columns, for all tokens."""
    weights = local(_BLOCK_ROWS, _BLOCK_GROUPS * GROUP)
    first_group = bind(block * _BLOCK_GROUPS)

    def one_slice(first_row: Expr, rows: int, is_first: bool) -> None:
        unpacked = _Block(reduction, weights, first_row, rows, first_group, is_first)
        _unpack(unpacked)
        with token_tiles(tokens) as tile:
            chosen = tile_tokens(tile, tokens)
            unpacked.each_group(lambda group, counts: _add_tile(unpacked, chosen, group, counts))

    in_slices(reduction.count, _BLOCK_ROWS, one_slice)


def _unpack(block: _Block) -> None:
    with loop(0, block.rows) as i:
        number = bind(block.reduction.row_of(block.first_row + i))
        row = block.reduction.matrix.part_of_row(number, block.first_group, _BLOCK_GROUPS)

        def unpack(group: Expr, counts: tuple[int, ...]) -> None:
            for v, value in zip(range(len(counts)), row.group(group).weights(), strict=False):
                store(block.weights, i, group * GROUP + v * LANES, value=value)

        block.each_group(unpack)


def _add_tile(block: _Block, tokens: list[Expr], group: Expr, counts: tuple[int, ...]) -> None:
    """Adds a block's products to TILE_TOKENS tokens of one group of y's columns."""
    y, count = block.reduction.y, len(counts)
    column = bind((block.first_group + group) * GROUP)
    places = [(t * count + v, token, v) for t, token in enumerate(tokens) for v in range(count)]
    sums = local(len(places), LANES)
    for place, token, v in places:
        sums[place, at(0)] = _sum_so_far(block, token, column + v * LANES, counts[v])
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


def _sum_so_far(block: _Block, token: Expr, column: Expr, valid: int) -> Expr:
    if not block.is_first:
        return load(block.reduction.y, token, column, valid=valid)
    bias = block.reduction.bias
    return splat(0.0) if bias is None else load(bias, column, valid=valid)
