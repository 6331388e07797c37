"""Products of packed matrices with activations on a GPU: for one token by warps, for several by tiles.

Tiles are multiplied on tensor cores (`mma.py`).
"""

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
from picompile_codegen.specs import LinearAddSpec, LinearSpec

_ONE_THREADS = 256
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
        grid, resident = blocks_for(spec.n, _ROWS_A_BLOCK), _resident(spec, w)
        with function.launch(grid=grid, block=_ONE_THREADS, resident=resident) as place:
            _one(function, w, place)
        return
    _chunk(spec, function, w)


@body(LinearAddSpec)
def linear_add(spec: LinearAddSpec, function: CudaFunction) -> None:
    """Write the launch of a `LinearAddSpec`: the last block to end writes the norm, if there is one."""
    w, y = CudaMatrix.argument(function, "w"), function["y"]
    dim, blocks = spec.linear.n, blocks_for(spec.linear.n, _ROWS_A_BLOCK)
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


def _resident(spec: LinearSpec, w: CudaMatrix) -> int:
    """Return how many blocks of one token shall fit a multiprocessor; 0 leaves it to the compiler.

    Where x is in several parts ptxas takes up to 74 registers for q4, where 64 do and a fourth block fits. For q4m it
    would spill up to 16 bytes.
    """
    return 4 if w.has_nibbles and not (w.has_zeros or w.form.table) and in_parts(spec.k) else 0


def _runs_together(spec: LinearAddSpec, w: CudaMatrix, columns: ColumnLanes, vectors: NormVectors) -> int:
    """Return for how many runs of columns the last block loads all before it writes the norm.

    With a bound on registers, two runs of a norm with a bias spill on sm_90.
    """
    if vectors.bias is not None and _resident(spec.linear, w):
        return 1
    read = 1 + (vectors.weight is not None) + (vectors.bias is not None)
    return max(1, _NORM_REGISTERS // (columns.lanes * read))


def _one(function: CudaFunction, w: CudaMatrix, place: ThreadIndex) -> None:
    """Multiply one token: a warp takes two rows, and its lanes take the units of a row in turns."""
    bias, y, added = function.get("bias"), function["y"], function.get("added")
    inputs = BlockInput(function["x"], 0, w.columns, _ONE_THREADS)
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
            product = product if bias is None else product + bias[first + i]
            y[0, first + i] = product if added is None else added[0, first + i] + product


def _chunk(spec: LinearSpec, function: CudaFunction, w: CudaMatrix) -> None:
    """Multiply several tokens, a tile of tokens and rows to a block."""
    x, bias, y, tile = function["x"], function.get("bias"), function["y"], tile_for(spec.rows, spec.n)
    halves = Halves.scratch(function, "halves", spec.rows, spec.k)
    halves.write(function, x)
    grid = (blocks_for(spec.n, tile.outputs), blocks_for(spec.rows, tile.tokens))
    with function.launch(grid=grid, block=tile.threads, resident=tile.resident) as place:
        tokens = function.tokens(spec.rows)
        first, first_row = bind(place.block_y * tile.tokens), bind(place.block * tile.outputs)
        with when(first < tokens):
            weights = RowWeights(tile, w, lambda r: [(True, w, minimum(first_row + r, spec.n - 1))], place)
            products = multiply(
                tile, x=halves, span=(first, tokens), steps=(0, halves.groups()), weights=weights, place=place
            )
            for token, row, value in products.each_result(first_row, spec.n):
                y[token, row] = value if bias is None else value + bias[row]
