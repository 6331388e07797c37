"""Products of packed matrices with activations on a GPU: for one token by warps, for several by tiles.

Tiles are multiplied on tensor cores (`mma.py`).
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, bind, minimum, when
from picompile_codegen.cuda.dot import BlockInput, add_part, in_parts
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.halves import Halves
from picompile_codegen.cuda.matrix import ColumnLanes, CudaMatrix
from picompile_codegen.cuda.memory import last_block, registers, warp_sum
from picompile_codegen.cuda.mma import RowWeights, multiply, tile_for
from picompile_codegen.cuda.norms import NormVectors, write_norm
from picompile_codegen.cuda.panels import PANEL_THREADS, panel_products
from picompile_codegen.specs import LinearAddSpec, LinearSpec
from picompile_passes.formats import PANEL_ROWS

# A block has as many threads as a panel takes.
_ONE_THREADS = PANEL_THREADS
# A warp reads two rows at a time: what it has read of x serves both, and more reads are under way.
_ROWS_A_WARP = 2
_ROWS_A_BLOCK = _ONE_THREADS // WARP * _ROWS_A_WARP
# Registers of a thread for what the last block loads together to write the norm, less than what multiplying takes.
_NORM_REGISTERS = 32


@body(LinearSpec)
def linear(spec: LinearSpec, function: CudaFunction) -> None:
    """Write the launch of a `LinearSpec`."""
    w = CudaMatrix.argument(function, "w")
    if spec.rows == 1:
        with function.launch(grid=_blocks(w), block=_ONE_THREADS, resident=_resident(spec, w)) as place:
            _one(function, w, place)
        return
    bias, y = function.get("bias"), function["y"]

    def store(token: Expr, row: Expr, value: Expr) -> None:
        y[token, row] = value if bias is None else value + bias[row]

    halves = Halves.scratch(function, "halves", spec.rows, spec.k)
    halves.write(function, function["x"])
    multiply_halves(function, halves, w, store)


@body(LinearAddSpec)
def linear_add(spec: LinearAddSpec, function: CudaFunction) -> None:
    """Write the launch of a `LinearAddSpec`: the last block to end writes the norm, if there is one."""
    w, y = CudaMatrix.argument(function, "w"), function["y"]
    dim, blocks = spec.linear.n, _blocks(w)
    tickets = None if spec.norm is None else function.tickets(1)
    with function.launch(grid=blocks, block=_ONE_THREADS, resident=_resident(spec.linear, w)) as place:
        _one(function, w, place)
        if spec.norm is None or tickets is None:
            return
        with when(last_block(tickets, 0, blocks, place)):
            columns = ColumnLanes.of(dim, place.thread, _ONE_THREADS)
            vectors = NormVectors.of(columns, function, "norm_", early=False)
            out = function["normed"], 0, 0

            def values(number: int) -> list[Expr]:
                return columns.load_run(number, y, 0)

            together = _runs_together(spec, w, columns, vectors)
            write_norm(spec.norm, columns, values, vectors, out, thread=place.thread, together=together)


def _blocks(w: CudaMatrix) -> int:
    """Return how many blocks of one token there are: one for so many rows, or for a panel."""
    return blocks_for(w.rows, PANEL_ROWS if w.panels else _ROWS_A_BLOCK)


def _resident(spec: LinearSpec, w: CudaMatrix) -> int:
    """Return how many blocks of one token shall fit a multiprocessor; 0 leaves it to the compiler.

    Where x is in several parts ptxas takes up to 74 registers for q4, where 64 do and a fourth block fits. For q4m it
    would spill up to 16 bytes.
    """
    if w.panels or not w.has_nibbles or w.has_zeros or w.form.table:
        return 0
    return 4 if in_parts(spec.k) else 0


def _runs_together(spec: LinearAddSpec, w: CudaMatrix, columns: ColumnLanes, vectors: NormVectors) -> int:
    """Return for how many runs of columns the last block loads all before it writes the norm.

    With a bound on registers, two runs of a norm with a bias spill on sm_90.
    """
    if vectors.bias is not None and _resident(spec.linear, w):
        return 1
    read = 1 + (vectors.weight is not None) + (vectors.bias is not None)
    return max(1, _NORM_REGISTERS // (columns.lanes * read))


def _one(function: CudaFunction, w: CudaMatrix, place: ThreadIndex) -> None:
    """Multiply one token."""
    bias, y, added = function.get("bias"), function["y"], function.get("added")

    def store(row: Expr, product: Expr) -> None:
        product = product if bias is None else product + bias[row]
        y[0, row] = product if added is None else added[0, row] + product

    inputs = BlockInput(function["x"], 0, w.columns, _ONE_THREADS)
    if w.panels:
        product = panel_products([w], inputs, place.block, place)
        with when(place.thread < PANEL_ROWS):
            store(place.block * PANEL_ROWS + place.thread, product(0))
        return
    _multiply_rows(w, inputs, place, store)


def _multiply_rows(w: CudaMatrix, inputs: BlockInput, place: ThreadIndex, store: Callable[[Expr, Expr], None]) -> None:
    """Multiply rows: a warp takes two, and its lanes take the units of a row in turns."""
    sums = registers(_ROWS_A_WARP)
    first = bind(place.block * _ROWS_A_BLOCK + place.warp * _ROWS_A_WARP)
    # Past the last row its own is read again, and nothing written.
    rows = [bind(minimum(first + i, w.rows - 1)) for i in range(_ROWS_A_WARP)]
    for i in range(_ROWS_A_WARP):
        sums[i] = 0.0
    for part in inputs.parts():
        add_part(inputs.fill(part[0], place), matrix=w, rows=rows, part=part, sums=sums, lane=place.lane)
    for i in range(_ROWS_A_WARP):
        product = warp_sum(sums[i])
        with when(tirx.And(place.lane == 0, first + i < w.rows)):
            store(first + i, product)


def multiply_halves(
    function: CudaFunction, x: Halves, w: CudaMatrix, store: Callable[[Expr, Expr, Expr], None]
) -> None:
    """Write the launch of x · wᵀ for several tokens: a block has a tile of tokens and rows.

    `store(token, row, value)` is written where a thread has a result.
    """
    rows = x.values.rows
    tile = tile_for(rows, w.rows)
    grid = (blocks_for(w.rows, tile.outputs), blocks_for(rows, tile.tokens))
    with function.launch(grid=grid, block=tile.threads, resident=tile.resident) as place:
        tokens = function.tokens(rows)
        first, first_row = bind(place.block_y * tile.tokens), bind(place.block * tile.outputs)
        with when(first < tokens):
            weights = RowWeights(tile, w, lambda r: [(True, w, minimum(first_row + r, w.rows - 1))], place)
            products = multiply(tile, x=x, span=(first, tokens), steps=(0, x.groups()), weights=weights, place=place)
            for token, row, value in products.each_result(first_row, w.rows):
                store(token, row, value)
