"""Attention of the query heads that share a head of keys, at one position: what decoding is made of.

Keys and values are read once, front to back, a block at a time, with a running maximum, sum and output for each query
(arXiv 1805.02867). Queries are taken 1, 2 or 4 at a time, and the softmax treats these at once. The arithmetic on rows
of the cache is in `attention_floats.py` and `attention_bytes.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels import attention_bytes, attention_floats
from picompile_codegen.kernels.attention_work import LOWEST, Block, Queries, Span, Work, combine_lanes, lanes_below
from picompile_codegen.kernels.math import exp_of_negative
from picompile_codegen.kernels.tensor import Expr, bind, local, loop, maximum, minimum, select, when
from picompile_codegen.kernels.vector import LANES, at, splat


@dataclass(frozen=True)
class _Arithmetic:
    """`products(work, indices)` scores keys, `mix(work, rescale)` mixes values; `prepare(block)` comes first."""

    prepare: Callable[[Block], None]
    products: Callable[[Work, list[Expr]], Expr]
    mix: Callable[[Work, list[Expr]], None]


def _arithmetic(span: Span, queries: Queries) -> _Arithmetic:
    if not span.keys.groups:
        return _Arithmetic(lambda _: None, attention_floats.products, attention_floats.mix)
    rounded = attention_bytes.ByteQueries.of(queries, span.keys.cache.dim)
    scales = attention_bytes.BlockScales.of(span)
    return _Arithmetic(
        scales.read,
        lambda work, indices: attention_bytes.products(work, indices, rounded, scales),
        lambda work, rescale: attention_bytes.mix(work, rescale, scales),
    )


def attend(span: Span, queries: Queries) -> None:
    """Takes the positions of `span` into what `queries` keep."""
    arithmetic, size = _arithmetic(span, queries), span.block
    scores = local(size * queries.tile)
    with loop(0, (span.stop - span.first + (size - 1)) // size) as index:
        begin = bind(span.first + index * size)
        block = Block(span, begin, bind(minimum(size, span.stop - begin)))
        arithmetic.prepare(block)

        def one_tile(tile: Expr) -> None:
            work = Work(block, queries, tile, scores)
            _score(work, arithmetic)
            rescale = _soften(work)
            arithmetic.mix(work, [bind(splat(tirx.Shuffle([rescale], [i]))) for i in range(queries.tile)])

        queries.each_tile(one_tile)


def _score(work: Work, arithmetic: _Arithmetic) -> None:
    """The scores of a block: q · k, or LOWEST where there is no key."""
    keys, count = work.queries.keys_a_vector, work.block.count
    full = bind(count // keys)
    with loop(0, full) as index:
        indices = [bind(index * keys + i) for i in range(keys)]
        work.block.prefetch_values(indices)
        work.scores[at(index * LANES)] = arithmetic.products(work, indices)
    start = bind(full * keys)
    with when(start < count):
        products = bind(arithmetic.products(work, [bind(minimum(start + i, count - 1)) for i in range(keys)]))
        exists = lanes_below(count - start, work.queries.tile)
        work.scores[at(full * LANES)] = select(exists, products, splat(LOWEST))


def _soften(work: Work) -> Expr:
    """Turns a block's scores into weights relative to the new maxima; what it returns is for all before."""
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
    """`emit(number, maximum, sum)` for each query: scalars."""

    def one_tile(tile: Expr) -> None:
        sums = combine_lanes(queries.sums[tile, at(0)], queries.tile, lambda a, b: a + b)
        maxima = bind(queries.maxima[tile, at(0)])
        for i in range(queries.tile):
            number = bind(tile * queries.tile + i)
            with when(number < queries.count):
                emit(number, bind(tirx.Shuffle([maxima], [i])), bind(tirx.Shuffle([sums], [i])))

    queries.each_tile(one_tile)
