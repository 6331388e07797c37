"""Attention of single tokens: a block has query heads that share a head of keys, and a part of the positions.

So keys and values are read once for up to eight query heads. A block goes through its positions a tile at a time, with
a running maximum, sum and output for each query (arXiv 1805.02867): scores of a tile, their weights, values.
"""

from collections.abc import Callable

from picompile_codegen.cuda.attention_arguments import Parts, Tensors, extend_caches, head_element
from picompile_codegen.cuda.attention_mix import Mixture
from picompile_codegen.cuda.attention_scores import (
    MOST_QUERIES,
    THREADS,
    TILE,
    HeldQueries,
    Tile,
    registers_of_query,
    write_scores,
)
from picompile_codegen.cuda.attention_weights import Weights
from picompile_codegen.cuda.function import CudaFunction, Place, blocks_for
from picompile_codegen.cuda.memory import barrier, shared
from picompile_codegen.kernels.attention_arguments import Shape, first_position
from picompile_codegen.kernels.step_rows import StepRows
from picompile_codegen.kernels.tensor import Expr, bind, loop, minimum, when

# What parts come to is read again, and a long list of them takes long to put together.
_MOST_PARTS = 64
_REGISTERS = 64


def decode_parts(shape: Shape) -> Parts:
    """A tile each, or several in long contexts."""
    return Parts.of(shape.context, TILE * blocks_for(shape.context, TILE * _MOST_PARTS))


def queries_of_block(shape: Shape, kv_dtype: str) -> int:
    """How many query heads a block has: as many as registers have room for, evenly."""
    a_query = registers_of_query(kv_dtype, shape.head_dim)
    most = max(1, min(MOST_QUERIES, shape.group, _REGISTERS // a_query))
    return blocks_for(shape.group, blocks_for(shape.group, most))


def _resident(shape: Shape, kv_dtype: str, parts: Parts) -> int:
    """For `Grid`. Of a few queries, each with one tile, ptxas would spill two registers to fit a fourth block."""
    held = queries_of_block(shape, kv_dtype) * registers_of_query(kv_dtype, shape.head_dim)
    return 3 if parts.positions == TILE and held <= _REGISTERS // 2 else 0


def attend_rows(
    function: CudaFunction, shape: Shape, parts: Parts, tensors: Tensors, read_step: Callable[[], StepRows]
) -> None:
    """One launch; two where a new key is for several blocks to see."""
    queries = queries_of_block(shape, tensors.keys.data.dtype)
    sets = blocks_for(shape.group, queries)
    units = shape.kv_heads * sets
    if sets > 1 and tensors.new_keys is not None:
        _extend(function, shape, tensors, read_step)
    resident = _resident(shape, tensors.keys.data.dtype, parts)
    with function.launch(grid=(units * parts.count, shape.rows), block=THREADS, resident=resident) as place:
        tokens, row = read_step(), place.block_y
        part, unit = bind(place.block // units), bind(place.block % units)
        with when(row < tokens.count):
            position = bind(tokens.position(row))
            row_place = (bind(tokens.slot(row)), bind(unit // sets), position)
            first, stop = parts.span(part, first_position(shape, position), bind(position + 1))
            with when(first < stop):
                if sets == 1 and tensors.new_keys is not None:
                    with when(stop == position + 1):
                        extend_caches(shape, tensors, row, row_place, place)
                first_query = bind(unit % sets * queries)
                held = _read_queries(shape, tensors, queries, row, row_place, first_query, place)
                _attend(shape, tensors, held, (row, part), row_place, (first, stop), parts, place)


def _extend(function: CudaFunction, shape: Shape, tensors: Tensors, read_step: Callable[[], StepRows]) -> None:
    """A block has a new key and value of a head."""
    with function.launch(grid=(shape.kv_heads, shape.rows), block=64) as place:
        tokens, row = read_step(), place.block_y
        with when(row < tokens.count):
            row_place = (bind(tokens.slot(row)), place.block, bind(tokens.position(row)))
            extend_caches(shape, tensors, row, row_place, place)


def _read_queries(
    shape: Shape, tensors: Tensors, count: int, row: Expr, row_place: tuple[Expr, Expr, Expr], first: Expr, place: Place
) -> HeldQueries:
    """Query heads `first` … of those that share a head of keys, scaled and turned. Past the last it is repeated."""
    _, kv_head, position = row_place
    memory = shared(count, shape.head_dim)
    with loop(0, blocks_for(count * shape.head_dim, THREADS)) as turn:
        index = bind(turn * THREADS + place.thread)
        with when(index < count * shape.head_dim):
            i, column = bind(index // shape.head_dim), bind(index % shape.head_dim)
            head = bind(kv_head * shape.group + minimum(first + i, shape.group - 1))
            element = head_element(tensors.q, row, head * shape.head_dim, shape.head_dim, tensors.angles, position)
            memory[i, column] = element(column) * shape.scale
    # Also for the new key and value: what a block has written it sees behind a barrier.
    barrier()
    return HeldQueries.of(memory, count, first, tensors.keys, place)


def _attend(
    shape: Shape, tensors: Tensors, queries: HeldQueries, of: tuple[Expr, Expr], row_place: tuple[Expr, Expr, Expr],
    span: tuple[Expr, Expr], parts: Parts, place: Place,
) -> None:  # fmt: skip
    """Goes through the positions from `span`[0] up to `span`[1], and gives what they come to."""
    (slot, kv_head, _), (first, stop), (row, part) = row_place, span, of
    scores, weights = shared(queries.count, TILE), Weights.of(queries.count, place)
    mixture = Mixture.of(queries.count, tensors.values, place)
    tiles = blocks_for(parts.positions, TILE)
    with loop(0, 1 if tiles == 1 else bind((stop - first + (TILE - 1)) // TILE)) as number:
        begin = bind(first + number * TILE)
        tile = Tile((slot, kv_head), begin, bind(minimum(TILE, stop - begin)))
        write_scores(tensors.keys, queries, tile, scores, place)
        barrier()
        weights.soften(scores, tile)
        barrier()
        mixture.add(tensors.values, tile, scores, weights.rescale)
        barrier()

    def give(i: Expr, column: Expr, value: Expr) -> None:
        with when(queries.first + i < shape.group):
            head = bind(kv_head * shape.group + queries.first + i)
            tensors.give(shape, row, head, part, column, value, weights.totals[i])

    mixture.finish(give)
    if tensors.extremes is not None:
        _give_extremes(shape, tensors, queries, weights, (row, kv_head, part), place)


def _give_extremes(
    shape: Shape, tensors: Tensors, queries: HeldQueries, weights: Weights, of: tuple[Expr, Expr, Expr], place: Place
) -> None:
    row, kv_head, part = of

    def give(i: Expr, highest: Expr, total: Expr) -> None:
        with when(queries.first + i < shape.group):
            tensors.give_extremes(row, kv_head * shape.group + queries.first + i, part, highest, total)

    weights.each(give)
