"""Predictors that were trained, on a GPU: two matrices of low rank tell which neurons a token will fire.

The first matrix has few rows, long ones: a block of threads for each. The second has many rows, short ones: a warp for
several at once, if they are shorter than a warp can read.
"""

from tvm import tirx

from picompile_codegen.cuda.dot import BlockInput, lanes_sum, unit_product
from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, Place, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix, matrix_argument
from picompile_codegen.cuda.memory import block_sum, registers
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, maximum, minimum, when

_HIDDEN_THREADS = 128
_MASK_THREADS = 256
# Turns of a warp whose rows are read together, so that enough reads are under way.
_TOGETHER = 4
_ZERO = tirx.FloatImm("float32", 0.0)


def predict_low_rank(
    *, formats: tuple[str, str], neurons: int, rank: int, dim: int, relu: bool, rows: int = 1
) -> CudaKernel:
    """mask[t, j] = 1 where fc2[j] · h[t] + bias[j] > threshold, else 0; h = fc1 · x, or relu(fc1 · x) with `relu`.

    x float32 [rows, dim], fc1 packed [rank, dim], fc2 packed [neurons, rank], in `formats`, bias float32 [neurons],
    threshold float32 [1] → mask uint8 [rows, neurons].
    """
    shape = f"{neurons}x{rank}x{dim}"
    function = CudaFunction("predict", "relu" if relu else "linear", *formats, shape, f"r{rows}" if rows > 1 else "")
    with function:
        x = function.floats("x", rows, dim)
        fc1 = matrix_argument(function, "fc1", formats[0], rank, dim)
        fc2 = matrix_argument(function, "fc2", formats[1], neurons, rank)
        bias, threshold = function.floats("bias", neurons), function.floats("threshold", 1)
        hidden = function.scratch("hidden", "float32", rows, rank)
        mask = function.argument("mask", "uint8", rows, neurons)
        # Tokens are next to each other: what a block reads of a matrix, the next finds in the cache.
        with (
            function.launch(grid=(rows, rank), block=_HIDDEN_THREADS) as place,
            when(place.block < function.tokens(rows)),
        ):
            _compute_hidden(x, fc1, hidden, relu, place)
        lanes = _lanes(fc2)
        with (
            function.launch(grid=(rows, blocks_for(neurons, _rows_a_block(lanes))), block=_MASK_THREADS) as place,
            when(place.block < function.tokens(rows)),
        ):
            _compute_mask(hidden, fc2, bias, threshold, mask, lanes, place)
    return function.cuda_kernel()


def _compute_hidden(x: Tensor, fc1: CudaMatrix, hidden: Tensor, relu: bool, place: Place) -> None:
    """hidden[token, row] for the token and row of this block."""
    token, row = place.block, place.block_y
    total = registers(1)
    total[0] = _ZERO
    units = blocks_for(fc1.columns, fc1.unit_weights)
    with loop(0, blocks_for(units, _HIDDEN_THREADS)) as turn:
        unit = bind(turn * _HIDDEN_THREADS + place.thread)
        with when(unit < units):
            values = _read(x, token, unit * fc1.unit_weights, fc1.unit_weights, fc1.columns)
            total[0] = total[0] + unit_product(fc1.unit(row, unit), values)
    product = block_sum(total[0], place.thread, _HIDDEN_THREADS)
    with when(place.thread == 0):
        hidden[token, row] = maximum(product, _ZERO) if relu else product


def _read(x: Tensor, row: Expr, first: Expr, count: int, columns: int) -> list[Expr]:
    """x[row, first … first + count - 1], zeros past the last column. `first` is a multiple of `count`."""
    if columns % count:
        places = [bind(first + i) for i in range(count)]
        return [bind(tirx.if_then_else(place < columns, x[row, place], _ZERO)) for place in places]
    fours = [bind(x[row, tirx.Ramp(first + i, 1, 4)]) for i in range(0, count, 4)]
    return [bind(tirx.Shuffle([four], [lane])) for four in fours for lane in range(4)]


def _lanes(matrix: CudaMatrix) -> int:
    """Lanes that read a row together: a power of two."""
    return min(1 << (blocks_for(matrix.columns, matrix.unit_weights) - 1).bit_length(), WARP)


def _turns(lanes: int) -> int:
    """Turns of a warp: fewer where each reads several rows."""
    return max(_TOGETHER * lanes // WARP, 1)


def _rows_a_block(lanes: int) -> int:
    return _MASK_THREADS // lanes * _turns(lanes)


def _compute_mask(
    hidden: Tensor, fc2: CudaMatrix, bias: Tensor, threshold: Tensor, mask: Tensor, lanes: int, place: Place
) -> None:
    """mask[token] of the neurons of this block."""
    token, at_once = place.block, _MASK_THREADS // lanes
    inputs = BlockInput(hidden, token, fc2.columns, _MASK_THREADS)
    sums = registers(_turns(lanes))
    first = bind(place.block_y * _rows_a_block(lanes) + place.thread // lanes)
    neurons = [bind(first + turn * at_once) for turn in range(_turns(lanes))]
    for i in range(len(neurons)):
        sums[i] = _ZERO
    for start, columns in inputs.parts():
        vector = inputs.fill(start, place)
        units = blocks_for(columns, fc2.unit_weights)
        with loop(0, blocks_for(units, lanes)) as turn:
            unit = bind(turn * lanes + place.lane % lanes)
            with when(unit < units):
                values = vector.read(unit * fc2.unit_weights, fc2.unit_weights)
                for i, neuron in enumerate(neurons):
                    read = fc2.unit(bind(minimum(neuron, fc2.rows - 1)), start // fc2.unit_weights + unit)
                    sums[i] = sums[i] + unit_product(read, values)
    for i, neuron in enumerate(neurons):
        product = lanes_sum(sums[i], lanes)
        with when(tirx.And(place.lane % lanes == 0, neuron < fc2.rows)):
            mask[token, neuron] = tirx.Cast("uint8", product + bias[neuron] > threshold[0])
