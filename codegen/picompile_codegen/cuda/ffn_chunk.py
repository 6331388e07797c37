"""The feed-forward block of a chunk of tokens: dense, since some token needs almost every neuron.

Tiles of tokens and neurons are multiplied with gate, then with up, which is followed by the activation; then tiles of
tokens and columns with down (`ffn_down_tiles.py`), in slices of the neurons where there are few tiles.
"""

from tvm import tirx

from picompile_codegen.cuda.ffn_arguments import CudaFfn, biased
from picompile_codegen.cuda.ffn_down_tiles import DownTiles, add_tile_slices, multiply_down_tile
from picompile_codegen.cuda.function import CudaFunction, Place, blocks_for
from picompile_codegen.cuda.tiles import TILE_ROWS, TILE_THREADS, TILE_TOKENS, tile_products
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, select, when

_SUM_THREADS = 256


def ffn_chunk(function: CudaFunction, block: CudaFfn) -> None:
    """Declares the rest of the arguments and writes the launches."""
    rows, neurons, dim = block.shape.rows, block.shape.neurons, block.shape.dim
    tiles = DownTiles.of(neurons, dim, rows)
    gate = function.scratch("gate", "float32", rows, neurons) if block.shape.gated else None
    hidden = function.scratch("hidden", "float32", rows, neurons)
    slices = function.scratch("slices", "float32", tiles.slices * rows, dim) if tiles.slices > 1 else None
    y = function.floats("y", rows, dim)
    grid = (blocks_for(neurons, TILE_ROWS), blocks_for(rows, TILE_TOKENS))
    if gate is not None:
        with function.launch(grid=grid, block=TILE_THREADS) as place:
            _compute_gate(block, gate, function.tokens(rows), place)
    with function.launch(grid=grid, block=TILE_THREADS) as place:
        _compute_hidden(block, gate, hidden, function.tokens(rows), place)
    with function.launch(grid=(tiles.columns, tiles.tokens * tiles.slices), block=TILE_THREADS) as place:
        multiply_down_tile(block, tiles, hidden, y if slices is None else slices, function.tokens(rows), place)
    if slices is not None:
        with (
            function.launch(grid=(blocks_for(dim, _SUM_THREADS), rows), block=_SUM_THREADS) as place,
            when(place.block_y < function.tokens(rows)),
        ):
            add_tile_slices(block, tiles, slices, y, place.block * _SUM_THREADS + place.thread, place.block_y)


def _compute_gate(block: CudaFfn, gate: Tensor, tokens: Expr, place: Place) -> None:
    def store(token: Expr, neuron: Expr, value: Expr) -> None:
        gate[token, neuron] = biased(value, block.gate_bias, neuron)

    tile_products(block.x, block.first_matrix, block.first_row, block.shape.neurons, tokens, place, store)


def _compute_hidden(block: CudaFfn, gate: Tensor | None, hidden: Tensor, tokens: Expr, place: Place) -> None:
    """hidden = activation(gate) ∘ up_activation(up), or activation(up)."""
    shape = block.shape

    def store(token: Expr, neuron: Expr, value: Expr) -> None:
        up = biased(value, block.up_bias, neuron)
        first = up if gate is None else bind(gate[token, neuron])
        output = block.output(first, None if gate is None else up)
        if shape.is_exact:
            # Not a product: a silent neuron whose up is infinite must not turn into NaN.
            output = select(block.fires(first), output, tirx.FloatImm("float32", 0.0))
        hidden[token, neuron] = output

    matrix, row = (block.first_matrix, block.first_row) if gate is None else (block.bundle, block.up_row)
    tile_products(block.x, matrix, row, shape.neurons, tokens, place, store)
