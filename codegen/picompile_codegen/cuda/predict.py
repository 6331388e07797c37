"""Predictors on a GPU: matrices of low rank that were trained, and signs, which need no training.

Of low rank: the first matrix has few rows, long ones, and a block of threads for each. The second has many rows, short
ones: a warp takes several at once, if they are shorter than a warp can read.

By signs, with the layout of bits of `cpu/predict.py`: each block packs the signs of x by itself, since to read x takes
less time than a launch of its own.
"""

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum, minimum, when
from picompile_codegen.cuda.dot import BlockInput, unit_product
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import barrier, block_sum, lanes_sum, registers, shared, zero_registers
from picompile_codegen.errors import CodegenError
from picompile_codegen.signs import BLOCK_COLUMNS
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec


def _refuse_experts(spec: PredictLowRankSpec | PredictSignsSpec) -> None:
    if spec.experts:
        raise CodegenError("there is no GPU kernel that predicts neurons of experts")


_HIDDEN_THREADS = 128
_MASK_THREADS = 256
# Turns of a warp whose rows are read together, so that enough reads are under way.
_TOGETHER = 4


@body(PredictLowRankSpec)
def predict_low_rank(spec: PredictLowRankSpec, function: CudaFunction) -> None:
    """Write the launches of a `PredictLowRankSpec`. Raises `CodegenError` for matrices in panels, and for experts."""
    _refuse_experts(spec)
    if spec.panels:
        raise CodegenError(f"kernel {function.name}: a GPU reads matrices of predictors by rows, not in panels")
    rows, fc1, fc2 = spec.rows, CudaMatrix.argument(function, "fc1"), CudaMatrix.argument(function, "fc2")
    hidden = function.scratch("hidden", "float32", rows, spec.rank)
    # Tokens are next to each other: what a block reads of a matrix, the next finds in the cache.
    with (
        function.launch(grid=(rows, spec.rank), block=_HIDDEN_THREADS) as place,
        when(place.block < function.tokens(rows)),
    ):
        _compute_hidden(function["x"], fc1, hidden, spec.relu, place)
    lanes = _lanes(fc2)
    with (
        function.launch(grid=(rows, blocks_for(spec.neurons, _rows_a_block(lanes))), block=_MASK_THREADS) as place,
        when(place.block < function.tokens(rows)),
    ):
        _compute_mask(function, hidden, fc2, place)


def _compute_hidden(x: KernelTensor, fc1: CudaMatrix, hidden: KernelTensor, relu: bool, place: ThreadIndex) -> None:
    """hidden[token, row] for the token and row of this block."""
    token, row = place.block, place.block_y
    total = zero_registers(1)
    units = blocks_for(fc1.columns, fc1.unit_weights)
    with loop(0, blocks_for(units, _HIDDEN_THREADS)) as turn:
        unit = bind(turn * _HIDDEN_THREADS + place.thread)
        with when(unit < units):
            values = _read(x, row=token, first=unit * fc1.unit_weights, count=fc1.unit_weights, columns=fc1.columns)
            total[0] = total[0] + unit_product(fc1.unit(row, unit), values)
    product = block_sum(total[0], place.thread, _HIDDEN_THREADS)
    with when(place.thread == 0):
        hidden[token, row] = maximum(product, 0.0) if relu else product


def _read(x: KernelTensor, row: Expr, first: Expr, count: int, columns: int) -> list[Expr]:
    """x[row, first … first + count - 1], zeros past the last column. `first` is a multiple of `count`."""
    if columns % count:
        places = [bind(first + i) for i in range(count)]
        return [bind(tirx.if_then_else(place < columns, x[row, place], 0.0)) for place in places]
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


def _compute_mask(function: CudaFunction, hidden: KernelTensor, fc2: CudaMatrix, place: ThreadIndex) -> None:
    """mask[token] of the neurons of this block."""
    bias, threshold, mask, lanes = function["bias"], function["threshold"], function["mask"], _lanes(fc2)
    token, at_once = place.block, _MASK_THREADS // lanes
    inputs = BlockInput(hidden, token, fc2.columns, _MASK_THREADS)
    sums = registers(_turns(lanes))
    first = bind(place.block_y * _rows_a_block(lanes) + place.thread // lanes)
    neurons = [bind(first + turn * at_once) for turn in range(_turns(lanes))]
    for i in range(len(neurons)):
        sums[i] = 0.0
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


# The kernel that predicts by signs.


_SIGN_THREADS = 256
_SIGN_WARPS = _SIGN_THREADS // WARP
# Rows that a warp reads at a time, and how often it does.
_SIGN_ROWS_TOGETHER, _SIGN_TURNS = 4, 2
_ROWS_A_BLOCK = _SIGN_WARPS * _SIGN_ROWS_TOGETHER * _SIGN_TURNS
_WORDS_A_BLOCK = BLOCK_COLUMNS // WARP
# Words of signs that a lane reads at once: 16 bytes.
_UNIT = 4


@body(PredictSignsSpec)
def predict_signs(spec: PredictSignsSpec, function: CudaFunction) -> None:
    """Write the launch of a `PredictSignsSpec`. Raises `CodegenError` for experts."""
    _refuse_experts(spec)
    words = blocks_for(spec.dim, BLOCK_COLUMNS) * _WORDS_A_BLOCK
    with (
        function.launch(grid=(spec.rows, blocks_for(spec.neurons, _ROWS_A_BLOCK)), block=_SIGN_THREADS) as place,
        when(place.block < function.tokens(spec.rows)),
    ):
        packed = shared(words, dtype="int32")
        _pack(function["x"], packed, place)
        barrier()
        with loop(0, _SIGN_TURNS) as turn:
            first = bind(place.block_y * _ROWS_A_BLOCK + turn * (_SIGN_WARPS * _SIGN_ROWS_TOGETHER) + place.warp)
            neurons = [bind(first + i * _SIGN_WARPS) for i in range(_SIGN_ROWS_TOGETHER)]
            _compare(function, packed, neurons, place)


def _pack(x: KernelTensor, packed: KernelTensor, place: ThreadIndex) -> None:
    """The signs of x. Bit i of word l of a block of 256 columns is column 8 · i + l: a warp makes a word at once."""
    words = packed.columns
    with loop(0, blocks_for(words, _SIGN_WARPS)) as turn:
        word = bind(turn * _SIGN_WARPS + place.warp)
        column = bind(word // _WORDS_A_BLOCK * BLOCK_COLUMNS + place.lane * _WORDS_A_BLOCK + word % _WORDS_A_BLOCK)
        value = bind(tirx.if_then_else(column < x.columns, x[place.block, column], 0.0))
        below_zero = tirx.Cast("int32", value < 0.0)
        bits = bind(tirx.call_extern("uint32", "pi_ballot", below_zero))
        with when(tirx.And(place.lane == 0, word < words)):
            packed[word] = tirx.reinterpret("int32", bits)


def _compare(function: CudaFunction, packed: KernelTensor, neurons: list[Expr], place: ThreadIndex) -> None:
    """The mask of a few neurons, whose rows the lanes of a warp read together."""
    signs, most, mask, words = function["signs"], function["most"], function["mask"], packed.columns
    counts = zero_registers(len(neurons), "int32")
    with loop(0, blocks_for(words // _UNIT, WARP)) as turn:
        unit = bind(turn * WARP + place.lane)
        with when(unit < words // _UNIT):
            of_x = _words(packed, tirx.Ramp(unit * _UNIT, 1, _UNIT))
            for i, neuron in enumerate(neurons):
                row = bind(minimum(neuron, signs.rows - 1))
                of_row = _words(signs, row, tirx.Ramp(unit * _UNIT, 1, _UNIT))
                for a, b in zip(of_x, of_row, strict=True):
                    counts[i] = counts[i] + tirx.Cast("int32", tirx.popcount(tirx.Cast("uint32", a ^ b)))
    for i, neuron in enumerate(neurons):
        differing = tirx.Cast("float32", lanes_sum(counts[i], WARP))
        with when(tirx.And(place.lane == 0, neuron < signs.rows)):
            mask[place.block, neuron] = tirx.Cast("uint8", differing <= most[0])


def _words(tensor: KernelTensor, *index: Expr) -> list[Expr]:
    """Four words."""
    vector = bind(tensor[index])
    return [bind(tirx.Shuffle([vector], [i])) for i in range(_UNIT)]
