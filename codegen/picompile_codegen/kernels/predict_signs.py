"""The predictor that needs no training: a neuron fires if the signs of its weights and of the input mostly agree.

arXiv 2411.12692. A bit says that a number is below zero. Bits lie in blocks of 256 columns, 32 bytes: bit i of int32
word l of a block is column 8 · i + l. So eight columns of the input fall into the same bit of eight words, and a vector
of eight words is packed without moving anything between its lanes. Bits past the last column are 0 in both.
"""

from tvm import tirx

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, parallel, worth_a_region
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, splat_int
from picompile_codegen.signs import BLOCK_COLUMNS

_WORDS = f"int32x{LANES}"
# The same bits, as LLVM counts them with the fewest instructions.
_COUNTS = f"int64x{LANES // 2}"


def predict_signs(*, neurons: int, dim: int, row_bytes: int, rows: int = 1) -> Kernel:
    """mask[t, j] = 1 where x[t] and row j of the matrix differ in sign in `most` columns or fewer, else 0.

    x float32 [rows, dim], signs int32 [neurons, row_bytes / 4], most float32 [1] → mask uint8 [rows, neurons].
    """
    words = row_bytes // 4
    function = KernelFunction("predict", "signs", f"{neurons}x{dim}", f"r{rows}" if rows > 1 else "")
    with function:
        x = function.floats("x", rows, dim)
        signs, most = function.argument("signs", "int32", neurons, words), function.floats("most", 1)
        packed = function.scratch("packed", "int32", words)
        mask = function.argument("mask", "uint8", rows, neurons)
        with loop(0, function.tokens(rows)) as token:
            _pack(x, token, dim, packed)
            with parallel(neurons, when_worth=worth_a_region(neurons * row_bytes)) as neuron:
                mask[token, neuron] = tirx.Cast("uint8", _differing(signs, neuron, packed, dim) <= most[0])
    return function.kernel()


def _pack(x: Tensor, token: Expr, dim: int, packed: Tensor) -> None:
    """The signs of x."""
    full, rest = divmod(dim, BLOCK_COLUMNS)
    if full:
        with loop(0, full) as block:
            _pack_block(x, token, bind(block * BLOCK_COLUMNS), BLOCK_COLUMNS, packed, block * LANES)
    if rest:
        _pack_block(x, token, full * BLOCK_COLUMNS, rest, packed, full * LANES)


def _pack_block(x: Tensor, token: Expr, first: Expr, columns: int, packed: Tensor, word: Expr) -> None:
    bits = local(LANES, dtype="int32")
    bits[at(0)] = splat_int(0)

    def add(c: Expr, valid: int) -> None:
        below_zero = tirx.Cast(_WORDS, load(x, token, first + c, valid=valid) < splat(0.0))
        bit = tirx.IntImm("int32", c // LANES) if isinstance(c, int) else c // LANES
        bits[at(0)] = bits[at(0)] | (below_zero << tirx.Broadcast(bit, LANES))

    blocks(columns, add)
    packed[at(word)] = bits[at(0)]


def _differing(signs: Tensor, neuron: Expr, packed: Tensor, dim: int) -> Expr:
    """In how many columns the signs differ, as a float32, which is exact."""
    counts = local(LANES // 2, dtype="int64")
    counts[at(0, LANES // 2)] = tirx.Broadcast(tirx.IntImm("int64", 0), LANES // 2)
    with loop(0, -(-dim // BLOCK_COLUMNS)) as block:
        differing = signs[neuron, at(block * LANES)] ^ packed[at(block * LANES)]
        wide = bind(tirx.reinterpret(_COUNTS, bind(differing)))
        counts[at(0, LANES // 2)] = counts[at(0, LANES // 2)] + tirx.popcount(wide)
    values = bind(counts[at(0, LANES // 2)])
    total = sum((tirx.Shuffle([values], [i]) for i in range(1, LANES // 2)), tirx.Shuffle([values], [0]))
    return tirx.Cast("float32", total)
