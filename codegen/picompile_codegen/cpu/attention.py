"""Attention over the cached keys and values: of single tokens, by one task or several, and of chunks of a prompt.

Keys and values are read once, front to back, a block at a time, with a running maximum, sum and output for each query
(arXiv 1805.02867). Queries are taken 1, 2 or 4 at a time, and the softmax treats these at once. The arithmetic on rows
of the cache is in `attention_blocks.py`, that of chunks in `attention_chunk.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.attention_blocks import (
    BlockScales,
    ByteQueries,
    byte_mix,
    byte_products,
    float_mix,
    float_products,
)
from picompile_codegen.cpu.attention_chunk import ChunkQueries, attend_queries, queries_of_task
from picompile_codegen.cpu.attention_work import (
    LOWEST,
    AttentionTensors,
    Block,
    PositionSpan,
    Queries,
    Work,
    adjusted,
    combine_lanes,
    extend_cache,
    first_position,
    give,
    lanes_below,
    part_positions,
    ready_queries,
)
from picompile_codegen.cpu.cache import spread_rows
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, maximum, minimum, parallel, select, when
from picompile_codegen.cpu.token_ops import StepRows, step_rows
from picompile_codegen.cpu.vector import LANES, at, blocks, exp_of_negative, load, splat, store, total, whole_vectors
from picompile_codegen.specs import AttentionSpec


@dataclass(frozen=True)
class _Arithmetic:
    """`products(work, indices)` scores keys, `mix(work, rescale)` mixes values; `prepare(block)` comes first."""

    prepare: Callable[[Block], None]
    products: Callable[[Work, list[Expr]], Expr]
    mix: Callable[[Work, list[Expr]], None]


def _arithmetic(span: PositionSpan, queries: Queries) -> _Arithmetic:
    if not span.keys.groups:
        return _Arithmetic(lambda _: None, float_products, float_mix)
    rounded = ByteQueries.of(queries, span.keys.cache.dim)
    scales = BlockScales.of(span)
    return _Arithmetic(
        scales.read,
        lambda work, indices: byte_products(work, indices, rounded, scales),
        lambda work, rescale: byte_mix(work, rescale, scales),
    )


def attend(span: PositionSpan, queries: Queries) -> None:
    """Attend to the positions of `span`: update the maxima, sums and outputs of `queries`."""
    if span.keys.cache.has_nibbles:
        spread_rows(queries.q, queries.padded, span.keys.cache.dim)
    arithmetic, size = _arithmetic(span, queries), span.block
    scores = local(size * queries.tile)
    with loop(0, (span.stop - span.first + (size - 1)) // size) as index:
        begin = bind(span.first + index * size)
        block = Block(span, begin, bind(minimum(size, span.stop - begin)))
        arithmetic.prepare(block)

        def one_tile(tile: Expr) -> None:
            work = Work(block, queries, tile, scores)
            _score(work, arithmetic)
            rescale = _update_softmax(work)
            arithmetic.mix(work, [bind(tirx.Shuffle([rescale], [i])) for i in range(queries.tile)])

        queries.each_tile(one_tile)
    if span.values.cache.has_nibbles:
        spread_rows(queries.outputs, queries.padded, span.values.cache.dim)


def _score(work: Work, arithmetic: _Arithmetic) -> None:
    """Compute the scores of a block: q · k, adjusted, or LOWEST where there is no key."""
    keys, count = work.queries.keys_a_vector, work.block.count
    full = bind(count // keys)
    with loop(0, full) as index:
        indices = [bind(index * keys + i) for i in range(keys)]
        work.block.prefetch_values(indices)
        work.scores[at(index * LANES)] = _adjust(work, index * keys, arithmetic.products(work, indices))
    start = bind(full * keys)
    with when(start < count):
        products = bind(arithmetic.products(work, [bind(minimum(start + i, count - 1)) for i in range(keys)]))
        exists = lanes_below(count - start, work.queries.tile)
        work.scores[at(full * LANES)] = select(exists, _adjust(work, start, products), splat(LOWEST))


def _adjust(work: Work, index: Expr, products: Expr) -> Expr:
    """Apply soft cap and slopes to the scores of the keys from `index` of the block on."""
    queries = work.queries
    slopes = None if queries.slopes is None else queries.slopes[work.tile, at(0)]
    return adjusted(
        products,
        queries.softcap,
        slope=slopes,
        distance=work.block.begin + index - queries.position,
        lanes_each=queries.tile,
    )


def _update_softmax(work: Work) -> Expr:
    """Turn a block's scores into weights relative to the new maxima, and return the factor for all earlier ones."""
    queries, tile = work.queries, work.tile
    vectors = bind((work.block.count + (queries.keys_a_vector - 1)) // queries.keys_a_vector)
    highest, sums = local(LANES), local(LANES)
    highest[at(0)] = queries.maxima[tile, at(0)]
    with loop(0, vectors) as index:
        highest[at(0)] = maximum(highest[at(0)], work.scores[at(index * LANES)])
    maxima = combine_lanes(highest[at(0)], queries.tile, maximum)
    rescale = bind(exp_of_negative(queries.maxima[tile, at(0)] - maxima))
    queries.maxima[tile, at(0)] = maxima
    sums[at(0)] = queries.sums[tile, at(0)] * rescale
    with loop(0, vectors) as index:
        weight = bind(exp_of_negative(work.scores[at(index * LANES)] - maxima))
        work.scores[at(index * LANES)] = weight
        sums[at(0)] = sums[at(0)] + weight
    queries.sums[tile, at(0)] = sums[at(0)]
    return rescale


def finish(queries: Queries, emit: Callable[[Expr, Expr, Expr], None]) -> None:
    """Call `emit(number, maximum, sum)` for each query, with scalars."""

    def one_tile(tile: Expr) -> None:
        sums = combine_lanes(queries.sums[tile, at(0)], queries.tile, lambda a, b: a + b)
        maxima = bind(queries.maxima[tile, at(0)])
        for i in range(queries.tile):
            number = bind(tile * queries.tile + i)
            with when(number < queries.count):
                emit(number, bind(tirx.Shuffle([maxima], [i])), bind(tirx.Shuffle([sums], [i])))

    queries.each_tile(one_tile)


# Several tasks share the positions of a token where there are few heads of keys. The parts have a fixed size and are
# merged in order, so that results do not depend on the number of threads.


def attend_parts(tensors: AttentionTensors, tokens: StepRows) -> None:
    """Attend by parts: a task takes a part of the positions of a head of keys, and the parts are merged in order."""
    spec = tensors.spec
    last = local(1, dtype="int32")
    last[0] = 0
    with loop(0, tokens.count) as row:
        last[0] = maximum(last[0], tokens.position(row))
    parts = bind(last[0] // part_positions(spec) + 1)
    if spec.rows > 1:
        _extend_caches(tensors, tokens)
    with parallel(tokens.count * spec.kv_heads * parts) as task:
        unit = bind(task // parts)
        row = bind(unit // spec.kv_heads) if spec.rows > 1 else 0
        _attend_part(tensors, tokens, row, kv_head=bind(unit - row * spec.kv_heads), part=bind(task - unit * parts))
    with parallel(tokens.count * spec.heads) as task:
        row = bind(task // spec.heads) if spec.rows > 1 else 0
        _merge_parts(tensors, row, bind(task - row * spec.heads), bind(tokens.position(row)))


def _attend_part(tensors: AttentionTensors, tokens: StepRows, row: Expr, kv_head: Expr, part: Expr) -> None:
    spec = tensors.spec
    position, slot = bind(tokens.position(row)), bind(tokens.slot(row))
    begin, end = bind(part * part_positions(spec)), bind((part + 1) * part_positions(spec))
    first_seen = first_position(spec, position)
    first = bind(maximum(begin, first_seen))
    stop = bind(minimum(end, position + 1))
    # Other rows may be further than this one, and a window leaves out the first parts.
    with when(first < stop):
        heads = tensors.heads(slot, kv_head)
        if spec.rows == 1:
            with when(stop == position + 1):
                extend_cache(tensors, row, position, heads)
        queries = ready_queries(tensors, row, position, kv_head, is_first=begin <= first_seen)
        attend(PositionSpan(*heads, first, stop, kv_head, stop), queries)

        def emit(number: Expr, highest: Expr, weights: Expr) -> None:
            head = bind(kv_head * spec.group + number)
            assert tensors.outputs is not None and tensors.extremes is not None
            outputs = tensors.outputs
            blocks(
                queries.width, lambda c, _: store(outputs, row, head, part, c, value=load(queries.outputs, number, c))
            )
            tensors.extremes[row, head, part, 0] = highest
            tensors.extremes[row, head, part, 1] = weights

        finish(queries, emit)


def _merge_parts(tensors: AttentionTensors, row: Expr, head: Expr, position: Expr) -> None:
    """y = Σ exp(m_p - m) · outputs_p / Σ exp(m_p - m) · sum_p over parts p, with the largest m of their maxima m_p."""
    spec = tensors.spec
    assert tensors.outputs is not None and tensors.extremes is not None
    outputs, extremes = tensors.outputs, tensors.extremes
    width = whole_vectors(spec.value_dim)
    begin = bind(first_position(spec, position) // part_positions(spec))
    end = bind(position // part_positions(spec) + 1)
    highest, sums, mixed = local(1), local(LANES), local(width)
    highest[0] = extremes[row, head, begin, 0]
    with loop(begin + 1, end) as part:
        highest[0] = maximum(highest[0], extremes[row, head, part, 0])
    sums[at(0)] = splat(0.0)
    blocks(width, lambda c, _: store(mixed, c, value=splat(0.0)))
    with loop(begin, end) as part:
        weight = bind(exp_of_negative(splat(extremes[row, head, part, 0] - highest[0])))
        sums[at(0)] = sums[at(0)] + weight * splat(extremes[row, head, part, 1])
        blocks(width, lambda c, _: store(mixed, c, value=load(mixed, c) + load(outputs, row, head, part, c) * weight))
    factor = bind(splat(1.0) / sums[at(0)])
    give(tensors, row, head, lambda c: load(mixed, c) * factor)


@body(AttentionSpec)
def attention(spec: AttentionSpec, function: KernelFunction) -> None:
    """Write the body of an `AttentionSpec`."""
    parts = 1 if spec.mode == "chunk" else -(-spec.context // part_positions(spec))
    tensors = AttentionTensors.of(spec, function, parts, whole_vectors(spec.value_dim))
    tokens = step_rows(function, spec)
    if spec.mode == "chunk":
        _attend_chunk(tensors, tokens)
    elif parts > 1:
        attend_parts(tensors, tokens)
    else:
        _attend_rows(tensors, tokens)


def _extend_caches(tensors: AttentionTensors, tokens: StepRows) -> None:
    """Write the keys and values of all rows before any row attends: rows may be of the same sequence."""
    spec = tensors.spec
    if not spec.extend:
        return
    with parallel(tokens.count * spec.kv_heads) as task:
        row = bind(task // spec.kv_heads)
        kv_head, slot = bind(task - row * spec.kv_heads), bind(tokens.slot(row))
        extend_cache(tensors, row, bind(tokens.position(row)), tensors.heads(slot, kv_head))


def _attend_rows(tensors: AttentionTensors, tokens: StepRows) -> None:
    """Attend row by row: a task takes a head of keys and all queries of one row that share it."""
    spec = tensors.spec
    if spec.rows > 1:
        _extend_caches(tensors, tokens)
    with parallel(tokens.count * spec.kv_heads) as task:
        row = bind(task // spec.kv_heads) if spec.rows > 1 else 0
        kv_head = bind(task - row * spec.kv_heads)
        position, slot = bind(tokens.position(row)), bind(tokens.slot(row))
        heads = tensors.heads(slot, kv_head)
        if spec.rows == 1:
            extend_cache(tensors, row, position, heads)
        queries = ready_queries(tensors, row, position, kv_head)
        first = first_position(spec, position)
        # The thread that is given this task is mostly given the next one, too.
        attend(PositionSpan(*heads, first, bind(position + 1), kv_head + 1, first), queries)

        def emit(number: Expr, _: Expr, weights: Expr) -> None:
            factor = bind(splat(1.0) / splat(weights))
            head = bind(kv_head * spec.group + number)
            give(tensors, row, head, lambda c: load(queries.outputs, number, c) * factor)

        finish(queries, emit)


def _attend_chunk(tensors: AttentionTensors, tokens: StepRows) -> None:
    """Attend by chunks: a task takes queries of consecutive tokens, of all heads that share a head of keys."""
    spec = tensors.spec
    most = queries_of_task(spec.rows, spec.group)
    tiles = bind((tokens.count * spec.group + (most - 1)) // most)
    with parallel(spec.kv_heads * tiles) as task:
        kv_head = bind(task // tiles)
        begin = bind((task - kv_head * tiles) * most)
        count = bind(minimum(most, tokens.count * spec.group - begin))
        queries = ChunkQueries.of(spec, count, most)
        with loop(0, count) as i:
            row, head = _place(spec, kv_head, begin + i)
            position, start = bind(tokens.position(row)), bind(head * spec.head_dim)
            queries.firsts[i], queries.lasts[i] = first_position(spec, position), position
            _copy(
                spec.head_dim, x=tensors.q, row=row, start=start, to=queries.q, to_row=i, factor=splat(spec.query_scale)
            )
            if queries.slopes is not None and tensors.slopes is not None:
                queries.slopes[i] = tensors.slopes[head]
            if tensors.sinks is not None:
                queries.start_with_sink(i, tensors.sinks[head])
        slot = tokens.slot(0)
        attend_queries(queries, *tensors.heads(slot, kv_head), spec.group)
        with loop(0, count) as i:
            row, head = _place(spec, kv_head, begin + i)
            factor = bind(splat(1.0) / splat(total(queries.sums[i, at(0)])))
            give(tensors, row, head, lambda c: load(queries.outputs, i, c) * factor)


def _place(spec: AttentionSpec, kv_head: Expr, query: Expr) -> tuple[Expr, Expr]:
    """Return row and head of query `query` among the queries of a chunk that share a head of keys."""
    row = bind(query // spec.group)
    return row, bind(kv_head * spec.group + query - row * spec.group)


def _copy(width: int, x: KernelTensor, row: Expr, start: Expr, to: KernelTensor, to_row: Expr, factor: Expr) -> None:
    """to[to_row] = x[row, start …] · factor."""
    blocks(width, lambda c, n: store(to, to_row, c, value=load(x, row, start + c, valid=n) * factor, valid=n))
