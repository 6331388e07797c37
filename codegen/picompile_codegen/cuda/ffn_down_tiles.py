"""What many tokens' neurons send, times down: a block takes a tile of tokens and columns, through shared memory."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.ffn_arguments import CudaFfn
from picompile_codegen.cuda.function import Place, blocks_for
from picompile_codegen.cuda.memory import barrier
from picompile_codegen.cuda.outer import OWN, SIDE, Padded, add_products, own_place, own_sums
from picompile_codegen.cuda.tiles import DEPTH, TILE_TOKENS, load_tokens
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, minimum, when

# Blocks that keep a GPU busy; neurons worth a slice; slices that cost little beside the product.
_BLOCKS, _FEWEST, _SLICES = 256, 256, 8


@dataclass(frozen=True)
class DownTiles:
    """Tiles of `tokens` and of `columns`, each in `slices` of `neurons` neurons."""

    tokens: int
    columns: int
    slices: int
    neurons: int

    @classmethod
    def of(cls, neurons: int, dim: int, rows: int) -> "DownTiles":
        """For a block of such a size."""
        tokens, columns = blocks_for(rows, TILE_TOKENS), blocks_for(dim, SIDE)
        wanted = min(blocks_for(_BLOCKS, tokens * columns), blocks_for(neurons, _FEWEST), _SLICES)
        each = blocks_for(blocks_for(neurons, wanted), DEPTH) * DEPTH
        return cls(tokens, columns, blocks_for(neurons, each), each)


@dataclass(frozen=True)
class _Tile:
    """The work of one block: its first token and column, and its neurons."""

    token: Expr
    column: Expr
    start: Expr
    stop: Expr


def multiply_down_tile(
    block: CudaFfn, tiles: DownTiles, hidden: Tensor, out: Tensor, tokens: Expr, place: Place
) -> None:
    """out[slice · rows + t] = Σ hidden[t, j] · down[j] over the neurons of a slice; with one slice y, and its bias."""
    rows, neurons = block.shape.rows, block.shape.neurons
    slice_, start = bind(place.block_y // tiles.tokens), bind(place.block_y // tiles.tokens * tiles.neurons)
    tile = _Tile(
        token=bind(place.block_y % tiles.tokens * TILE_TOKENS),
        column=bind(place.block * SIDE),
        start=start,
        stop=bind(minimum(start + tiles.neurons, neurons)),
    )
    bias = block.down_bias if tiles.slices == 1 else None
    with when(tile.token < tokens):
        outputs, weights, sums = Padded.of(DEPTH), Padded.of(DEPTH), own_sums()
        with loop(0, tiles.neurons // DEPTH) as turn:
            first = bind(start + turn * DEPTH)
            barrier()
            load_tokens(hidden, outputs, tile.token, tokens, first, tile.stop, place.thread)
            _load_weights(block, weights, tile, first, place.thread)
            barrier()
            add_products(outputs, weights, DEPTH, sums, place)
        own_token, own_column = own_place(place)
        for i in range(OWN):
            for j in range(OWN):
                token, column = bind(tile.token + own_token + i), bind(tile.column + own_column + j)
                with when(tirx.And(token < tokens, column < block.shape.dim)):
                    value = sums[i * OWN + j]
                    out[slice_ * rows + token, column] = value if bias is None else value + bias[column]


def _load_weights(block: CudaFfn, weights: Padded, tile: _Tile, first: Expr, thread: Expr) -> None:
    """weights[j, c] = column c of down of neuron first + j; past the last neuron its own again."""
    bundle = block.bundle
    units = SIDE // bundle.unit_weights
    with when(thread < DEPTH * units):
        j, part = bind(thread // units), bind(thread % units)
        neuron = bind(minimum(first + j, block.shape.neurons - 1))
        # Past the last column its unit is read again; nobody stores what comes of it.
        number = bind(minimum(tile.column // bundle.unit_weights + part, bundle.units - 1))
        unit = bundle.unit(bind(block.down_row(neuron)), number)
        for i in range(0, bundle.unit_weights, 4):
            weights.store(j, part * bundle.unit_weights + i, [bind(unit.weight(i + lane)) for lane in range(4)])


def add_tile_slices(block: CudaFfn, tiles: DownTiles, slices: Tensor, y: Tensor, column: Expr, token: Expr) -> None:
    """y[token, column] = the sum of its slices, in order, and the bias."""
    with when(column < block.shape.dim):
        total = slices[token, column]
        for number in range(1, tiles.slices):
            total = total + slices[number * block.shape.rows + token, column]
        y[token, column] = total if block.down_bias is None else total + block.down_bias[column]
