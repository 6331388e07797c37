"""Feed-forward blocks on a GPU: of one token, of several sequences' next tokens with a mask each, and of a chunk.

For one token or several sequences:
1. Each thread block computes a group of neurons, as far as the mask names them (`ffn_hidden.py`).
2. Each thread block adds up the rows of down of neurons that fired, for a tile of columns and a slice of neurons; the
   last block of a tile adds up its slices (`ffn_down.py`).
The sizes fix the order of all sums, and so every bit of y, whichever thread comes first. There is no list of all
neurons that fired: a launch to make one would take longer than each block takes to make its own list.
Blocks of all tokens for the same neurons run at about the same time, so later ones find the rows in the cache.

For a chunk, which is dense, since some token needs almost every neuron, on tensor cores (`mma.py`): tiles of tokens and
neurons are multiplied with gate and up at once, which the activation follows; then tiles of tokens and columns with
down (`ffn_down.py`), in slices of the neurons if there are few tiles. Factors are rounded to halves first.
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, select, when
from picompile_codegen.cuda.dot import in_parts
from picompile_codegen.cuda.ffn_down import DownPlan, add_down, multiply_down
from picompile_codegen.cuda.ffn_hidden import HIDDEN_THREADS, CudaFfn, NeuronGroups, biased, compute_hidden
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.halves import Halves
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import block_sum, registers
from picompile_codegen.cuda.mma import WARP_OUTPUTS, ProductTile, RowWeights, multiply, tile_for
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import CountedFfnSpec, FfnSpec


def ffn_tokens(function: CudaFunction, block: CudaFfn) -> None:
    """Write the launches, and declare their scratch memory."""
    rows = block.spec.rows
    groups = NeuronGroups.of(block.spec.neurons)
    plan = DownPlan.of(block.bundle, groups.places, rows, squares=block.spec.squares)
    hidden = function.scratch("hidden", "float32", rows, groups.places)
    with (
        function.launch(grid=(rows, groups.count), block=HIDDEN_THREADS, resident=_resident(block)) as place,
        when(place.block < function.tokens(rows)),
    ):
        compute_hidden(block, groups, hidden, place)
    add_down(function, block, groups, plan, hidden)


def _resident(block: CudaFfn) -> int:
    """Return how many blocks of `compute_hidden` shall fit a multiprocessor; 0 leaves it to the compiler.

    In `exact` with q4 ptxas takes up to 71 registers, where 64 need no spilling and leave room for a fourth block; with
    q4m they would need some. Where x is in several parts, ptxas spills up to 24 bytes of either to get from 95
    registers to 80, hence two blocks there. So it does with q8, up to 56 bytes, and f16, up to 16. With q6 it spills up
    to 40 bytes there in all kinds, and up to 8 in `dense` with less of x; with q4m 8 bytes there in `masked` with a
    bias of the gate, on sm_90.
    """
    spec, bundle = block.spec, block.bundle
    if bundle.form.table:
        return 0
    is_dense, is_in_parts = not (spec.is_exact or spec.is_masked), in_parts(spec.dim)
    if bundle.form.has_planes:
        return 2 if is_dense or is_in_parts else 0
    if is_in_parts and not bundle.has_nibbles:
        return 2
    if is_in_parts and spec.is_masked and bundle.has_zeros and spec.gate_bias:
        return 2
    if not spec.is_exact or not bundle.has_nibbles:
        return 0
    if is_in_parts:
        return 2
    return 0 if bundle.has_zeros else 4


SUM_THREADS = 256


def ffn_chunk(function: CudaFunction, block: CudaFfn) -> None:
    """Write the launches, and declare their scratch memory."""
    rows, neurons, dim = block.spec.rows, block.spec.neurons, block.spec.dim
    x = Halves.scratch(function, "halves", rows, dim)
    hidden = function.scratch("hidden", "float32", rows, neurons)
    x.write(function, block.x)
    matrices = 1 + block.spec.gated
    tile = tile_for(rows, neurons * matrices)
    grid = (blocks_for(neurons * matrices, tile.outputs), blocks_for(rows, tile.tokens))
    with function.launch(grid=grid, block=tile.threads, resident=tile.resident) as place:
        _multiply_hidden(block, tile, x, hidden, tokens=function.tokens(rows), place=place)
    multiply_down(function, block, hidden)
    if block.spec.squares:
        with (
            function.launch(grid=rows, block=SUM_THREADS) as place,
            when(place.block < function.tokens(rows)),
        ):
            _add_squares(block, hidden, place)


def _add_squares(block: CudaFfn, hidden: KernelTensor, place: ThreadIndex) -> None:
    """y[token, dim] = Σ hidden[token]²; a block has a token."""
    summed = sum_over_neurons(hidden, block.neurons(), lambda value: value * value, place)
    with when(place.thread == 0):
        block.y[place.block, block.spec.dim] = summed


def sum_over_neurons(hidden: KernelTensor, neurons: Expr, term: Callable[[Expr], Expr], place: ThreadIndex) -> Expr:
    """Return the sum of `term` of the hidden values of a block's token, a float32; a block has `SUM_THREADS`."""
    total = registers(1)
    total[0] = 0.0
    with loop(0, (neurons + (SUM_THREADS - 1)) // SUM_THREADS) as turn:
        neuron = bind(turn * SUM_THREADS + place.thread)
        last = neurons - 1
        value = bind(tirx.if_then_else(neuron <= last, hidden[place.block, minimum(neuron, last)], 0.0))
        total[0] = total[0] + term(value)
    return block_sum(total[0], place.thread, SUM_THREADS)


def _multiply_hidden(
    block: CudaFfn, tile: ProductTile, x: Halves, hidden: KernelTensor, tokens: Expr, place: ThreadIndex
) -> None:
    """hidden = activation(gate) ∘ up_activation(up), or activation(up), for a tile.

    Where there is a gate, a warp's first 16 outputs are products with gate, and the others those of the same neurons
    with up, so that a lane has both of a neuron.
    """
    spec = block.spec
    matrices = 1 + spec.gated
    first_token, first_neuron = bind(place.block_y * tile.tokens), bind(place.block * (tile.outputs // matrices))
    neurons = block.neurons()
    last, has_tokens = neurons - 1, first_token < tokens

    def of_one(output: Expr) -> list[tuple[Expr, CudaMatrix, Expr]]:
        return [(True, block.first_matrix, block.first_row(minimum(first_neuron + output, last)))]

    def of_two(output: Expr) -> list[tuple[Expr, CudaMatrix, Expr]]:
        of_warp, half = output // WARP_OUTPUTS * (WARP_OUTPUTS // 2), WARP_OUTPUTS // 2
        neuron = bind(minimum(first_neuron + of_warp + output % half, last))
        is_up = bind(output % WARP_OUTPUTS // half)
        gate_row, up_row = block.first_row(neuron), block.up_row(neuron)
        if block.decide is None:
            return [(True, block.bundle, gate_row + is_up * (up_row - gate_row))]
        return [(is_up == 0, block.decide, gate_row), (is_up == 1, block.bundle, up_row)]

    with when(has_tokens if block.count is None else tirx.And(has_tokens, first_neuron < neurons)):
        weights = RowWeights(tile, block.bundle, of_two if spec.gated else of_one, place)
        products = multiply(tile, x, span=(first_token, tokens), steps=(0, x.groups()), weights=weights, place=place)
        fragments = tile.output_fragments // matrices
        for token, value in products.each_token():
            for fragment in range(fragments):
                for i in range(2):
                    neuron = bind(first_neuron + products.first_output // matrices + products.offset(fragment, i))
                    with when(neuron <= last):
                        up = value(fragment + fragments, i) if spec.gated else None
                        hidden[token, neuron] = _sent(block, value(fragment, i), up, neuron)


def _sent(block: CudaFfn, first: Expr, up: Expr | None, neuron: Expr) -> Expr:
    """Return a neuron's output, from its products with `first_matrix` and, if there is a gate, with up."""
    spec = block.spec
    first = biased(first, block.first_bias, neuron)
    output = block.output(first, None if up is None else biased(up, block.up_bias, neuron))
    if spec.is_exact or spec.gate_limits:
        # Not a product: a silent neuron whose up is infinite must not turn into NaN.
        output = select(block.fires(first, neuron), output, 0.0)
    return block.above_limit(output, neuron)


@body(CountedFfnSpec, FfnSpec)
def ffn(spec: FfnSpec, function: CudaFunction) -> None:
    """Write the launches of an `FfnSpec`.

    With several rows `masked` always computes the neurons of each row's mask, however many they are.

    Raises:
        CodegenError: For a block of experts.
    """
    if spec.experts:
        raise CodegenError("there is no GPU kernel for a block of experts")
    block = CudaFfn.of(spec, function, CudaMatrix)
    if spec.rows == 1 or spec.is_masked:
        ffn_tokens(function, block)
    else:
        ffn_chunk(function, block)
