"""Attention of the query heads that share a head of keys, at one position: what decoding is made of.

Keys and values are read once, front to back, a block at a time, with a running maximum, sum and output for each query
(arXiv 1805.02867). While the keys of a block are scored its values are asked for, and while these are mixed the next
keys: so memory has work all the time.

Queries are taken 1, 2 or 4 at a time. The scores of a block lie key by key, and for each key query by query: one vector
holds the scores of 8, 4 or 2 keys, and the softmax treats all queries at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen import isa
from picompile_codegen.kernels.cache import CachedHead
from picompile_codegen.kernels.math import exp_of_negative
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, in_slices, local, loop, maximum, minimum, select, when
from picompile_codegen.kernels.vector import LANES, at, blocks, eight_totals, fma, load, splat, store
from picompile_passes.dialect.formats import GROUP

# A block of keys is about this long, so that a block of values, on its way meanwhile, fits the first-level cache too.
_BLOCK_BYTES = 8 * 1024
# Stands for minus infinity, of which differences would not be numbers.
LOWEST = -1e30


@dataclass(frozen=True)
class Span:
    """The positions `first` … `stop` - 1 of a head; `next_keys` from `next_position` on are read afterwards."""

    keys: CachedHead
    values: CachedHead
    first: Expr
    stop: Expr
    next_keys: CachedHead
    next_position: Expr

    @property
    def block(self) -> int:
        """Keys of a block."""
        return int(__import__('os').environ.get('BLK','64'))


@dataclass(frozen=True)
class Queries:
    """`count` query heads and what is kept of each from block to block.

    `q` float32 [padded count, padded head_dim] is scaled; `outputs` [padded count, padded value_dim] are yet to be
    divided by the sums. `maxima` and `sums` [tiles, LANES] have the lanes of a vector of scores: lanes of one query
    have the same maximum, and sums that are yet to be added up.
    """

    count: int
    tile: int
    q: Tensor
    maxima: Tensor
    sums: Tensor
    outputs: Tensor
    width: int

    @classmethod
    def of(cls, count: int, head_dim: int, value_dim: int) -> "Queries":
        """Memory for `count` queries, of which `q` is yet to be filled."""
        tile = min(4, 1 << (count - 1).bit_length())
        tiles = -(-count // tile)
        width = -(-value_dim // LANES) * LANES
        q = local(tiles * tile, -(-head_dim // LANES) * LANES)
        queries = cls(count, tile, q, local(tiles, LANES), local(tiles, LANES), local(tiles * tile, width), width)
        _each(tiles, queries._clear)
        return queries

    @property
    def tiles(self) -> int:
        """How many tiles there are; the last may have queries that do not count."""
        return -(-self.count // self.tile)

    @property
    def keys_a_vector(self) -> int:
        """Keys whose scores share a vector."""
        return LANES // self.tile

    def _clear(self, tile: Expr) -> None:
        self.maxima[tile, at(0)] = splat(LOWEST)
        self.sums[tile, at(0)] = splat(0.0)
        for i in range(self.tile):
            blocks(self.width, lambda c, _, i=i: store(self.outputs, tile * self.tile + i, c, value=splat(0.0)))  # type: ignore[misc]


def _each(count: int, body: Callable[[Expr], None]) -> None:
    """`body(i)` for i below `count`: no loop where there is one."""
    if count == 1:
        body(0)
        return
    with loop(0, count) as index:
        body(index)


def attend(span: Span, queries: Queries) -> None:
    """Takes the positions of `span` into what `queries` keep."""
    block = span.block
    scores = local(block * queries.tile)
    key_scales, value_scales = (local(block * max(1, head.groups)) for head in (span.keys, span.values))
    with loop(0, (span.stop - span.first + (block - 1)) // block) as index:
        begin = bind(span.first + index * block)
        count = bind(minimum(block, span.stop - begin))
        is_last = bind(begin + block >= span.stop)
        _read_scales(span.keys, begin, count, key_scales)
        _read_scales(span.values, begin, count, value_scales)
        follow = _Follow(span, begin, is_last)

        def one_tile(tile: Expr) -> None:
            work = _Tile(span, queries, tile, begin, count, scores, key_scales, value_scales)
            _score(work)
            rescale = _soften(work)
            _mix(work, rescale, follow)

        _each(queries.tiles, one_tile)


@dataclass(frozen=True)
class _Follow:
    """The keys that come after a block: those of the next block, or of the next span."""

    span: Span
    begin: Expr
    is_last: Expr

    def prefetch(self, index: Expr) -> None:
        """Asks for row `index` of them."""
        span = self.span
        position = select(self.is_last, span.next_position, self.begin + span.block)
        number = select(self.is_last, span.next_keys.number, span.keys.number)
        CachedHead(span.keys.cache, span.keys.slot, number).prefetch(position + index)


@dataclass(frozen=True)
class _Tile:
    """A tile of queries and a block of `count` positions from `begin` on; scales [positions · groups] of their rows."""

    span: Span
    queries: Queries
    number: Expr
    begin: Expr
    count: Expr
    scores: Tensor
    key_scales: Tensor
    value_scales: Tensor

    def row(self, i: int) -> Expr:
        """Where query i of the tile is among all."""
        return self.number * self.queries.tile + i


def _read_scales(head: CachedHead, begin: Expr, count: Expr, scales: Tensor) -> None:
    """The scales of a block's rows as float32. Those of eight rows or so are read at once, but none past the end."""
    if not head.groups:
        return
    total = bind(count * head.groups)
    with loop(0, total // LANES) as index:
        scales[at(index * LANES)] = head.scales_from(begin, index * LANES)
    with loop(total // LANES * LANES, total) as index:
        scales[index] = head.scale(begin, index)


def _score(work: _Tile) -> None:
    """The scores of a block: q · k, or LOWEST where there is no key."""
    keys = work.queries.keys_a_vector
    full = bind(work.count // keys)
    with loop(0, full) as index:
        start = bind(index * keys)
        for i in range(keys):
            (work.span.values.prefetch(work.begin + start + i) if "v" in __import__("os").environ["PF"] else None)
        work.scores[at(index * LANES)] = _products(work, [bind(start + i) for i in range(keys)])
    if keys == 1:
        return
    with when(full * keys < work.count):
        start = bind(full * keys)
        last = bind(work.count - 1)
        products = bind(_products(work, [bind(minimum(start + i, last)) for i in range(keys)]))
        lanes = [tirx.IntImm("int32", lane // work.queries.tile) for lane in range(LANES)]
        exists = tirx.Shuffle(lanes, list(range(LANES))) < tirx.Broadcast(work.count - start, LANES)
        work.scores[at(full * LANES)] = select(exists, products, splat(LOWEST))


def _products(work: _Tile, indices: list[Expr]) -> Expr:
    """A vector of q · k, for the keys `indices` of the block."""
    keys, queries = work.span.keys, work.queries
    sums = local(LANES, LANES)
    for lane in range(LANES):
        sums[lane, at(0)] = splat(0.0)

    def add(into: Tensor, c: Expr, valid: int) -> None:
        vectors = [bind(load(queries.q, work.row(i), c)) for i in range(queries.tile)]
        for k, index in enumerate(indices):
            key = bind(keys.raw(work.begin + index, c, valid))
            for i, vector in enumerate(vectors):
                lane = k * queries.tile + i
                into[lane, at(0)] = fma(key, vector, into[lane, at(0)])

    def add_group(group: Expr, size: int) -> None:
        parts = local(LANES, LANES)
        for lane in range(LANES):
            parts[lane, at(0)] = splat(0.0)
        for start in range(0, size, LANES):
            add(parts, group * GROUP + start, min(LANES, size - start))
        for k, index in enumerate(indices):
            scale = bind(splat(work.key_scales[index * keys.groups + group]))
            for i in range(queries.tile):
                lane = k * queries.tile + i
                sums[lane, at(0)] = fma(parts[lane, at(0)], scale, sums[lane, at(0)])

    if keys.groups:
        full, rest = divmod(keys.cache.dim, GROUP)
        if full:
            with loop(0, full) as group:
                add_group(group, GROUP)
        if rest:
            add_group(full, rest)
    else:
        if "p" in __import__("os").environ["PF"]:
            blocks(keys.cache.dim, lambda c, valid: add(sums, c, valid))
            return eight_totals([sums[lane, at(0)] for lane in range(LANES)])
        for k, index in enumerate(indices):

            def add_key(c, valid, k=k, index=index):
                key = bind(keys.raw(work.begin + index, c, valid))
                for i in range(queries.tile):
                    lane = k * queries.tile + i
                    sums[lane, at(0)] = fma(key, load(queries.q, work.row(i), c), sums[lane, at(0)])

            blocks(keys.cache.dim, add_key)
    return eight_totals([sums[lane, at(0)] for lane in range(LANES)])


def _soften(work: _Tile) -> Expr:
    """Turns a block's scores into weights relative to the new maxima; returns what all before is to be multiplied by."""
    queries, tile = work.queries, work.number
    vectors = bind((work.count + (queries.keys_a_vector - 1)) // queries.keys_a_vector)
    highest = local(LANES)
    highest[at(0)] = queries.maxima[tile, at(0)]
    with loop(0, vectors) as index:
        highest[at(0)] = maximum(highest[at(0)], work.scores[at(index * LANES)])
    maxima = combine_lanes(highest[at(0)], queries.tile, maximum)
    rescale = bind(exp_of_negative(queries.maxima[tile, at(0)] - maxima))
    queries.maxima[tile, at(0)] = maxima
    sums = local(LANES)
    sums[at(0)] = queries.sums[tile, at(0)] * rescale
    with loop(0, vectors) as index:
        weight = bind(exp_of_negative(work.scores[at(index * LANES)] - maxima))
        work.scores[at(index * LANES)] = weight
        sums[at(0)] = sums[at(0)] + weight
    queries.sums[tile, at(0)] = sums[at(0)]
    return rescale


def combine_lanes(values: Expr, queries: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """The lanes of each query combined, in all of them."""
    distance = queries
    while distance < LANES:
        values = bind(values)
        values = combine(values, tirx.Shuffle([values], [lane ^ distance for lane in range(LANES)]))
        distance *= 2
    return bind(values)


def _mix(work: _Tile, rescale: Expr, follow: _Follow) -> None:
    """outputs[i] = outputs[i] · rescale[i] + Σ weight[i, j] · v_j over a block, a few vectors at a time."""
    queries, values = work.queries, work.span.values
    factors = [bind(splat(tirx.Shuffle([rescale], [i]))) for i in range(queries.tile)]
    # Outputs that are held in registers, over all queries; the others are for weights and values.
    together = isa.current().registers // 2 // queries.tile * LANES

    def mix_columns(first: Expr, columns: int, is_first: bool) -> None:
        starts = list(range(0, columns, LANES))
        mixed = local(queries.tile * len(starts), LANES)
        for i in range(queries.tile):
            for n, start in enumerate(starts):
                before = load(queries.outputs, work.row(i), first + start)
                mixed[i * len(starts) + n, at(0)] = before * factors[i]
        with loop(0, work.count) as index:
            if is_first and "k" in __import__("os").environ["PF"]:
                follow.prefetch(index)
            weights = [bind(splat(work.scores[index * queries.tile + i])) for i in range(queries.tile)]
            scaled = weights
            for n, start in enumerate(starts):
                # Slices are of 16 columns, or of whole groups.
                if values.groups and start % GROUP == 0:
                    scale = bind(splat(work.value_scales[index * values.groups + (first + start) // GROUP]))
                    scaled = [bind(weight * scale) for weight in weights]
                valid = LANES if start + LANES <= columns else columns - start
                value = bind(values.raw(work.begin + index, first + start, valid))
                for i, weight in enumerate(scaled):
                    place = i * len(starts) + n
                    mixed[place, at(0)] = fma(weight, value, mixed[place, at(0)])
        for i in range(queries.tile):
            for n, start in enumerate(starts):
                store(queries.outputs, work.row(i), first + start, value=mixed[i * len(starts) + n, at(0)])

    in_slices(values.cache.dim, together, mix_columns)


def finish(queries: Queries, emit: Callable[[Expr, int, Expr, Expr], None]) -> None:
    """`emit(tile, i, maximum, sum)` for each query, which is query i of its tile: scalars."""

    def one_tile(tile: Expr) -> None:
        sums = combine_lanes(queries.sums[tile, at(0)], queries.tile, lambda a, b: a + b)
        maxima = bind(queries.maxima[tile, at(0)])
        for i in range(queries.tile):
            with when(tile * queries.tile + i < queries.count):
                emit(tile, i, bind(tirx.Shuffle([maxima], [i])), bind(tirx.Shuffle([sums], [i])))

    _each(queries.tiles, one_tile)
