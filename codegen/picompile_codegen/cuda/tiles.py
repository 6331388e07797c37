"""Products of a packed matrix with several tokens: a block takes a tile of tokens and rows, through shared memory."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.function import Place
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import barrier, registers, shared
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, when

TILE_TOKENS = 64
TILE_ROWS = 64
TILE_THREADS = 256
# Columns that are multiplied between two barriers: a group of the formats.
_DEPTH = 32
# A thread has so many tokens and so many rows of the tile.
_TOKENS, _ROWS = 4, 4
# Four floats more than the tile is wide, so that threads which store columns meet different banks.
_PITCH = TILE_TOKENS + 4
_ACROSS = TILE_ROWS // _ROWS


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
        xs, ws = shared(_DEPTH, _PITCH), shared(_DEPTH, _PITCH)
        sums = registers(_TOKENS * _ROWS)
        for i in range(_TOKENS * _ROWS):
            sums[i] = tirx.FloatImm("float32", 0.0)
        groups = -(-w.columns // _DEPTH)
        with loop(0, groups) as group:
            barrier()
            _load_tokens(x, xs, first_token, tokens, group, w.columns, place.thread)
            _load_rows(w, ws, number, first_row, rows, group, place.thread)
            barrier()
            _multiply(xs, ws, sums, place.thread)
        for i in range(_TOKENS):
            for j in range(_ROWS):
                token, row = bind(first_token + _token(place.thread) + i), bind(first_row + _row(place.thread) + j)
                with when(tirx.And(token < tokens, row < rows)):
                    store(token, row, sums[i * _ROWS + j])


def _token(thread: Expr) -> Expr:
    return thread // _ACROSS * _TOKENS


def _row(thread: Expr) -> Expr:
    return thread % _ACROSS * _ROWS


def _load_tokens(x: Tensor, xs: Tensor, first: Expr, tokens: Expr, group: Expr, columns: int, thread: Expr) -> None:
    """xs[c, t] = x[first + t, group · 32 + c], zeros where there is no such token or column."""
    for turn in range(TILE_TOKENS * _DEPTH // TILE_THREADS):
        index = bind(turn * TILE_THREADS + thread)
        t, c = bind(index // _DEPTH), bind(index % _DEPTH)
        column = bind(group * _DEPTH + c)
        inside = tirx.And(first + t < tokens, column < columns)
        xs[c, t] = tirx.if_then_else(inside, x[first + t, column], tirx.FloatImm("float32", 0.0))


def _load_rows(
    w: CudaMatrix, ws: Tensor, number: Callable[[Expr], Expr], first: Expr, rows: int, group: Expr, thread: Expr
) -> None:
    """ws[c, r] = the weight of row first + r in column group · 32 + c. Past the last row the last is read again."""
    units_a_group = _DEPTH // w.unit_weights
    with when(thread < TILE_ROWS * units_a_group):
        r, part = bind(thread // units_a_group), bind(thread % units_a_group)
        row = bind(tirx.Min(first + r, rows - 1))
        unit = w.unit(bind(number(row)), group * units_a_group + part)
        for i in range(w.unit_weights):
            ws[part * w.unit_weights + i, r] = unit.weight(i)


def _multiply(xs: Tensor, ws: Tensor, sums: Tensor, thread: Expr) -> None:
    token, row = bind(_token(thread)), bind(_row(thread))
    with loop(0, _DEPTH) as c:
        of_tokens, of_rows = bind(xs[c, tirx.Ramp(token, 1, 4)]), bind(ws[c, tirx.Ramp(row, 1, 4)])
        a = [bind(tirx.Shuffle([of_tokens], [i])) for i in range(_TOKENS)]
        b = [bind(tirx.Shuffle([of_rows], [j])) for j in range(_ROWS)]
        for i in range(_TOKENS):
            for j in range(_ROWS):
                sums[i * _ROWS + j] = sums[i * _ROWS + j] + a[i] * b[j]
