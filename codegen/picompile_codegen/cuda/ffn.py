"""Feed-forward blocks on a GPU: of one token, of several sequences' next tokens with a mask each, and of a chunk.

Of one token or several sequences:
1. Groups of neurons are computed, a block for each, as far as they are asked for (`ffn_hidden.py`).
2. The rows of down of those that fired are added up, a block for each tile of columns and slice of neurons
   (`ffn_down.py`).
3. The slices are added up.
The sizes fix the order of all sums, and so every bit of y, whichever thread comes first. There is no list of all
neurons that fired: a launch that made one would take longer than it takes each block to make the list of its own.
Blocks of all tokens for the same neurons run at about the same time: what one has read, the next finds in the cache.

Of a chunk, which is dense, since some token needs almost every neuron: tiles of tokens and neurons are multiplied with
gate, then with up, which is followed by the activation; then tiles of tokens and columns with down (`ffn_down.py`), in
slices of the neurons where there are few tiles.
"""

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, select, when
from picompile_codegen.cuda.dot import in_parts
from picompile_codegen.cuda.ffn_down import (
    DOWN_THREADS,
    SUM_COLUMNS,
    SUM_THREADS,
    DownPlan,
    DownTiles,
    add_rows,
    add_slices,
    add_tile_slices,
    multiply_down_tile,
)
from picompile_codegen.cuda.ffn_hidden import HIDDEN_THREADS, CudaFfn, NeuronGroups, biased, compute_hidden
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.linear import TILE_ROWS, TILE_THREADS, TILE_TOKENS, tile_products
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import block_sum, registers
from picompile_codegen.specs import FfnSpec


def ffn_tokens(function: CudaFunction, block: CudaFfn) -> None:
    """Write the launches, and declare their scratch memory."""
    rows = block.spec.rows
    groups = NeuronGroups.of(block.spec.neurons)
    plan = DownPlan.of(block.bundle, groups.places, rows, squares=block.spec.squares)
    hidden = function.scratch("hidden", "float32", rows, groups.places)
    slices = function.scratch("slices", "float32", rows * plan.slices, plan.columns)
    with (
        function.launch(grid=(rows, groups.count), block=HIDDEN_THREADS, resident=_resident(block)) as place,
        when(place.block < function.tokens(rows)),
    ):
        compute_hidden(block, groups, hidden, place)
    with (
        function.launch(grid=(rows * plan.tiles, plan.slices), block=DOWN_THREADS) as place,
        when(place.block % rows < function.tokens(rows)),
    ):
        add_rows(block, groups, plan, hidden, slices, place)
    with (
        function.launch(grid=(blocks_for(plan.columns, SUM_COLUMNS), rows), block=SUM_THREADS) as place,
        when(place.block_y < function.tokens(rows)),
    ):
        add_slices(block, plan, slices, block.y, place)


def _resident(block: CudaFfn) -> int:
    """Return how many blocks of `compute_hidden` shall fit a multiprocessor; 0 leaves it to the compiler.

    In `exact` with q4 ptxas takes up to 71 registers, where 64 need no spilling and leave room for a fourth block; with
    q4m they would need some. Where x is in several parts, ptxas spills up to 24 bytes of either to get from 95
    registers to 80, hence two blocks there. With q6 it spills up to 40 bytes there in all kinds, and up to 8 in `dense`
    with less of x.
    """
    spec, bundle = block.spec, block.bundle
    is_dense, is_in_parts = not (spec.is_exact or spec.is_masked), in_parts(spec.dim)
    if bundle.form.has_planes:
        return 2 if is_dense or is_in_parts else 0
    if not spec.is_exact or not bundle.has_nibbles:
        return 0
    if is_in_parts:
        return 2
    return 0 if bundle.has_zeros else 4


_CHUNK_SUM_THREADS = 256
_SQUARE_THREADS = 256


def ffn_chunk(function: CudaFunction, block: CudaFfn) -> None:
    """Write the launches, and declare their scratch memory."""
    rows, neurons, dim = block.spec.rows, block.spec.neurons, block.spec.dim
    tiles = DownTiles.of(neurons, dim, rows)
    gate = function.scratch("gate", "float32", rows, neurons) if block.spec.gated else None
    hidden = function.scratch("hidden", "float32", rows, neurons)
    slices = function.scratch("slices", "float32", tiles.slices * rows, dim) if tiles.slices > 1 else None
    grid = (blocks_for(neurons, TILE_ROWS), blocks_for(rows, TILE_TOKENS))
    if gate is not None:
        with function.launch(grid=grid, block=TILE_THREADS) as place:
            _compute_gate(block, gate, function.tokens(rows), place)
    with function.launch(grid=grid, block=TILE_THREADS) as place:
        _compute_hidden(block, gate, hidden, function.tokens(rows), place)
    with function.launch(grid=(tiles.columns, tiles.tokens * tiles.slices), block=TILE_THREADS) as place:
        multiply_down_tile(block, tiles, hidden, block.y if slices is None else slices, function.tokens(rows), place)
    if slices is not None:
        with (
            function.launch(grid=(blocks_for(dim, _CHUNK_SUM_THREADS), rows), block=_CHUNK_SUM_THREADS) as place,
            when(place.block_y < function.tokens(rows)),
        ):
            add_tile_slices(
                block, tiles, slices, block.y, place.block * _CHUNK_SUM_THREADS + place.thread, place.block_y
            )
    if block.spec.squares:
        with (
            function.launch(grid=rows, block=_SQUARE_THREADS) as place,
            when(place.block < function.tokens(rows)),
        ):
            _add_squares(block, hidden, place)


def _add_squares(block: CudaFfn, hidden: KernelTensor, place: ThreadIndex) -> None:
    """y[token, dim] = Σ hidden[token]²; a block has a token."""
    total = registers(1)
    total[0] = 0.0
    with loop(0, blocks_for(block.spec.neurons, _SQUARE_THREADS)) as turn:
        neuron = bind(turn * _SQUARE_THREADS + place.thread)
        last = block.spec.neurons - 1
        value = bind(tirx.if_then_else(neuron <= last, hidden[place.block, minimum(neuron, last)], 0.0))
        total[0] = total[0] + value * value
    summed = block_sum(total[0], place.thread, _SQUARE_THREADS)
    with when(place.thread == 0):
        block.y[place.block, block.spec.dim] = summed


def _compute_gate(block: CudaFfn, gate: KernelTensor, tokens: Expr, place: ThreadIndex) -> None:
    def store(token: Expr, neuron: Expr, value: Expr) -> None:
        gate[token, neuron] = biased(value, block.gate_bias, neuron)

    tile_products(block.x, block.first_matrix, block.first_row, block.spec.neurons, tokens, place, store)


def _compute_hidden(
    block: CudaFfn, gate: KernelTensor | None, hidden: KernelTensor, tokens: Expr, place: ThreadIndex
) -> None:
    """hidden = activation(gate) ∘ up_activation(up), or activation(up)."""
    spec = block.spec

    def store(token: Expr, neuron: Expr, value: Expr) -> None:
        up = biased(value, block.up_bias, neuron)
        first = up if gate is None else bind(gate[token, neuron])
        output = block.output(first, None if gate is None else up)
        if spec.is_exact or spec.gate_limits:
            # Not a product: a silent neuron whose up is infinite must not turn into NaN.
            output = select(block.fires(first, neuron), output, 0.0)
        hidden[token, neuron] = block.above_limit(output, neuron)

    matrix, row = (block.first_matrix, block.first_row) if gate is None else (block.bundle, block.up_row)
    tile_products(block.x, matrix, row, spec.neurons, tokens, place, store)


def ffn(spec: FfnSpec, function: CudaFunction) -> None:
    """Write the launches of an `FfnSpec`.

    With several rows `masked` always computes the neurons of each row's mask, however many they are.
    """
    block = CudaFfn.of(spec, function, CudaMatrix)
    if spec.rows == 1 or spec.is_masked:
        ffn_tokens(function, block)
    else:
        ffn_chunk(function, block)
