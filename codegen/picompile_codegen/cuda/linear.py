"""Linear layers on a GPU: a packed matrix times the activations of one token, or of a chunk."""

from tvm import tirx

from picompile_codegen.cuda.dot import add_part
from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, Place, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix, matrix_argument
from picompile_codegen.cuda.memory import registers, warp_sum
from picompile_codegen.cuda.tiles import TILE_ROWS, TILE_THREADS, TILE_TOKENS, multiply_tile
from picompile_codegen.cuda.vector import BlockVector
from picompile_codegen.kernels.tensor import Tensor, bind, minimum, when

_THREADS = 256
# A warp reads two rows at a time: what it has read of x serves both, and more reads are under way.
_ROWS_A_WARP = 2
_ROWS_A_BLOCK = _THREADS // WARP * _ROWS_A_WARP
# Of x at a time, in shared memory: 18 KiB, so that several blocks fit a multiprocessor.
_COLUMNS = 4096


def linear(*, format: str, n: int, k: int, rows: int, bias: bool) -> CudaKernel:
    """y = x · wᵀ + bias. x float32 [rows, k], w packed [n, k], bias float32 [n] → y float32 [rows, n]."""
    function = CudaFunction("linear", format, f"{n}x{k}", f"r{rows}", "b" if bias else "")
    with function:
        x = function.floats("x", rows, k)
        w = matrix_argument(function, "w", format, n, k)
        biases = function.optional_floats("bias", n, bias)
        y = function.floats("y", rows, n)
        if rows == 1:
            # Where x is in several parts ptxas takes up to 74 registers for q4, where 64 do and a fourth block fits.
            resident = 4 if format == "q4" and k > _COLUMNS else 0
            with function.launch(grid=blocks_for(n, _ROWS_A_BLOCK), block=_THREADS, resident=resident) as place:
                _one(x, w, biases, y, place)
        else:
            grid = (blocks_for(n, TILE_ROWS), blocks_for(rows, TILE_TOKENS))
            with function.launch(grid=grid, block=TILE_THREADS) as place:
                multiply_tile(x, w, biases, y, function.tokens(rows), place)
    return function.cuda_kernel()


def _one(x: Tensor, w: CudaMatrix, bias: Tensor | None, y: Tensor, place: Place) -> None:
    """A warp for every two rows; its lanes take the units of a row in turns."""
    vector = BlockVector(min(_COLUMNS, w.columns))
    sums = registers(_ROWS_A_WARP)
    first = bind(place.block * _ROWS_A_BLOCK + place.warp * _ROWS_A_WARP)
    # Past the last row its own is read again, and nothing written.
    rows = [bind(minimum(first + i, w.rows - 1)) for i in range(_ROWS_A_WARP)]
    for i in range(_ROWS_A_WARP):
        sums[i] = tirx.FloatImm("float32", 0.0)
    for start in range(0, w.columns, _COLUMNS):
        columns = min(_COLUMNS, w.columns - start)
        vector.fill(x, 0, start, w.columns, place, _THREADS)
        add_part(vector, w, rows, (start, columns), sums, place.lane)
    for i in range(_ROWS_A_WARP):
        product = warp_sum(sums[i])
        with when(tirx.And(place.lane == 0, first + i < w.rows)):
            y[0, first + i] = product if bias is None else product + bias[first + i]
