"""The predictor that needs no training, on a GPU: see `kernels/predict_signs.py`, whose layout of bits this reads.

Each block packs the signs of x by itself: to read x takes less time than a launch of its own.
"""

from tvm import tirx

from picompile_codegen.cuda.dot import lanes_sum
from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, Place, blocks_for
from picompile_codegen.cuda.memory import barrier, registers, shared
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, minimum, when
from picompile_codegen.signs import BLOCK_COLUMNS

_THREADS = 256
_WARPS = _THREADS // WARP
# Rows that a warp reads at a time, and how often it does.
_TOGETHER, _TURNS = 4, 2
_ROWS_A_BLOCK = _WARPS * _TOGETHER * _TURNS
_WORDS_A_BLOCK = BLOCK_COLUMNS // WARP
# Words of signs that a lane reads at once: 16 bytes.
_UNIT = 4


def predict_signs(*, neurons: int, dim: int, row_bytes: int, rows: int = 1) -> CudaKernel:
    """mask[t, j] = 1 where x[t] and row j of the matrix differ in sign in `most` columns or fewer, else 0.

    x float32 [rows, dim], signs int32 [neurons, row_bytes / 4], most float32 [1] → mask uint8 [rows, neurons].
    """
    words = blocks_for(dim, BLOCK_COLUMNS) * _WORDS_A_BLOCK
    function = CudaFunction("predict", "signs", f"{neurons}x{dim}", f"r{rows}" if rows > 1 else "")
    with function:
        x = function.floats("x", rows, dim)
        signs, most = function.argument("signs", "int32", neurons, row_bytes // 4), function.floats("most", 1)
        mask = function.argument("mask", "uint8", rows, neurons)
        with (
            function.launch(grid=(rows, blocks_for(neurons, _ROWS_A_BLOCK)), block=_THREADS) as place,
            when(place.block < function.tokens(rows)),
        ):
            packed = shared(words, dtype="int32")
            _pack(x, packed, words, dim, place)
            barrier()
            with loop(0, _TURNS) as turn:
                first = bind(place.block_y * _ROWS_A_BLOCK + turn * (_WARPS * _TOGETHER) + place.warp)
                _compare(signs, packed, words, [bind(first + i * _WARPS) for i in range(_TOGETHER)], most, mask, place)
    return function.cuda_kernel()


def _pack(x: Tensor, packed: Tensor, words: int, dim: int, place: Place) -> None:
    """The signs of x. Bit i of word l of a block of 256 columns is column 8 · i + l: a warp makes a word at once."""
    with loop(0, blocks_for(words, _WARPS)) as turn:
        word = bind(turn * _WARPS + place.warp)
        column = bind(word // _WORDS_A_BLOCK * BLOCK_COLUMNS + place.lane * _WORDS_A_BLOCK + word % _WORDS_A_BLOCK)
        value = bind(tirx.if_then_else(column < dim, x[place.block, column], tirx.FloatImm("float32", 0.0)))
        below_zero = tirx.Cast("int32", value < tirx.FloatImm("float32", 0.0))
        bits = bind(tirx.call_extern("uint32", "pi_ballot", below_zero))
        with when(tirx.And(place.lane == 0, word < words)):
            packed[word] = tirx.reinterpret("int32", bits)


def _compare(
    signs: Tensor, packed: Tensor, words: int, neurons: list[Expr], most: Tensor, mask: Tensor, place: Place
) -> None:
    """The mask of a few neurons, whose rows the lanes of a warp read together."""
    counts = registers(len(neurons), dtype="int32")
    for i in range(len(neurons)):
        counts[i] = 0
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


def _words(tensor: Tensor, *index: Expr) -> list[Expr]:
    """Four words."""
    vector = bind(tensor[index])
    return [bind(tirx.Shuffle([vector], [i])) for i in range(_UNIT)]
