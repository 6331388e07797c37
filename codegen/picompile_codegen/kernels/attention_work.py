"""What the parts of attention at one position share: queries, positions to go through, and a block of these."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.cache import CachedHead
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, select, when
from picompile_codegen.kernels.vector import LANES, at, blocks, splat, store

# A block of keys is about this long, so that a block of values, on its way meanwhile, is in a near cache as well.
_BLOCK_BYTES = 8 * 1024
_MOST_KEYS = 128
# Blocks of a head that are asked for into the second-level cache: with 128 positions that doubles the speed. What is
# best for later ones was not settled: runs of 4096 positions contradicted each other.
_BLOCKS_FROM_AFAR = 4
# Stands for minus infinity, of which differences would not be numbers.
LOWEST = -1e30


@dataclass(frozen=True)
class Span:
    """The positions `first` … `stop` - 1 of a head; rows from `next_first` on of the head with number `next_head` are
    read afterwards."""

    keys: CachedHead
    values: CachedHead
    first: Expr
    stop: Expr
    next_head: Expr
    next_first: Expr

    @property
    def block(self) -> int:
        """Keys of a block: a multiple of eight."""
        return max(LANES, min(_MOST_KEYS, _BLOCK_BYTES // self.keys.row_bytes // LANES * LANES))


@dataclass(frozen=True)
class Queries:
    """`count` query heads and what is kept of each from block to block.

    `q` float32 [padded count, padded head_dim] is scaled; `outputs` [padded count, padded value_dim] are yet to be
    divided by the sums. `maxima` and `sums` [tiles, LANES] have the lanes of a vector of scores: lanes of one query
    have the same maximum, and sums that are yet to be added up.
    """

    count: int
    tile: int
    width: int
    q: Tensor
    maxima: Tensor
    sums: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, count: int, head_dim: int, value_dim: int) -> "Queries":
        """Memory for `count` queries, of which `q` is yet to be filled."""
        tile = min(4, 1 << (count - 1).bit_length())
        tiles = -(-count // tile)
        width = -(-value_dim // LANES) * LANES
        q, outputs = local(tiles * tile, -(-head_dim // LANES) * LANES), local(tiles * tile, width)
        queries = cls(count, tile, width, q, local(tiles, LANES), local(tiles, LANES), outputs)
        queries.each_tile(queries._clear)
        return queries

    @property
    def tiles(self) -> int:
        """How many tiles there are; the last may have queries that do not count."""
        return -(-self.count // self.tile)

    @property
    def padded(self) -> int:
        """Queries of all tiles."""
        return self.tiles * self.tile

    @property
    def keys_a_vector(self) -> int:
        """Keys whose scores share a vector."""
        return LANES // self.tile

    def each_tile(self, body: Callable[[Expr], None]) -> None:
        """`body(tile)` for each tile: no loop where there is one."""
        if self.tiles == 1:
            body(0)
            return
        with loop(0, self.tiles) as tile:
            body(tile)

    def _clear(self, tile: Expr) -> None:
        self.maxima[tile, at(0)] = splat(LOWEST)
        self.sums[tile, at(0)] = splat(0.0)
        with loop(0, self.tile) as i:
            blocks(self.width, lambda c, _: store(self.outputs, tile * self.tile + i, c, value=splat(0.0)))


@dataclass(frozen=True)
class Block:
    """`count` positions of a span, from `begin` on."""

    span: Span
    begin: Expr
    count: Expr

    def prefetch_values(self, indices: list[Expr]) -> None:
        """Asks for values of this block."""
        self._prefetch(self.span.values, self.begin, indices)

    def prefetch_following(self, indices: list[Expr]) -> None:
        """Asks for keys of what follows: the next block, or the next span."""
        head, position = self._following()
        self._prefetch(CachedHead(self.span.keys.cache, self.span.keys.slot, head), position, indices)

    def _prefetch(self, head: CachedHead, begin: Expr, indices: list[Expr]) -> None:
        from_afar = begin < self.span.first + _BLOCKS_FROM_AFAR * self.span.block
        for condition, into_first_level in ((from_afar, False), (tirx.Not(from_afar), True)):
            with when(condition):
                for index in indices:
                    head.prefetch(begin + index, into_first_level)

    def prefetch_following_scales(self) -> None:
        """Asks for the scales of what follows."""
        head, position = self._following()
        for side in (self.span.keys, self.span.values):
            CachedHead(side.cache, side.slot, head).prefetch_scales(position, self.span.block)

    def _following(self) -> tuple[Expr, Expr]:
        end = self.begin + self.span.block
        is_last = end >= self.span.stop
        head = select(is_last, self.span.next_head, self.span.keys.number)
        return head, select(is_last, self.span.next_first, end)


@dataclass(frozen=True)
class Work:
    """A block of keys and a tile of queries. `scores` [keys · queries] lie key by key, and for each key query by query.

    A vector holds the scores of 8, 4 or 2 keys.
    """

    block: Block
    queries: Queries
    tile: Expr
    scores: Tensor

    def row(self, i: Expr) -> Expr:
        """Where query i of the tile is among all."""
        return self.tile * self.queries.tile + i


def lanes_below(limit: Expr, lanes_each: int = 1) -> Expr:
    """True in the lanes of the first `limit` keys, of which each has so many lanes."""
    numbers = [tirx.IntImm("int32", lane // lanes_each) for lane in range(LANES)]
    # Not bound: TVM cannot bind a vector of truth values.
    return tirx.Shuffle(numbers, list(range(LANES))) < tirx.Broadcast(bind(limit), LANES)


def combine_lanes(values: Expr, queries: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """The lanes of each query combined, in all of them."""
    distance = queries
    while distance < LANES:
        values = bind(values)
        values = combine(values, tirx.Shuffle([values], [lane ^ distance for lane in range(LANES)]))
        distance *= 2
    return bind(values)


def query_lanes(values: list[Expr]) -> Expr:
    """A vector with each query's value in the lanes of its scores."""
    return bind(tirx.Shuffle([values[lane % len(values)] for lane in range(LANES)], list(range(LANES))))
