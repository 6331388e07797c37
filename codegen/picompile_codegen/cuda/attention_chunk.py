"""Attention of a chunk of a prompt: products of matrices, a tile of queries by a tile of keys at a time.

A block takes queries of one head of keys: those of consecutive tokens, and of all the heads that share it. It goes
through the keys with a running maximum, sum and output for each query (arXiv 1805.02867). Outputs stay in registers;
what is multiplied comes through the memory of the block.
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import Parts, Tensors, number
from picompile_codegen.cuda.attention_queries import ChunkTile
from picompile_codegen.cuda.attention_softener import Softener
from picompile_codegen.cuda.attention_tiles import (
    DEPTH,
    load_keys,
    load_queries,
    load_values,
    multiply_slices,
    multiply_weights,
)
from picompile_codegen.cuda.function import CudaFunction, Place, blocks_for
from picompile_codegen.cuda.memory import barrier, registers
from picompile_codegen.cuda.outer import SIDE, THREADS, Padded, own_place
from picompile_codegen.kernels.attention_arguments import Shape
from picompile_codegen.kernels.step_rows import StepRows
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, minimum, when

# Columns of values of a block: its outputs take a register for each 16 of them. There may be several such slices.
_SLICE = 256
# So many blocks keep a GPU busy; where there are fewer, blocks share the positions.
_ENOUGH_BLOCKS = 256
# Of three blocks a multiprocessor, registers would be spilled.
_RESIDENT = 2
_PART_POSITIONS = 512


def chunk_parts(shape: Shape) -> Parts:
    """As many as make enough blocks, if the context is long enough for that."""
    wanted = blocks_for(_ENOUGH_BLOCKS, _blocks(shape))
    return Parts.of(shape.context, max(_PART_POSITIONS, blocks_for(shape.context, wanted * SIDE) * SIDE))


def _tiles(shape: Shape) -> int:
    return blocks_for(shape.rows * shape.group, SIDE)


def _slices(shape: Shape) -> int:
    return blocks_for(shape.value_dim, _SLICE)


def _blocks(shape: Shape) -> int:
    return shape.kv_heads * _tiles(shape) * _slices(shape)


def attend_chunk(
    function: CudaFunction, shape: Shape, parts: Parts, tensors: Tensors, read_step: Callable[[], StepRows]
) -> None:
    """One launch."""
    with function.launch(grid=(_blocks(shape), parts.count), block=THREADS, resident=_RESIDENT) as place:
        tokens = read_step()
        work = bind(place.block // _slices(shape))
        total = bind(tokens.count * shape.group)
        begin = bind(work // shape.kv_heads * SIDE)
        with when(begin < total):
            tile = ChunkTile(shape, tokens.slot(0), bind(work % shape.kv_heads), begin, total, tokens)
            first, last = tile.seen(0)[0], tile.seen(SIDE - 1)[1]
            span = parts.span(place.block_y, first, bind(last + 1))
            with when(span[0] < span[1]):
                _attend(tensors, tile, span, bind(place.block % _slices(shape) * _SLICE), place)


def _attend(tensors: Tensors, tile: ChunkTile, span: tuple[Expr, Expr], first_column: Expr, place: Place) -> None:
    """Positions from `span`[0] up to `span`[1], columns of values from `first_column` on."""
    shape = tile.shape
    factors, weights = Padded.of(SIDE), Padded.of(SIDE)
    softener = Softener.of(tile, span[1], place)
    outputs = [registers(16) for _ in range(blocks_for(min(shape.value_dim, _SLICE), SIDE))]
    for output in outputs:
        _clear(output)
    scores = registers(16)
    with loop(0, bind((span[1] - span[0] + (SIDE - 1)) // SIDE)) as turn:
        begin = bind(span[0] + turn * SIDE)
        key_rows = _rows(tile, begin, span[1])
        _clear(scores)
        with loop(0, blocks_for(shape.head_dim, DEPTH)) as depth:
            barrier()
            load_queries(tensors.q, tile, depth, factors, place)
            load_keys(tensors.keys, key_rows, depth, factors, place)
            barrier()
            multiply_slices(factors, scores, place)
        _store_scores(scores, weights, place)
        barrier()
        softener.soften(weights, begin)
        barrier()
        rescale = softener.rescale_of(own_place(place)[0])
        for n, output in enumerate(outputs):
            for i in range(16):
                output[i] = output[i] * rescale[i // 4]
            barrier()
            load_values(tensors.values, key_rows, first_column + n * SIDE, factors, place)
            barrier()
            multiply_weights(weights, factors, output, place)
    _give(tensors, tile, outputs, softener, first_column, place)


def _rows(tile: ChunkTile, begin: Expr, stop: Expr) -> Callable[[Expr], tuple[Expr, Expr, Expr]]:
    """Where the rows of keys and values from `begin` on are; past the last that is repeated."""
    return lambda index: (tile.slot, tile.kv_head, bind(minimum(begin + index, stop - 1)))


def _clear(sums: Tensor) -> None:
    for i in range(16):
        sums[i] = number(0.0)


def _store_scores(scores: Tensor, weights: Padded, place: Place) -> None:
    """weights[key, query] = score, of the 4 · 4 that this thread has."""
    query, key = own_place(place)
    for j in range(4):
        weights.store(key + j, query, [scores[i * 4 + j] for i in range(4)])


def _give(
    tensors: Tensors, tile: ChunkTile, outputs: list[Tensor], softener: Softener, first_column: Expr, place: Place
) -> None:
    query, column = own_place(place)
    for i in range(4):
        with when(tile.begin + query + i < tile.total):
            row, head = tile.query(query + i)
            total = bind(softener.totals[query + i])
            for n, output in enumerate(outputs):
                for j in range(4):
                    c = bind(first_column + n * SIDE + column + j)
                    with when(c < tile.shape.value_dim):
                        tensors.give(tile.shape, row, head, place.block_y, c, output[i * 4 + j], total)
            with when(tirx.And(column == 0, first_column == 0)):
                tensors.give_extremes(row, head, place.block_y, softener.maxima[query + i], total)
