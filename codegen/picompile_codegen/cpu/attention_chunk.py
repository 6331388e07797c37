"""Attention of a chunk of a prompt: products of matrices.

A task takes queries of one head of keys: those of consecutive tokens, and of all the heads that share it. It goes
through the keys a block at a time, with a running maximum, sum and output for each query (arXiv 1805.02867). A block of
keys is converted to float32 once for all queries of the task, and transposed: the scores of eight keys are then one
vector, and no lanes need to be added up. Weights times values have the same form.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.attention_work import LOWEST, adjusted, lanes_below
from picompile_codegen.cpu.cache import CachedHead, spread_rows
from picompile_codegen.cpu.panels import float_tile
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, maximum, minimum, select
from picompile_codegen.cpu.vector import (
    LANES,
    at,
    blocks,
    exp_of_negative,
    fma,
    highest,
    load,
    splat,
    store,
    transpose,
    whole_vectors,
)
from picompile_codegen.specs import AttentionSpec

_MOST_QUERIES = 64
_KEYS = 48


def queries_of_task(rows: int, group: int) -> int:
    """Return how many queries a task takes of a chunk of `rows` tokens: a multiple of a tile."""
    return min(_MOST_QUERIES, -(-rows * group // float_tile().tokens) * float_tile().tokens)


@dataclass(frozen=True)
class ChunkQueries:
    """`count` queries, in the order of their positions, and the running state of each from block to block.

    `q` float32 [queries, head_dim] is scaled. Query i sees the positions `firsts`[i] … `lasts`[i]. `maxima` of scores
    and, of the last block, `rescale` [queries]; `sums` [queries, LANES], whose lanes are yet to be added up; `outputs`
    [queries, padded value_dim], yet to be divided by the sums. `softcap` and `slopes` [queries] are those of the spec.
    """

    count: Expr
    most: int
    q: KernelTensor
    firsts: KernelTensor
    lasts: KernelTensor
    maxima: KernelTensor
    rescale: KernelTensor
    sums: KernelTensor
    outputs: KernelTensor
    softcap: float
    slopes: KernelTensor | None

    @classmethod
    def of(cls, spec: AttentionSpec, count: Expr, most: int) -> "ChunkQueries":
        """Return memory for at most `most` queries; q, firsts, lasts and slopes of `count` are yet to be filled."""
        head_dim, value_dim = spec.head_dim, spec.value_dim
        firsts, lasts = local(most, dtype="int32"), local(most, dtype="int32")
        q, outputs = local(most, head_dim), local(most, whole_vectors(value_dim))
        maxima, rescale, sums = local(most), local(most), local(most, LANES)
        slopes = local(most) if spec.slopes else None
        queries = cls(count, most, q, firsts, lasts, maxima, rescale, sums, outputs, spec.softcap, slopes)
        with loop(0, most) as i:
            queries.maxima[i] = LOWEST
            queries.rescale[i] = 0.0
            queries.sums[i, at(0)] = splat(0.0)
            blocks(value_dim, lambda c, _: store(outputs, i, c, value=splat(0.0)))
        # Queries that fill up a tile: nobody looks at what becomes of them.
        with loop(count, most) as i, loop(0, head_dim) as c:
            q[i, c] = 0.0
        return queries

    def start_with_sink(self, i: Expr, sink: Expr) -> None:
        """Begin as if query i had seen a key with the score `sink` and the value 0."""
        self.maxima[i] = sink
        # Lanes of the sums are added up: the first counts the sink.
        self.sums[i, 0] = 1.0

    @property
    def tiles(self) -> Expr:
        """Tiles that hold all queries that count."""
        return bind((self.count + (float_tile().tokens - 1)) // float_tile().tokens)


def attend_queries(queries: ChunkQueries, keys: CachedHead, values: CachedHead, group: int) -> None:
    """softmax(q · kᵀ) · v for the queries of a task, `group` of a token, but for the division by the sums."""
    head_dim, width = keys.cache.dim, whole_vectors(values.cache.dim)
    key_columns, value_rows = local(head_dim, _KEYS), local(_KEYS, width)
    scores = local(queries.most, _KEYS)
    if keys.cache.has_nibbles:
        spread_rows(queries.q, queries.count, head_dim)
    stop = bind(queries.lasts[queries.count - 1] + 1)
    with loop(queries.firsts[0] // _KEYS, (stop + (_KEYS - 1)) // _KEYS) as index:
        begin = bind(index * _KEYS)
        count = bind(minimum(_KEYS, stop - begin))
        _read_keys(keys, begin, count, key_columns)
        _read_values(values, begin, count, value_rows)
        # Queries of tokens before this block see nothing of it.
        blind = bind(maximum((begin - queries.lasts[0] - 1) * group + 1, 0) // float_tile().tokens)
        tiles = (blind, queries.tiles)
        _multiply(_Product(queries.q, key_columns, scores, None), tiles, head_dim, _KEYS)
        with loop(blind * float_tile().tokens, queries.count) as i:
            _update_softmax(queries, scores, i, begin)
        _multiply(_Product(scores, value_rows, queries.outputs, queries.rescale), tiles, count, width)
    if values.cache.has_nibbles:
        spread_rows(queries.outputs, queries.count, values.cache.dim)


def _read_keys(keys: CachedHead, begin: Expr, count: Expr, columns: KernelTensor) -> None:
    """columns [head_dim, keys]. Past the last key it is repeated, up to a whole vector; its scores are not used."""
    with loop(0, (count + (LANES - 1)) // LANES) as index:
        positions = [bind(begin + minimum(index * LANES + i, count - 1)) for i in range(LANES)]

        def turn(c: Expr, valid: int) -> None:
            rows = transpose([keys.value(position, c, valid) for position in positions])
            for i, row in enumerate(rows[:valid]):
                store(columns, c + i, index * LANES, value=row)

        blocks(keys.cache.dim, turn)


def _read_values(values: CachedHead, begin: Expr, count: Expr, rows: KernelTensor) -> None:
    with loop(0, count) as index:
        blocks(
            values.cache.dim,
            lambda c, valid: store(rows, index, c, value=values.value(begin + index, c, valid)),
        )


@dataclass(frozen=True)
class _Product:
    """out = a · b, or out · factors + a · b, row by row: a [rows, depth], b [depth, width], out [rows, width]."""

    a: KernelTensor
    b: KernelTensor
    out: KernelTensor
    factors: KernelTensor | None


def _multiply(product: _Product, tiles: tuple[Expr, Expr], depth: Expr, width: int) -> None:
    """A few rows by three vectors at a time, for the tiles of rows from the first of `tiles` up to the second."""
    shape = float_tile()
    count, widest = shape.tokens, shape.lanes

    def columns(first: Expr, size: int, lanes: int) -> None:
        with loop(*tiles) as tile:
            rows = [bind(tile * count + i) for i in range(count)]
            places = [(i, c, i * (size // lanes) + c // lanes) for i in range(count) for c in range(0, size, lanes)]
            sums, whole = local(len(places), lanes), at(0, lanes)
            for i, c, place in places:
                if product.factors is None:
                    sums[place, whole] = splat(0.0, lanes)
                else:
                    earlier = product.out[rows[i], at(first + c, lanes)]
                    sums[place, whole] = earlier * splat(product.factors[rows[i]], lanes)
            with loop(0, depth) as k:
                read = {c: bind(product.b[k, at(first + c, lanes)]) for c in range(0, size, lanes)}
                factors = [bind(splat(product.a[row, k], lanes)) for row in rows]
                for i, c, place in places:
                    sums[place, whole] = fma(factors[i], read[c], sums[place, whole], lanes)
            for i, c, place in places:
                product.out[rows[i], at(first + c, lanes)] = sums[place, whole]

    full, rest = divmod(width, shape.outputs)
    if full:
        with loop(0, full) as index:
            columns(index * shape.outputs, shape.outputs, widest)
    if rest >= widest:
        columns(full * shape.outputs, rest // widest * widest, widest)
    if rest % widest:
        columns(width - rest % widest, rest % widest, LANES)


def _update_softmax(queries: ChunkQueries, scores: KernelTensor, i: Expr, begin: Expr) -> None:
    """Turn a query's scores into weights relative to the new maximum; `rescale` gets the factor for earlier ones."""
    largest = local(LANES)
    largest[at(0)] = splat(LOWEST)
    with loop(0, _KEYS // LANES) as index:
        c = index * LANES
        # Eight positions from begin + c on: those below both bounds, less those below the first.
        seen = lanes_below(queries.lasts[i] + 1 - begin - c)
        early = lanes_below(queries.firsts[i] - begin - c)
        score = load(scores, i, c)
        slope = None if queries.slopes is None else splat(queries.slopes[i])
        score = adjusted(score, queries.softcap, slope, begin + c - queries.lasts[i])
        score = select(seen, score, splat(LOWEST))
        score = bind(select(early, splat(LOWEST), score))
        store(scores, i, c, value=score)
        largest[at(0)] = maximum(largest[at(0)], score)
    before = bind(queries.maxima[i])
    now = bind(maximum(before, highest(largest[at(0)])))
    rescale = bind(exp_of_negative(splat(before - now)))
    queries.maxima[i] = now
    queries.rescale[i] = tirx.Shuffle([rescale], [0])
    sums = local(LANES)
    sums[at(0)] = queries.sums[i, at(0)] * rescale
    with loop(0, _KEYS // LANES) as index:
        score = bind(load(scores, i, index * LANES))
        # Not merely a small number: a query that has seen nothing yet has LOWEST for its maximum.
        weight = bind(select(score > splat(LOWEST), exp_of_negative(score - splat(now)), splat(0.0)))
        store(scores, i, index * LANES, value=weight)
        sums[at(0)] = sums[at(0)] + weight
    queries.sums[i, at(0)] = sums[at(0)]
