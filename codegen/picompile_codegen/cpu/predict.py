"""Predictors: matrices of low rank that were trained, and signs, which need no training.

By signs (arXiv 2411.12692), a neuron fires if the signs of its weights and of the input mostly agree. A bit says that a
number is below zero. Bits lie in blocks of 256 columns, 32 bytes: bit i of int32 word l of a block is column 8 · i + l.
So eight columns of the input fall into the same bit of eight words, and a vector of eight words is packed without
moving anything between its lanes. Bits past the last column are 0 in both.
"""

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.dot import dot, prepare_vector
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_products import multiply_in_panels, panel_inputs, quantize_tokens
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, maximum, parallel, worth_a_region
from picompile_codegen.cpu.token_vectors import TokenVectors, multiply_rows
from picompile_codegen.cpu.vector import LANES, at, blocks, load, splat, splat_int
from picompile_codegen.signs import BLOCK_COLUMNS
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec


@body(PredictLowRankSpec)
def predict_low_rank(spec: PredictLowRankSpec, function: KernelFunction) -> None:
    """Write the body of a `PredictLowRankSpec`."""
    matrices = KernelMatrix.argument(function, "fc1"), KernelMatrix.argument(function, "fc2")
    hidden = function.scratch("hidden", "float32", spec.rows, spec.rank)
    if spec.panels:
        _predict_in_panels(function, *matrices, hidden, spec.relu)
        return
    predict = _predict_one if spec.rows == 1 else _predict_rows
    predict(function, *matrices, hidden, spec.relu)


def _predict_in_panels(
    function: KernelFunction, fc1: KernelMatrix, fc2: KernelMatrix, hidden: KernelTensor, relu: bool
) -> None:
    """Predict for any number of tokens, each to the same bits."""
    rows, bias, threshold, mask = hidden.rows, function["bias"], function["threshold"], function["mask"]
    inputs = panel_inputs(function, "x", rows, fc1.columns, fc1)
    inner = panel_inputs(function, "hidden", rows, fc2.columns, fc2)
    tokens = function.tokens(rows)

    def keep(token: Expr, row: Expr, lanes: int, products: Expr) -> None:
        hidden[token, at(row, lanes)] = maximum(products, splat(0.0, lanes)) if relu else products

    def decide(token: Expr, neuron: Expr, lanes: int, products: Expr) -> None:
        scores = products + bias[at(neuron, lanes)]
        mask[token, at(neuron, lanes)] = tirx.Cast(f"uint8x{lanes}", scores > splat(threshold[0], lanes))

    quantize_tokens(function["x"], tokens, fc1.columns, inputs)
    multiply_in_panels(fc1, inputs, tokens, keep)
    quantize_tokens(hidden, tokens, fc2.columns, inner)
    multiply_in_panels(fc2, inner, tokens, decide)


def _predict_one(
    function: KernelFunction, fc1: KernelMatrix, fc2: KernelMatrix, hidden: KernelTensor, relu: bool
) -> None:
    bias, threshold, mask = function["bias"], function["threshold"], function["mask"]
    inputs = prepare_vector(function["x"], fc1)
    with parallel(fc1.rows, when_worth=worth_a_region(fc1.bytes)) as row:
        product = dot(fc1, row, inputs, [row + fc1.rows_ahead])
        hidden[0, row] = maximum(product, 0.0) if relu else product
    inputs = prepare_vector(hidden, fc2)
    with parallel(fc2.rows, when_worth=worth_a_region(fc2.bytes)) as neuron:
        product = dot(fc2, neuron, inputs, [neuron + fc2.rows_ahead])
        mask[0, neuron] = tirx.Cast("uint8", product + bias[neuron] > threshold[0])


def _predict_rows(
    function: KernelFunction, fc1: KernelMatrix, fc2: KernelMatrix, hidden: KernelTensor, relu: bool
) -> None:
    """Predict for several tokens: the mask of each is the one that `_predict_one` makes."""
    rows, bias, threshold, mask = hidden.rows, function["bias"], function["threshold"], function["mask"]
    inputs = TokenVectors.declare(function, "x", function["x"], rows, fc1)
    inner = TokenVectors.declare(function, "hidden", hidden, rows, fc2)
    tokens = function.tokens(rows)

    def keep(token: Expr, row: Expr, product: Expr) -> None:
        hidden[token, row] = maximum(product, 0.0) if relu else product

    def decide(token: Expr, neuron: Expr, product: Expr) -> None:
        mask[token, neuron] = tirx.Cast("uint8", product + bias[neuron] > threshold[0])

    inputs.prepare(tokens)
    multiply_rows(fc1, row_of=lambda row: row, count=fc1.rows, vectors=inputs, tokens=tokens, emit=keep)
    inner.prepare(tokens)
    multiply_rows(fc2, row_of=lambda row: row, count=fc2.rows, vectors=inner, tokens=tokens, emit=decide)


# The kernel that predicts by signs.


_WORDS = f"int32x{LANES}"
# The type of these bits that LLVM counts with the fewest instructions.
_COUNTS = f"int64x{LANES // 2}"


@body(PredictSignsSpec)
def predict_signs(spec: PredictSignsSpec, function: KernelFunction) -> None:
    """Write the body of a `PredictSignsSpec`."""
    x, signs, most, mask = (function[name] for name in ("x", "signs", "most", "mask"))
    packed = function.scratch("packed", "int32", spec.row_bytes // 4)
    with loop(0, function.tokens(spec.rows)) as token:
        _pack(x, token, spec.dim, packed)
        is_worth = worth_a_region(spec.neurons * spec.row_bytes)
        with parallel(spec.neurons, when_worth=is_worth) as neuron:
            mask[token, neuron] = tirx.Cast("uint8", _differing(signs, neuron, packed, spec.dim) <= most[0])


def _pack(x: KernelTensor, token: Expr, dim: int, packed: KernelTensor) -> None:
    """Pack the signs of x."""
    full, rest = divmod(dim, BLOCK_COLUMNS)
    if full:
        with loop(0, full) as block:
            _pack_block(
                x, token, first=bind(block * BLOCK_COLUMNS), columns=BLOCK_COLUMNS, packed=packed, word=block * LANES
            )
    if rest:
        _pack_block(x, token, first=full * BLOCK_COLUMNS, columns=rest, packed=packed, word=full * LANES)


def _pack_block(x: KernelTensor, token: Expr, first: Expr, columns: int, packed: KernelTensor, word: Expr) -> None:
    bits = local(LANES, dtype="int32")
    bits[at(0)] = splat_int(0)

    def add(c: Expr, valid: int) -> None:
        below_zero = tirx.Cast(_WORDS, load(x, token, first + c, valid=valid) < splat(0.0))
        bit = tirx.IntImm("int32", c // LANES) if isinstance(c, int) else c // LANES
        bits[at(0)] = bits[at(0)] | (below_zero << tirx.Broadcast(bit, LANES))

    blocks(columns, add)
    packed[at(word)] = bits[at(0)]


def _differing(signs: KernelTensor, neuron: Expr, packed: KernelTensor, dim: int) -> Expr:
    """Return in how many columns the signs differ, as a float32, which is exact."""
    counts = local(LANES // 2, dtype="int64")
    counts[at(0, LANES // 2)] = tirx.Broadcast(tirx.IntImm("int64", 0), LANES // 2)
    with loop(0, -(-dim // BLOCK_COLUMNS)) as block:
        differing = signs[neuron, at(block * LANES)] ^ packed[at(block * LANES)]
        wide = bind(tirx.reinterpret(_COUNTS, bind(differing)))
        counts[at(0, LANES // 2)] = counts[at(0, LANES // 2)] + tirx.popcount(wide)
    values = bind(counts[at(0, LANES // 2)])
    total = sum((tirx.Shuffle([values], [i]) for i in range(1, LANES // 2)), tirx.Shuffle([values], [0]))
    return tirx.Cast("float32", total)
