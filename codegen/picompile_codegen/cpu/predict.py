"""Predictors: matrices of low rank that were trained, and signs, which need no training.

By signs (arXiv 2411.12692), a neuron fires if the signs of its weights and of the input mostly agree. A bit says that a
number is below zero. Bits lie in blocks of 256 columns, 32 bytes: bit i of int32 word l of a block is column 8 · i + l.
So eight columns of the input fall into the same bit of eight words, and a vector of eight words is packed without
moving anything between its lanes. Bits past the last column are 0 in both.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.dot import dot, prepare_vector
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_matrix import PanelMatrix
from picompile_codegen.cpu.panel_products import (
    TokenRun,
    multiply_in_panels,
    multiply_panel,
    panel_inputs,
    quantize_tokens,
)
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    local,
    loop,
    maximum,
    minimum,
    parallel,
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_experts import ChosenExperts
from picompile_codegen.cpu.token_vectors import TokenVectors, each_row, multiply_rows
from picompile_codegen.cpu.vector import LANES, at, blocks, load, splat, splat_int
from picompile_codegen.signs import BLOCK_COLUMNS
from picompile_codegen.specs import PredictLowRankSpec, PredictSignsSpec
from picompile_passes.formats import PANEL_ROWS

# Neurons of a token's expert that a task predicts row by row.
_TASK_NEURONS = 64
# Elements of a mask that are set together.
_CLEARED = 32


@dataclass(frozen=True)
class _ChosenNeurons:
    """The neurons of the experts that tokens have chosen: those that are predicted, in a block of experts."""

    chosen: ChosenExperts
    gains: KernelTensor
    mask: KernelTensor
    tokens: Expr

    @classmethod
    def find(
        cls, function: KernelFunction, spec: PredictLowRankSpec | PredictSignsSpec, tokens: Expr
    ) -> "_ChosenNeurons":
        """Find the experts of all tokens, and set their masks to 0."""
        chosen, gains, mask = ChosenExperts.declare(function, spec), function["gains"], function["mask"]
        full, rest = divmod(spec.neurons, _CLEARED)

        def begin(token: Expr) -> None:
            chosen.find(gains, token)
            with loop(0, full) as i:
                mask[token, at(i * _CLEARED, _CLEARED)] = tirx.Broadcast(tirx.IntImm("uint8", 0), _CLEARED)
            with loop(0, rest) as i:
                mask[token, full * _CLEARED + i] = tirx.IntImm("uint8", 0)

        each_row(tokens, begin)
        return cls(chosen, gains, mask, tokens)

    def each_run(self, most: int, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """Run `body(token, first, count)` for runs of `most` neurons of every expert of a token, or those left over."""
        chosen, size = self.chosen, self.chosen.neurons_each
        runs = -(-size // most)
        with parallel(self.tokens * (chosen.chosen * runs)) as task:
            token = bind(task // (chosen.chosen * runs))
            place = bind(task - token * (chosen.chosen * runs))
            number = bind(place // runs)
            experts = chosen.of(self.gains, token)
            with when(number < experts.count):
                start = bind((place - number * runs) * most)
                first = bind(experts.first_neuron(number) + start)
                body(token, first, bind(minimum(most, size - start)))

    def each_neuron(self, token: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """Run `body(token, neuron)` for the neurons of the experts of a token."""
        experts = self.chosen.of(self.gains, token)
        with parallel(experts.neurons) as place:
            body(token, bind(experts.neuron(place)))


@body(PredictLowRankSpec)
def predict_low_rank(spec: PredictLowRankSpec, function: KernelFunction) -> None:
    """Write the body of a `PredictLowRankSpec`."""
    matrices = KernelMatrix.argument(function, "fc1"), KernelMatrix.argument(function, "fc2")
    hidden = function.scratch("hidden", "float32", spec.rows, spec.rank)
    if spec.panels:
        predict = _predict_in_panels
    else:
        predict = _predict_one if spec.rows == 1 and not spec.experts else _predict_rows
    predict(spec, function, *matrices, hidden)


def _predict_in_panels(
    spec: PredictLowRankSpec, function: KernelFunction, fc1: KernelMatrix, fc2: KernelMatrix, hidden: KernelTensor
) -> None:
    """Predict for any number of tokens, each to the same bits."""
    rows, bias, threshold, mask = hidden.rows, function["bias"], function["threshold"], function["mask"]
    inputs = panel_inputs(function, "x", rows, fc1.columns, fc1)
    inner = panel_inputs(function, "hidden", rows, fc2.columns, fc2)
    tokens = function.tokens(rows)

    def keep(token: Expr, row: Expr, lanes: int, products: Expr) -> None:
        hidden[token, at(row, lanes)] = maximum(products, splat(0.0, lanes)) if spec.relu else products

    def decide(token: Expr, neuron: Expr, lanes: int, products: Expr) -> None:
        scores = products + bias[at(neuron, lanes)]
        mask[token, at(neuron, lanes)] = tirx.Cast(f"uint8x{lanes}", scores > splat(threshold[0], lanes))

    chosen = _ChosenNeurons.find(function, spec, tokens) if spec.experts else None
    quantize_tokens(function["x"], tokens, fc1.columns, inputs)
    multiply_in_panels(fc1, inputs, tokens, keep)
    quantize_tokens(hidden, tokens, fc2.columns, inner)
    if chosen is None:
        multiply_in_panels(fc2, inner, tokens, decide)
        return
    panels = PanelMatrix(fc2)

    def decide_panel(token: Expr, first: Expr, _: Expr) -> None:
        panel = bind(first // PANEL_ROWS)
        multiply_panel(panels, (panel, 1), inner, TokenRun(1, token), decide, (panels, panel + 1))

    chosen.each_run(PANEL_ROWS, decide_panel)


def _predict_one(
    spec: PredictLowRankSpec, function: KernelFunction, fc1: KernelMatrix, fc2: KernelMatrix, hidden: KernelTensor
) -> None:
    bias, threshold, mask = function["bias"], function["threshold"], function["mask"]
    inputs = prepare_vector(function["x"], fc1)
    with parallel(fc1.rows, when_worth=worth_a_region(fc1.bytes)) as row:
        product = dot(fc1, row, inputs, [row + fc1.rows_ahead])
        hidden[0, row] = maximum(product, 0.0) if spec.relu else product
    inputs = prepare_vector(hidden, fc2)
    with parallel(fc2.rows, when_worth=worth_a_region(fc2.bytes)) as neuron:
        product = dot(fc2, neuron, inputs, [neuron + fc2.rows_ahead])
        mask[0, neuron] = tirx.Cast("uint8", product + bias[neuron] > threshold[0])


def _predict_rows(
    spec: PredictLowRankSpec, function: KernelFunction, fc1: KernelMatrix, fc2: KernelMatrix, hidden: KernelTensor
) -> None:
    """Predict for several tokens, or for neurons of experts: the mask of each is the one that `_predict_one` makes."""
    rows, bias, threshold, mask = hidden.rows, function["bias"], function["threshold"], function["mask"]
    inputs = TokenVectors.declare(function, "x", function["x"], rows, fc1)
    inner = TokenVectors.declare(function, "hidden", hidden, rows, fc2)
    tokens = function.tokens(rows)

    def keep(token: Expr, row: Expr, product: Expr) -> None:
        hidden[token, row] = maximum(product, 0.0) if spec.relu else product

    def decide(token: Expr, neuron: Expr, product: Expr) -> None:
        mask[token, neuron] = tirx.Cast("uint8", product + bias[neuron] > threshold[0])

    chosen = _ChosenNeurons.find(function, spec, tokens) if spec.experts else None
    inputs.prepare(tokens)
    multiply_rows(fc1, row_of=lambda row: row, count=fc1.rows, vectors=inputs, tokens=tokens, emit=keep)
    inner.prepare(tokens)
    if chosen is None:
        multiply_rows(fc2, row_of=lambda row: row, count=fc2.rows, vectors=inner, tokens=tokens, emit=decide)
        return

    def decide_run(token: Expr, first: Expr, count: Expr) -> None:
        with loop(0, count) as i:
            neuron = bind(first + i)
            decide(token, neuron, dot(fc2, neuron, inner[token], [neuron + fc2.rows_ahead]))

    chosen.each_run(_TASK_NEURONS, decide_run)


# The kernel that predicts by signs.


_WORDS = f"int32x{LANES}"
# The type of these bits that LLVM counts with the fewest instructions.
_COUNTS = f"int64x{LANES // 2}"


@body(PredictSignsSpec)
def predict_signs(spec: PredictSignsSpec, function: KernelFunction) -> None:
    """Write the body of a `PredictSignsSpec`."""
    x, signs, most, mask = (function[name] for name in ("x", "signs", "most", "mask"))
    packed = function.scratch("packed", "int32", spec.row_bytes // 4)
    tokens = function.tokens(spec.rows)
    chosen = _ChosenNeurons.find(function, spec, tokens) if spec.experts else None

    def decide(token: Expr, neuron: Expr) -> None:
        mask[token, neuron] = tirx.Cast("uint8", _differing(signs, neuron, packed, spec.dim) <= most[0])

    with loop(0, tokens) as token:
        _pack(x, token, spec.dim, packed)
        if chosen is not None:
            chosen.each_neuron(token, decide)
        else:
            is_worth = worth_a_region(spec.neurons * spec.row_bytes)
            with parallel(spec.neurons, when_worth=is_worth) as neuron:
                decide(token, neuron)


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
