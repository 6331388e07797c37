"""Products of a packed matrix with several tokens: a block takes a tile of tokens and rows, through shared memory."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.function import WARP, Place
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import barrier
from picompile_codegen.cuda.outer import OWN, SIDE, THREADS, Padded, add_products, own_place, own_sums
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, when

TILE_TOKENS = TILE_ROWS = SIDE
TILE_THREADS = THREADS
# Columns that are multiplied between two barriers: a group of the formats.
DEPTH = 32


def multiply_tile(x: Tensor, w: CudaMatrix, bias: Tensor | None, y: Tensor, tokens: Expr, place: Place) -> None:
    """y[t, r] = x[t] · w[r] + bias[r] for the tile of this block; `tokens` of x count."""

    def store(token: Expr, row: Expr, value: Expr) -> None:
        y[token, row] = value if bias is None else value + bias[row]

    tile_products(x, w, lambda row: row, w.rows, tokens, place, store)


def tile_products(
    x: Tensor,
    w: CudaMatrix,
    number: Callable[[Expr], Expr],
    rows: int,
    tokens: Expr,
    place: Place,
    store: Callable[[Expr, Expr, Expr], None],
) -> None:
    """Calls `store(token, row, x[token] · w[number(row)])` for the tokens and rows of this block's tile that there are.

    Row `number(r)` of the matrix is the r-th of `rows`. A block without tokens ends at once.
    """
    first_row, first_token = bind(place.block * TILE_ROWS), bind(place.block_y * TILE_TOKENS)
    with when(first_token < tokens):
        xs, ws, sums = Padded.of(DEPTH), Padded.of(DEPTH), own_sums()
        with loop(0, -(-w.columns // DEPTH)) as group:
            barrier()
            load_tokens(x, xs, first_token, tokens, bind(group * DEPTH), w.columns, place.thread)
            _load_rows(w, ws, number, first_row, rows, group, place.thread)
            barrier()
            add_products(xs, ws, DEPTH, sums, place)
        own_token, own_row = own_place(place)
        for i in range(OWN):
            for j in range(OWN):
                token, row = bind(first_token + own_token + i), bind(first_row + own_row + j)
                with when(tirx.And(token < tokens, row < rows)):
                    store(token, row, sums[i * OWN + j])


def load_tokens(x: Tensor, xs: Padded, first: Expr, tokens: Expr, first_column: Expr, stop: Expr, thread: Expr) -> None:
    """xs[c, t] = x[first + t, first_column + c], zeros where there is no such token or no such column before `stop`.

    A warp takes four tokens of eight columns, whose places in shared memory are in different banks.
    """
    c = bind(thread % 8 + thread // WARP % 4 * 8)
    column = bind(first_column + c)
    for turn in range(TILE_TOKENS // 8):
        t = bind(turn * 8 + thread // 128 * 4 + thread // 8 % 4)
        inside = tirx.And(first + t < tokens, column < stop)
        xs.store(c, t, [tirx.if_then_else(inside, x[first + t, column], tirx.FloatImm("float32", 0.0))])


def _load_rows(
    w: CudaMatrix, ws: Padded, number: Callable[[Expr], Expr], first: Expr, rows: int, group: Expr, thread: Expr
) -> None:
    """ws[c, r] = the weight of row first + r in column group · 32 + c. Past the last row the last is read again."""
    units_a_group = DEPTH // w.unit_weights
    with when(thread < TILE_ROWS * units_a_group):
        r, part = bind(thread // units_a_group), bind(thread % units_a_group)
        row = bind(tirx.Min(first + r, rows - 1))
        unit = w.unit(bind(number(row)), group * units_a_group + part)
        for i in range(w.unit_weights):
            ws.store(part * w.unit_weights + i, r, [unit.weight(i)])
