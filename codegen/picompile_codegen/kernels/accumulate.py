"""Sums of rows of a packed matrix, weighted by the activations of many tokens: y = h · w.

This is a feed-forward block's way down in prefill. The matrix has a row for each *input*, so a task takes a block of
columns and goes through all rows; no two tasks add to the same output.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.matrix import Matrix, each_group, lane_counts
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, when
from picompile_codegen.kernels.tiles import TILE_TOKENS, tile_tokens, token_tiles
from picompile_codegen.kernels.vector import LANES, at, fma, load, splat, store
from picompile_passes.dialect.formats import GROUP

# 128 columns are at least one whole cache line of a row in every format; by 32 rows they are 16 KiB of float32.
_BLOCK_GROUPS = 4
_BLOCK_ROWS = 32


@dataclass(frozen=True)
class Reduction:
    """y[t] = Σ h[t, i] · w[row_of(i)] + bias for i below `count`. h float32 [rows, count], y float32 [rows, columns]."""

    matrix: Matrix
    count: int
    row_of: Callable[[Expr], Expr]
    h: Tensor
    bias: Tensor | None
    y: Tensor


def column_blocks(reduction: Reduction) -> int:
    """How many blocks of columns there are."""
    return -(-reduction.matrix.groups // _BLOCK_GROUPS)


def accumulate_columns(reduction: Reduction, block: Expr, tokens: Expr) -> None:
    """Computes y for all tokens and one block of columns."""
    weights = local(_BLOCK_ROWS, _BLOCK_GROUPS * GROUP)
    first_group = bind(block * _BLOCK_GROUPS)

    def one_slice(first: Expr, count: int, is_first: bool) -> None:
        _unpack_block(reduction, first, count, first_group, weights)
        with token_tiles(tokens) as tile:
            chosen = tile_tokens(tile, tokens)
            _each_group_of_block(
                reduction.matrix,
                first_group,
                lambda i, counts: _add_tile(reduction, weights, (first, count), chosen, first_group, i, counts, is_first),
            )

    one_slice(0, min(reduction.count, _BLOCK_ROWS), is_first=True)
    full, rest = divmod(reduction.count, _BLOCK_ROWS)
    if full > 1:
        with loop(1, full) as index:
            one_slice(index * _BLOCK_ROWS, _BLOCK_ROWS, is_first=False)
    if full and rest:
        one_slice(full * _BLOCK_ROWS, rest, is_first=False)


def _each_group_of_block(matrix: Matrix, first_group: Expr, body: Callable[[Expr, tuple[int, ...]], None]) -> None:
    """Runs `body(group within the block, lane counts)` for the groups of a block that exist."""
    full, rest = divmod(matrix.columns, GROUP)
    with loop(0, tirx.Min(_BLOCK_GROUPS, full - first_group)) as i:
        body(i, lane_counts(GROUP))
    if rest:
        with when(full < first_group + _BLOCK_GROUPS):
            body(full - first_group, lane_counts(rest))


def _unpack_block(reduction: Reduction, first: Expr, count: int, first_group: Expr, weights: Tensor) -> None:
    with loop(0, count) as i:
        row = reduction.matrix.part_of_row(bind(reduction.row_of(first + i)), first_group, _BLOCK_GROUPS)

        def unpack(group: Expr, counts: tuple[int, ...]) -> None:
            values = row.group(group).weights()
            for j in range(len(counts)):
                store(weights, i, group * GROUP + j * LANES, value=values[j])

        _each_group_of_block(reduction.matrix, first_group, unpack)


def _add_tile(
    reduction: Reduction,
    weights: Tensor,
    rows: tuple[Expr, int],
    tokens: list[Expr],
    first_group: Expr,
    group: Expr,
    counts: tuple[int, ...],
    is_first: bool,
) -> None:
    """Adds the products of some rows to a tile of y: TILE_TOKENS tokens by one group of columns."""
    first, count = rows
    vectors = range(len(counts))
    column = bind((first_group + group) * GROUP)
    sums = local(TILE_TOKENS * len(counts), LANES)

    def start(token: Expr, v: int) -> Expr:
        if not is_first:
            return load(reduction.y, token, column + v * LANES, valid=counts[v])
        return load(reduction.bias, column + v * LANES, valid=counts[v]) if reduction.bias else splat(0.0)

    for t, token in enumerate(tokens):
        for v in vectors:
            sums[t * len(counts) + v, at(0)] = start(token, v)
    with loop(0, count) as i:
        factors = [bind(splat(reduction.h[token, first + i])) for token in tokens]
        for v in vectors:
            weight = bind(load(weights, i, group * GROUP + v * LANES))
            for t, factor in enumerate(factors):
                index = t * len(counts) + v
                sums[index, at(0)] = fma(factor, weight, sums[index, at(0)])
    for t, token in enumerate(tokens):
        for v in vectors:
            value = sums[t * len(counts) + v, at(0)]
            store(reduction.y, token, column + v * LANES, value=value, valid=counts[v])
