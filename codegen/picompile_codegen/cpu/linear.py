"""Products of rows of a packed matrix with the activations of many tokens: what prefill is made of.

A task takes a block of weights, turns it into float32 once, and multiplies it with every token. Tiles of 4 rows by 3
tokens keep twelve sums, three inputs and a weight in AVX2's sixteen registers: twelve multiply-adds for seven loads.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.byte_tiles import block_rows, declare_rows, multiply_block, quantize_rows, raw_offset
from picompile_codegen.cpu.dot import biased, dot, prepare_vector
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix, each_group, groups_of
from picompile_codegen.cpu.quantized import QuantizedRows
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    in_slices,
    local,
    loop,
    minimum,
    parallel,
    token_tiles,
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_vectors import TokenVectors, multiply_rows
from picompile_codegen.cpu.vector import LANES, at, blocks, fma, four_totals, load, store, zero_vectors
from picompile_codegen.specs import LinearSpec
from picompile_passes.weight_formats import GROUP

TILE_TOKENS = 3
TILE_ROWS = 4
ROW_BLOCK = 2 * TILE_ROWS
# A block of 8 rows by 512 columns is 16 KiB: half of the smallest first-level cache, the inputs get the other half.
_BLOCK_COLUMNS = 512


@dataclass(frozen=True)
class TileProjection:
    """Rows of a matrix that make outputs: output i is x · w[row_of(i)] + bias[i], for i below `count`."""

    matrix: KernelMatrix
    count: int
    row_of: Callable[[Expr], Expr]
    bias: KernelTensor | None


def row_block(matrix: KernelMatrix) -> int:
    """Return how many outputs a task of `project_rows` computes."""
    return ROW_BLOCK if matrix.scale is None else block_rows()


def project(
    projection: TileProjection, x: KernelTensor, quantized: QuantizedRows | None, tokens: Expr, out: KernelTensor
) -> None:
    """Compute all outputs of a projection. `quantized` is memory for x in bytes, where the matrix has bytes."""
    matrix = projection.matrix
    if quantized is not None:
        quantize_rows(x, tokens, matrix.columns, raw_offset(matrix), quantized)
    block = row_block(matrix)
    with parallel(
        -(-projection.count // block), when_worth=worth_a_region(projection.count * matrix.row_bytes)
    ) as index:
        project_rows(projection, index, x, quantized, tokens, out)


def project_rows(
    projection: TileProjection,
    block: Expr,
    x: KernelTensor,
    quantized: QuantizedRows | None,
    tokens: Expr,
    out: KernelTensor,
) -> None:
    """out[t, i] = x[t] · w[row_of(i)] + bias[i] for the `row_block()` outputs i of `block` and all tokens t."""
    if quantized is None:
        _project_floats(projection, block, x, tokens, out)
        return
    first = bind(block * block_rows())
    multiply_block(
        projection.matrix,
        lambda i: projection.row_of(minimum(first + i, projection.count - 1)),
        quantized,
        tokens,
        lambda token, i, sums: _store(projection, out, token, first + i * LANES, sums),
    )


def _store(projection: TileProjection, out: KernelTensor, token: Expr, output: Expr, sums: Expr) -> None:
    """Store eight outputs of a token, those that exist."""
    full, rest = divmod(projection.count, LANES)

    def store_lanes(valid: int) -> None:
        bias = None if projection.bias is None else load(projection.bias, output, valid=valid)
        store(out, token, output, value=sums if bias is None else sums + bias, valid=valid)

    if not rest and not projection.count % block_rows():
        store_lanes(LANES)
        return
    with when(output < full * LANES):
        store_lanes(LANES)
    if rest:
        with when(output == full * LANES):
            store_lanes(rest)


def _project_floats(projection: TileProjection, block: Expr, x: KernelTensor, tokens: Expr, out: KernelTensor) -> None:
    """out[t, i] = x[t] · w[row_of(i)] + bias[i] for the ROW_BLOCK outputs i of `block` and all tokens t."""
    columns = projection.matrix.columns
    weights = local(ROW_BLOCK, min(_BLOCK_COLUMNS, columns + -columns % GROUP))
    first_output = bind(block * ROW_BLOCK)

    def one_slice(start: Expr, width: int, is_first: bool) -> None:
        _unpack_rows(projection, first_output, start, width, weights)
        with token_tiles(tokens, TILE_TOKENS) as chosen:
            remaining = minimum(ROW_BLOCK, projection.count - first_output)
            with loop(0, (remaining + (TILE_ROWS - 1)) // TILE_ROWS) as part:
                sums = _tile_sums(weights, part * TILE_ROWS, x, chosen, start, width)
                output = bind(first_output + part * TILE_ROWS)
                _emit(projection, out, chosen, output, sums, is_first)

    in_slices(columns, _BLOCK_COLUMNS, one_slice)


def _unpack_rows(
    projection: TileProjection, first_output: Expr, start: Expr, width: int, weights: KernelTensor
) -> None:
    """Unpack columns `start` … of a block's rows to float32. Rows past the end repeat the last one, unused."""
    with loop(0, ROW_BLOCK) as i:
        number = bind(projection.row_of(minimum(first_output + i, projection.count - 1)))
        row = projection.matrix.part_of_row(number, start // GROUP, groups_of(width))

        def unpack(group: Expr, _: tuple[int, ...]) -> None:
            for j, value in enumerate(row.group(group).weights()):
                store(weights, i, group * GROUP + j * LANES, value=value)

        each_group(width, unpack)


def _tile_sums(
    weights: KernelTensor, first_row: Expr, x: KernelTensor, tokens: list[Expr], start: Expr, width: int
) -> list[Expr]:
    """Return, for each token, its products with TILE_ROWS rows of unpacked weights: a vector of TILE_ROWS lanes."""
    sums = zero_vectors(TILE_TOKENS * TILE_ROWS)

    def step(column: Expr, valid: int) -> None:
        inputs = [bind(load(x, token, start + column, valid=valid)) for token in tokens]
        for r in range(TILE_ROWS):
            weight = bind(load(weights, first_row + r, column))
            for t in range(TILE_TOKENS):
                index = t * TILE_ROWS + r
                sums[index, at(0)] = fma(weight, inputs[t], sums[index, at(0)])

    blocks(width, step)
    return [four_totals([sums[t * TILE_ROWS + r, at(0)] for r in range(TILE_ROWS)]) for t in range(TILE_TOKENS)]


def _emit(
    projection: TileProjection, out: KernelTensor, tokens: list[Expr], output: Expr, sums: list[Expr], is_first: bool
) -> None:
    """Store TILE_ROWS outputs of a tile's tokens, those that exist, or add them to the sums of earlier columns."""

    def emit(first: Expr, lanes: int, values: list[Expr]) -> None:
        place = at(first, lanes)
        if not is_first:
            # All are read before any is written: the tokens of a tile may be the same.
            values = [bind(out[token, place] + value) for token, value in zip(tokens, values, strict=True)]
        elif projection.bias is not None:
            values = [projection.bias[place] + value for value in values]
        for token, value in zip(tokens, values, strict=True):
            out[token, place] = value

    if projection.count % TILE_ROWS == 0:
        emit(output, TILE_ROWS, sums)
        return
    for i in range(TILE_ROWS):
        with when(output + i < projection.count):
            emit(output + i, 1, [tirx.Shuffle([value], [i]) for value in sums])


def linear(spec: LinearSpec, function: KernelFunction) -> None:
    """Write the body of a `LinearSpec`."""
    x, w, bias, y = function["x"], KernelMatrix.argument(function, "w"), function.get("bias"), function["y"]
    if spec.rows == 1:
        _linear_one(x, w, bias, y)
        return
    if spec.rowwise:
        _linear_rowwise(function, x, w, bias, y)
        return
    quantized = None if w.scale is None else declare_rows(function, "x", spec.rows, spec.k, w)
    project(TileProjection(w, spec.n, lambda row: row, bias), x, quantized, function.tokens(spec.rows), y)


def _linear_rowwise(
    function: KernelFunction, x: KernelTensor, w: KernelMatrix, bias: KernelTensor | None, y: KernelTensor
) -> None:
    """Multiply each token as `_linear_one` does."""
    vectors = TokenVectors.declare(function, "x", x, x.rows, w)
    tokens = function.tokens(x.rows)
    vectors.prepare(tokens)

    def store(token: Expr, row: Expr, product: Expr) -> None:
        y[token, row] = biased(product, bias, row)

    multiply_rows(w, lambda row: row, w.rows, vectors, tokens, store)


def _linear_one(x: KernelTensor, w: KernelMatrix, bias: KernelTensor | None, y: KernelTensor) -> None:
    """Multiply one token with the rows, front to back."""
    vector = prepare_vector(x, w)
    with parallel(w.rows, when_worth=worth_a_region(w.bytes)) as row:
        product = dot(w, row, vector, [row + w.rows_ahead])
        y[0, row] = product if bias is None else product + bias[row]
