"""Products of packed matrices with activations on a GPU: for one token by warps, for several by tiles.

A tile has 64 by 64 results, of which each of 256 threads has 4 by 4; both factors come through the memory of the block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, when
from picompile_codegen.cuda.dot import BlockInput, add_part, in_parts
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import barrier, registers, shared, warp_sum, zero_registers
from picompile_codegen.specs import LinearSpec

SIDE = 64
THREADS = 256
OWN = 4
_ACROSS = SIDE // OWN
_PITCH = SIDE + 4


@dataclass(frozen=True)
class Padded:
    """`memory` of rows of 64 float32, and four more between them: threads that store a column meet different banks.

    It has one dimension: TVM would take the padding away from two.
    """

    memory: KernelTensor

    @classmethod
    def of(cls, rows: int) -> "Padded":
        """Return memory for `rows` rows, 272 bytes each."""
        return cls(shared(rows * _PITCH))

    def at(self, row: Expr, column: Expr) -> Expr:
        """Return the index of an element."""
        return row * _PITCH + column

    def load(self, row: Expr, column: Expr) -> Expr:
        """Load four elements from `column` on, a multiple of four."""
        return self.memory[tirx.Ramp(self.at(row, column), 1, OWN)]

    def store(self, row: Expr, column: Expr, values: Sequence[Expr]) -> None:
        """Store up to four elements from `column` on, a multiple of their number, which is a power of two."""
        count = len(values)
        if count == 1:
            self.memory[self.at(row, column)] = values[0]
        else:
            self.memory[tirx.Ramp(self.at(row, column), 1, count)] = tirx.Shuffle(list(values), list(range(count)))


def own_place(place: ThreadIndex) -> tuple[Expr, Expr]:
    """Return the first row and the first column of the results that a thread has."""
    return bind(place.thread // _ACROSS * OWN), bind(place.thread % _ACROSS * OWN)


def own_sums() -> KernelTensor:
    """Return registers for a thread's results, all zero."""
    return zero_registers(OWN * OWN)


def add_products(
    left: Padded, right: Padded, depth: int, sums: KernelTensor, place: ThreadIndex, right_first: int = 0
) -> None:
    """sums[i, j] += Σ left[k, row + i] · right[right_first + k, column + j] over k below `depth`."""
    row, column = own_place(place)
    with loop(0, depth) as k:
        of_rows, of_columns = bind(left.load(k, row)), bind(right.load(right_first + k, column))
        a = [bind(tirx.Shuffle([of_rows], [i])) for i in range(OWN)]
        b = [bind(tirx.Shuffle([of_columns], [j])) for j in range(OWN)]
        for i in range(OWN):
            for j in range(OWN):
                sums[i * OWN + j] = sums[i * OWN + j] + a[i] * b[j]


# Tiles of tokens are multiplied with tiles of rows of a packed matrix.


TILE_TOKENS = TILE_ROWS = SIDE
TILE_THREADS = THREADS
# Columns that are multiplied between two barriers: a group of the formats.
DEPTH = 32


def multiply_tile(
    x: KernelTensor, w: CudaMatrix, bias: KernelTensor | None, y: KernelTensor, tokens: Expr, place: ThreadIndex
) -> None:
    """y[t, r] = x[t] · w[r] + bias[r] for the tile of this block; `tokens` of x count."""

    def store(token: Expr, row: Expr, value: Expr) -> None:
        y[token, row] = value if bias is None else value + bias[row]

    tile_products(x, w, lambda row: row, w.rows, tokens, place, store)


def tile_products(
    x: KernelTensor,
    w: CudaMatrix,
    number: Callable[[Expr], Expr],
    rows: int,
    tokens: Expr,
    place: ThreadIndex,
    store: Callable[[Expr, Expr, Expr], None],
) -> None:
    """Call `store(token, row, x[token] · w[number(row)])` for the tokens and rows of this block's tile that there are.

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


def load_tokens(
    x: KernelTensor, xs: Padded, first: Expr, tokens: Expr, first_column: Expr, stop: Expr, thread: Expr
) -> None:
    """xs[c, t] = x[first + t, first_column + c], zeros where there is no such token or no such column before `stop`.

    A warp takes four tokens of eight columns, whose places in shared memory are in different banks.
    """
    c = bind(thread % 8 + thread // WARP % 4 * 8)
    column = bind(first_column + c)
    for turn in range(TILE_TOKENS // 8):
        t = bind(turn * 8 + thread // 128 * 4 + thread // 8 % 4)
        inside = tirx.And(first + t < tokens, column < stop)
        xs.store(c, t, [tirx.if_then_else(inside, x[first + t, column], 0.0)])


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


_ONE_THREADS = 256
# A warp reads two rows at a time: what it has read of x serves both, and more reads are under way.
_ROWS_A_WARP = 2
_ROWS_A_BLOCK = _ONE_THREADS // WARP * _ROWS_A_WARP


def linear(spec: LinearSpec, function: CudaFunction) -> None:
    """Write the launch of a `LinearSpec`."""
    x, w, bias, y = function["x"], CudaMatrix.argument(function, "w"), function.get("bias"), function["y"]
    if spec.rows == 1:
        # Where x is in several parts ptxas takes up to 74 registers for q4, where 64 do and a fourth block fits. For
        # q4m it would spill up to 16 bytes.
        resident = 4 if w.has_nibbles and not w.has_zeros and in_parts(spec.k) else 0
        with function.launch(grid=blocks_for(spec.n, _ROWS_A_BLOCK), block=_ONE_THREADS, resident=resident) as place:
            _one(x, w, bias, y, place)
        return
    grid = (blocks_for(spec.n, TILE_ROWS), blocks_for(spec.rows, TILE_TOKENS))
    with function.launch(grid=grid, block=TILE_THREADS) as place:
        multiply_tile(x, w, bias, y, function.tokens(spec.rows), place)


def _one(x: KernelTensor, w: CudaMatrix, bias: KernelTensor | None, y: KernelTensor, place: ThreadIndex) -> None:
    """Multiply one token: a warp takes two rows, and its lanes take the units of a row in turns."""
    inputs = BlockInput(x, 0, w.columns, _ONE_THREADS)
    sums = registers(_ROWS_A_WARP)
    first = bind(place.block * _ROWS_A_BLOCK + place.warp * _ROWS_A_WARP)
    # Past the last row its own is read again, and nothing written.
    rows = [bind(minimum(first + i, w.rows - 1)) for i in range(_ROWS_A_WARP)]
    for i in range(_ROWS_A_WARP):
        sums[i] = 0.0
    for part in inputs.parts():
        add_part(inputs.fill(part[0], place), w, rows, part, sums, place.lane)
    for i in range(_ROWS_A_WARP):
        product = warp_sum(sums[i])
        with when(tirx.And(place.lane == 0, first + i < w.rows)):
            y[0, first + i] = product if bias is None else product + bias[first + i]
