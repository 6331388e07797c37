"""Products of a packed matrix's rows with tokens' activations: projections, and the hidden values of blocks.

A prompt's tokens are multiplied in tiles, by packed panels of float32 (`panels.py`) or of bytes (`byte_tiles.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.backend import body
from picompile_codegen.cpu.bfloat16 import to_bfloat16
from picompile_codegen.cpu.byte_tiles import ByteInputs, byte_tile, multiply_rows_of_bytes
from picompile_codegen.cpu.dot import biased, dot, prepare_vector
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_products import multiply_in_panels, panel_inputs, quantize_tokens
from picompile_codegen.cpu.panels import (
    ChunkSums,
    RegisterTile,
    TokenPanels,
    float_tile,
    import_functions,
    multiply_panels,
    word_columns,
    words_of,
)
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    local_vectors,
    loop,
    minimum,
    parallel,
    select,
    worth_a_region,
)
from picompile_codegen.cpu.token_vectors import TokenVectors, multiply_rows
from picompile_codegen.cpu.vector import at, to_floats, transpose
from picompile_codegen.specs import LinearSpec
from picompile_passes.formats import GROUP

# A panel of so many columns is 96 KiB with AVX-512 and 48 with AVX2, and 64 tokens' inputs for it are 128 KiB: they
# share the second-level cache.
_SLICE_COLUMNS = 512


@dataclass(frozen=True)
class TileProjection:
    """Rows of a matrix that make outputs: output i is x · w[row_of(i)] + bias[i], for i below `count`."""

    matrix: KernelMatrix
    count: int
    row_of: Callable[[Expr], Expr]
    bias: KernelTensor | None

    @property
    def tile(self) -> RegisterTile:
        """The outputs that a task computes for all tokens, and the tokens of a tile."""
        return float_tile() if self.matrix.scale is None else byte_tile()

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return -(-self.count // self.tile.outputs)


@dataclass(frozen=True)
class ChunkInputs:
    """Inputs of a chunk of a prompt in the form that a matrix is multiplied with: float32 or bytes."""

    panels: TokenPanels | None
    quantized: ByteInputs | None

    @classmethod
    def declare(
        cls, function: KernelFunction, name: str, rows: int, columns: int, matrix: KernelMatrix
    ) -> "ChunkInputs":
        """Declare memory for at most `rows` tokens, for products with `matrix` or any like it."""
        if matrix.scale is None:
            return cls(TokenPanels.declare(function, name, rows, columns), None)
        return cls(None, ByteInputs.declare(function, name, rows, columns, matrix))

    def pack(self, x: KernelTensor, tokens: Expr, columns: int) -> None:
        """Take in `tokens` rows of x float32 [rows, columns]."""
        for each in (self.panels, self.quantized):
            if each is not None:
                each.pack(x, tokens, columns)


def project(projection: TileProjection, x: ChunkInputs, tokens: Expr, out: KernelTensor) -> None:
    """Compute all outputs of a projection of inputs that are packed."""
    is_worth = worth_a_region(projection.count * projection.matrix.row_bytes)
    with parallel(projection.tasks, when_worth=is_worth) as task:
        project_rows(projection, task, x, tokens, out)


def project_rows(projection: TileProjection, task: Expr, x: ChunkInputs, tokens: Expr, out: KernelTensor) -> None:
    """out[t, i] = x[t] · w[row_of(i)] + bias[i] for the outputs i of `task` and all tokens t."""
    tile = projection.tile
    first, sums = bind(task * tile.outputs), ChunkSums.zeros(out.rows, tokens, tile.outputs, tile.lanes)

    def row(i: Expr) -> Expr:
        return projection.row_of(minimum(first + i, projection.count - 1))

    if x.panels is not None:
        _multiply_floats(projection.matrix, row, x=x.panels, tokens=tokens, sums=sums)
    elif x.quantized is not None:
        multiply_rows_of_bytes(projection.matrix, row, x=x.quantized, tokens=tokens, sums=sums)
    sums.emit(tokens, first, projection.count, projection.bias, out)


def _multiply_floats(
    matrix: KernelMatrix, row: Callable[[Expr], Expr], x: TokenPanels, tokens: Expr, sums: ChunkSums
) -> None:
    """Multiply rows `row(0)`, `row(1)`, … with all tokens: a slice of their columns at a time.

    While a slice is multiplied the next one is fetched: these rows' next columns, or the first of as many rows behind.
    """
    tile, tiles = float_tile(), bind(float_tile().count(tokens))
    weights = local_vectors(words_of(min(_SLICE_COLUMNS, x.columns)), tile.vectors, lanes=tile.lanes)
    with loop(0, -(-x.columns // _SLICE_COLUMNS)) as index:
        start = bind(index * _SLICE_COLUMNS)
        count = bind(minimum(_SLICE_COLUMNS, x.columns - start))
        _pack_rows(matrix, row, start, count, weights)
        is_last = start + count >= x.columns
        next_row, next_line = bind(select(is_last, tile.outputs, 0)), bind(select(is_last, 0, start + count) // GROUP)
        with loop(0, tiles) as number:
            begin, end = (bind(next_row + tile.outputs * (number + i) // tiles) for i in range(2))

            def fetch(step: Expr, begin: Expr = begin, end: Expr = end, line: Expr = next_line) -> None:
                with loop(begin, end) as i:
                    matrix.fetch(row(i), line + step)

            multiply_panels(weights, x, columns=(start, count), tile=number, sums=sums, first_vector=0, fetch=fetch)


def _pack_rows(
    matrix: KernelMatrix, row: Callable[[Expr], Expr], start: Expr, count: Expr, weights: KernelTensor
) -> None:
    """Pack columns `start` … of rows of float16: columns become rows."""
    lanes = float_tile().lanes
    columns = lanes * word_columns()

    def words(number: Expr, column: Expr) -> Expr:
        parts = [to_floats(matrix.data[number, at(column + i, lanes)], lanes) for i in range(0, columns, lanes)]
        return parts[0] if len(parts) == 1 else to_bfloat16(bind(parts[0]), bind(parts[1]))

    with loop(0, float_tile().vectors) as vector:
        numbers = [bind(row(vector * lanes + i)) for i in range(lanes)]
        with loop(0, count // columns) as index:
            for i, word in enumerate(transpose([words(number, start + index * columns) for number in numbers])):
                weights[index * lanes + i, vector] = word


@body(LinearSpec)
def linear(spec: LinearSpec, function: KernelFunction) -> None:
    """Write the body of a `LinearSpec`."""
    w = KernelMatrix.argument(function, "w")
    if spec.panels:
        _linear_in_panels(function, w, spec.activation_bytes)
    elif spec.rows == 1:
        _linear_one(function, w)
    elif spec.rowwise:
        _linear_rowwise(function, w)
    else:
        _linear_of_chunk(function, w)


def _linear_of_chunk(function: KernelFunction, w: KernelMatrix) -> None:
    """Multiply several tokens in tiles."""
    x, y = function["x"], function["y"]
    inputs = ChunkInputs.declare(function, "x", x.rows, x.columns, w)
    import_functions(function)
    tokens = function.tokens(x.rows)
    inputs.pack(x, tokens, x.columns)
    project(TileProjection(w, y.columns, lambda row: row, function.get("bias")), inputs, tokens, y)


def _linear_rowwise(function: KernelFunction, w: KernelMatrix) -> None:
    """Multiply each token as `_linear_one` does."""
    x, bias, y = function["x"], function.get("bias"), function["y"]
    vectors = TokenVectors.declare(function, "x", x, x.rows, w)
    tokens = function.tokens(x.rows)
    vectors.prepare(tokens)

    def store(token: Expr, row: Expr, product: Expr) -> None:
        y[token, row] = biased(product, bias, row)

    multiply_rows(w, row_of=lambda row: row, count=w.rows, vectors=vectors, tokens=tokens, emit=store)


def _linear_in_panels(function: KernelFunction, w: KernelMatrix, activation_bytes: int) -> None:
    """Multiply any number of tokens, each to the same bits."""
    x, bias, y = function["x"], function.get("bias"), function["y"]
    inputs = panel_inputs(function, "x", x.rows, w.columns, w, activation_bytes)
    tokens = function.tokens(x.rows)

    def store(token: Expr, output: Expr, lanes: int, products: Expr) -> None:
        outputs = at(output, lanes)
        y[token, outputs] = products if bias is None else products + bias[outputs]

    quantize_tokens(x, tokens, w.columns, inputs)
    multiply_in_panels(w, inputs, tokens, store)


def _linear_one(function: KernelFunction, w: KernelMatrix) -> None:
    """Multiply one token with the rows, front to back."""
    bias, y, vector = function.get("bias"), function["y"], prepare_vector(function["x"], w)
    with parallel(w.rows, when_worth=worth_a_region(w.bytes)) as row:
        product = dot(w, row, vector, [row + w.rows_ahead])
        y[0, row] = product if bias is None else product + bias[row]
