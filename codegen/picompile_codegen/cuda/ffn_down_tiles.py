"""What many tokens' neurons send, times down: a block takes a tile of tokens and columns, through shared memory."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.ffn_arguments import CudaFfn
from picompile_codegen.cuda.function import WARP, Place, blocks_for
from picompile_codegen.cuda.memory import barrier, registers, shared
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, minimum, when

DOWN_TILE_THREADS = 256
_TILE_TOKENS, _TILE_COLUMNS = 64, 64
# Neurons that are added between two barriers.
_DEPTH = 32
# A thread has so many tokens and so many columns of the tile.
_TOKENS, _COLUMNS = 4, 4
_ACROSS = _TILE_COLUMNS // _COLUMNS
# Four floats more than a tile is wide: a warp that stores four tokens of eight neurons then meets every bank once. (TVM
# takes away such columns of arrays of two dimensions.)
_PITCH = 64 + 4
# Blocks that keep a GPU busy; neurons worth a slice; slices that cost little beside the product.
_BLOCKS, _FEWEST, _SLICES = 256, 256, 8
_ZERO = tirx.FloatImm("float32", 0.0)


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
        tokens, columns = blocks_for(rows, _TILE_TOKENS), blocks_for(dim, _TILE_COLUMNS)
        wanted = min(blocks_for(_BLOCKS, tokens * columns), blocks_for(neurons, _FEWEST), _SLICES)
        each = blocks_for(blocks_for(neurons, wanted), _DEPTH) * _DEPTH
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
        token=bind(place.block_y % tiles.tokens * _TILE_TOKENS),
        column=bind(place.block * _TILE_COLUMNS),
        start=start,
        stop=bind(minimum(start + tiles.neurons, neurons)),
    )
    bias = block.down_bias if tiles.slices == 1 else None
    with when(tile.token < tokens):
        outputs, weights = shared(_DEPTH * _PITCH), shared(_DEPTH * _PITCH)
        sums = registers(_TOKENS * _COLUMNS)
        for i in range(_TOKENS * _COLUMNS):
            sums[i] = _ZERO
        with loop(0, tiles.neurons // _DEPTH) as turn:
            first = bind(start + turn * _DEPTH)
            barrier()
            _load_outputs(hidden, outputs, tile, first, tokens, place.thread)
            _load_weights(block, weights, tile, first, place.thread)
            barrier()
            _multiply(outputs, weights, sums, place.thread)
        for i in range(_TOKENS):
            for j in range(_COLUMNS):
                token = bind(tile.token + place.thread // _ACROSS * _TOKENS + i)
                column = bind(tile.column + place.thread % _ACROSS * _COLUMNS + j)
                with when(tirx.And(token < tokens, column < block.shape.dim)):
                    value = sums[i * _COLUMNS + j]
                    out[slice_ * rows + token, column] = value if bias is None else value + bias[column]


def _load_outputs(hidden: Tensor, outputs: Tensor, tile: _Tile, first: Expr, tokens: Expr, thread: Expr) -> None:
    """Neuron j and token t at j · pitch + t: hidden[t, first + j], zeros where there is no such token or neuron."""
    j = bind(thread % 8 + thread // WARP % 4 * 8)
    for turn in range(_TILE_TOKENS // 8):
        t = bind(turn * 8 + thread // 128 * 4 + thread // 8 % 4)
        inside = tirx.And(tile.token + t < tokens, first + j < tile.stop)
        outputs[j * _PITCH + t] = tirx.if_then_else(inside, hidden[tile.token + t, first + j], _ZERO)


def _load_weights(block: CudaFfn, weights: Tensor, tile: _Tile, first: Expr, thread: Expr) -> None:
    """Neuron j and column c at j · pitch + c: down of neuron first + j; past the last neuron its own again."""
    bundle = block.bundle
    units = _TILE_COLUMNS // bundle.unit_weights
    with when(thread < _DEPTH * units):
        j, part = bind(thread // units), bind(thread % units)
        neuron = bind(minimum(first + j, block.shape.neurons - 1))
        # Past the last column its unit is read again; nobody stores what comes of it.
        number = bind(minimum(tile.column // bundle.unit_weights + part, bundle.units - 1))
        unit = bundle.unit(bind(block.down_row(neuron)), number)
        for i in range(0, bundle.unit_weights, 4):
            four = tirx.Shuffle([bind(unit.weight(i + lane)) for lane in range(4)], [0, 1, 2, 3])
            weights[tirx.Ramp(j * _PITCH + part * bundle.unit_weights + i, 1, 4)] = four


def _multiply(outputs: Tensor, weights: Tensor, sums: Tensor, thread: Expr) -> None:
    token, column = bind(thread // _ACROSS * _TOKENS), bind(thread % _ACROSS * _COLUMNS)
    with loop(0, _DEPTH) as j:
        of_tokens = bind(outputs[tirx.Ramp(j * _PITCH + token, 1, 4)])
        of_columns = bind(weights[tirx.Ramp(j * _PITCH + column, 1, 4)])
        a = [bind(tirx.Shuffle([of_tokens], [i])) for i in range(_TOKENS)]
        b = [bind(tirx.Shuffle([of_columns], [i])) for i in range(_COLUMNS)]
        for i in range(_TOKENS):
            for k in range(_COLUMNS):
                sums[i * _COLUMNS + k] = sums[i * _COLUMNS + k] + a[i] * b[k]


def add_tile_slices(block: CudaFfn, tiles: DownTiles, slices: Tensor, y: Tensor, column: Expr, token: Expr) -> None:
    """y[token, column] = the sum of its slices, in order, and the bias."""
    with when(column < block.shape.dim):
        total = slices[token, column]
        for number in range(1, tiles.slices):
            total = total + slices[number * block.shape.rows + token, column]
        y[token, column] = total if block.down_bias is None else total + block.down_bias[column]
