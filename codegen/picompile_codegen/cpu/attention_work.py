"""Arguments and working memory of attention at one position: queries, spans of positions, and blocks of these."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tvm import tirx

from picompile_codegen.cpu.cache import Cache, CachedHead, cache_argument
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, maximum, minimum, select, when
from picompile_codegen.cpu.token_ops import Angles, angles_argument
from picompile_codegen.cpu.vector import LANES, at, blocks, fma, load, splat, store, tanh, whole_vectors
from picompile_codegen.specs import AttentionSpec

# A block of keys is about this long, so that a block of values, on its way meanwhile, is in the first-level cache as
# well. Against 8 KiB, of which the first four blocks went to the second level, 32 sequences of 97 positions take 27 %
# less time (20.2 instead of 27.8 us a token, two cores of Zen 5 with memory at 50 GB/s), and those of 250 16 %.
_BLOCK_BYTES = 16 * 1024
_MOST_KEYS = 128
# Stands for minus infinity, of which differences would not be numbers.
LOWEST = -1e30


@dataclass(frozen=True)
class PositionSpan:
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
    """`count` query heads, and the running state of each from block to block.

    `q` float32 [padded count, padded head_dim] is scaled; `outputs` [padded count, padded value_dim] are yet to be
    divided by the sums. `maxima` and `sums` [tiles, LANES] have the lanes of a vector of scores: lanes of one query
    have the same maximum, and sums that are yet to be added up. `softcap`, and `slopes` [tiles, LANES] of the queries'
    heads, are those of the spec; the queries are at `position`.
    """

    count: int
    tile: int
    width: int
    q: KernelTensor
    maxima: KernelTensor
    sums: KernelTensor
    outputs: KernelTensor
    softcap: float
    slopes: KernelTensor | None
    position: Expr

    @classmethod
    def of(cls, spec: AttentionSpec, position: Expr) -> "Queries":
        """Return memory for the queries that share a head of keys, whose `q` and `slopes` are yet to be filled."""
        count, head_dim, value_dim = spec.group, spec.head_dim, spec.value_dim
        tile = min(4, 1 << (count - 1).bit_length())
        tiles = -(-count // tile)
        width = whole_vectors(value_dim)
        q, outputs = local(tiles * tile, whole_vectors(head_dim)), local(tiles * tile, width)
        maxima, sums = local(tiles, LANES), local(tiles, LANES)
        slopes = local(tiles, LANES) if spec.slopes else None
        queries = cls(count, tile, width, q, maxima, sums, outputs, spec.softcap, slopes, position)
        queries.each_tile(queries._clear)
        return queries

    @property
    def tiles(self) -> int:
        """The number of tiles; the last may have queries that do not count."""
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
        """Run `body(tile)` for each tile, without a loop where there is one tile."""
        if self.tiles == 1:
            body(0)
            return
        with loop(0, self.tiles) as tile:
            body(tile)

    def of_heads(self, values: KernelTensor, first_head: Expr, tile: Expr) -> Expr:
        """Return `values`[head] of the queries of a tile, in the lanes of their scores; `first_head` is query 0's."""
        numbers = [minimum(tile * self.tile + i, self.count - 1) for i in range(self.tile)]
        return query_lanes([bind(values[first_head + number]) for number in numbers])

    def read_slopes(self, values: KernelTensor, first_head: Expr) -> None:
        """Fill `slopes` from the `values` of all heads."""

        def one_tile(tile: Expr) -> None:
            assert self.slopes is not None
            self.slopes[tile, at(0)] = self.of_heads(values, first_head, tile)

        self.each_tile(one_tile)

    def start_with_sinks(self, sinks: KernelTensor, first_head: Expr, condition: Expr) -> None:
        """Begin as if each query had seen a key with the score of its sink and the value 0, if `condition` holds."""
        with when(condition):

            def one_tile(tile: Expr) -> None:
                self.maxima[tile, at(0)] = self.of_heads(sinks, first_head, tile)
                # Sums are added up over a query's lanes: one of them counts the sink.
                self.sums[tile, at(0)] = select(lanes_below(1, self.tile), splat(1.0), splat(0.0))

            self.each_tile(one_tile)

    def _clear(self, tile: Expr) -> None:
        self.maxima[tile, at(0)] = splat(LOWEST)
        self.sums[tile, at(0)] = splat(0.0)
        with loop(0, self.tile) as i:
            blocks(self.width, lambda c, _: store(self.outputs, tile * self.tile + i, c, value=splat(0.0)))


@dataclass(frozen=True)
class Block:
    """`count` positions of a span, from `begin` on."""

    span: PositionSpan
    begin: Expr
    count: Expr

    def prefetch_values(self, indices: list[Expr]) -> None:
        """Prefetch values of this block."""
        self._prefetch(self.span.values, self.begin, indices)

    def prefetch_following(self, indices: list[Expr]) -> None:
        """Prefetch keys of the next block, or of the next span after the last block."""
        head, position = self._following()
        self._prefetch(CachedHead(self.span.keys.cache, self.span.keys.slot, head), position, indices)

    def _prefetch(self, head: CachedHead, begin: Expr, indices: list[Expr]) -> None:
        for index in indices:
            head.prefetch(begin + index)

    def prefetch_following_scales(self) -> None:
        """Prefetch the scales of the next block or span."""
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
    scores: KernelTensor

    def row(self, i: Expr) -> Expr:
        """Return the number of query i of the tile among all queries."""
        return self.tile * self.queries.tile + i


def lanes_below(limit: Expr, lanes_each: int = 1) -> Expr:
    """Return a mask that is true in the lanes of the first `limit` keys, each of which has so many lanes."""
    numbers = [tirx.IntImm("int32", lane // lanes_each) for lane in range(LANES)]
    # Not bound: TVM cannot bind a vector of truth values.
    return tirx.Shuffle(numbers, list(range(LANES))) < tirx.Broadcast(bind(limit), LANES)


def adjusted(score: Expr, softcap: float, slope: Expr | None, distance: Expr, lanes_each: int = 1) -> Expr:
    """Return a vector of scores with the soft cap, by which queries are divided already, and slope · distance.

    `distance` is the first key's position less the query's; each key has so many lanes.
    """
    if softcap:
        score = splat(softcap) * tanh(score)
    if slope is not None:
        steps = [tirx.FloatImm("float32", float(lane // lanes_each)) for lane in range(LANES)]
        away = splat(tirx.Cast("float32", distance)) + tirx.Shuffle(steps, list(range(LANES)))
        score = fma(slope, away, score)
    return score


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


# Enough heads of keys for the cores of a desktop machine. Where there are fewer, tasks share the positions as well.
_ENOUGH_HEADS = 16
# Positions of a task in that case. Long contexts take a multiple of it, so that there are at most _MOST_PARTS parts.
_PART_POSITIONS = 512
_MOST_PARTS = 32


def part_positions(spec: AttentionSpec) -> int:
    """Return how many positions a task goes through at most. Results must not depend on threads, so this does not."""
    if spec.kv_heads >= _ENOUGH_HEADS:
        return spec.context
    return -(-spec.context // (_MOST_PARTS * _PART_POSITIONS)) * _PART_POSITIONS


# The arguments of the kernel, and how a row's queries, key and value are read from them.


T = TypeVar("T", bound="AttentionTensors")


@dataclass(frozen=True)
class AttentionTensors:
    """Arguments of an attention kernel, and the results of parts of the positions where there are several.

    For each row, head and part: `outputs` [value_dim, padded], yet to be divided by the sum of the weights, and in
    `extremes` the maximum of the scores and that sum.
    """

    spec: AttentionSpec
    q: KernelTensor
    keys: Cache
    values: Cache
    y: KernelTensor
    new_keys: KernelTensor | None
    new_values: KernelTensor | None
    angles: Angles | None
    slopes: KernelTensor | None
    sinks: KernelTensor | None
    outputs: KernelTensor | None
    extremes: KernelTensor | None

    @classmethod
    def of(cls: type[T], spec: AttentionSpec, function: KernelFunction, parts: int, width: int) -> T:
        """Return the arguments of the kernel that is being written; several parts have outputs of `width` columns."""
        outputs = extremes = None
        if parts > 1:
            outputs = function.scratch("outputs", "float32", spec.rows, spec.heads, parts, width)
            extremes = function.scratch("extremes", "float32", spec.rows, spec.heads, parts, 2)
        return cls(
            spec=spec,
            q=function["q"],
            keys=cache_argument(function, "k_cache"),
            values=cache_argument(function, "v_cache"),
            y=function["y"],
            new_keys=function.get("k"),
            new_values=function.get("v"),
            angles=angles_argument(function),
            slopes=function.get("slopes"),
            sinks=function.get("sinks"),
            outputs=outputs,
            extremes=extremes,
        )

    def heads(self, slot: Expr, kv_head: Expr) -> tuple[CachedHead, CachedHead]:
        """Return the keys and the values of one head of the sequence in `slot`."""
        return self.keys.head(slot, kv_head), self.values.head(slot, kv_head)


def first_position(spec: AttentionSpec, position: Expr) -> Expr:
    """Return the first position that a token at `position` sees."""
    return bind(maximum(position - (spec.window - 1), 0)) if spec.window else 0


def give(tensors: AttentionTensors, row: Expr, head: Expr, value: Callable[[Expr], Expr]) -> None:
    """Write y of a head at `row`; `value(column)` returns its vectors."""
    width = tensors.spec.value_dim
    start = bind(head * width)
    blocks(width, lambda c, n: store(tensors.y, row, start + c, value=value(c), valid=n))


def extend_cache(tensors: AttentionTensors, row: Expr, position: Expr, heads: tuple[CachedHead, CachedHead]) -> None:
    """Write this row's key and value to the caches."""
    spec, (keys, values) = tensors.spec, heads
    if tensors.new_keys is None or tensors.new_values is None:
        return
    key_start, value_start = bind(keys.number * spec.head_dim), bind(values.number * spec.value_dim)
    source, start = tensors.new_keys, key_start
    if tensors.angles is not None:
        turned = local(1, spec.head_dim)

        def keep(c: Expr, value: Expr, valid: int) -> None:
            store(turned, 0, c, value=value, valid=valid)

        tensors.angles.turn((source, row, start), position, keep)
        keys.write(position, lambda c, valid: load(turned, 0, c, valid=valid))
    else:
        keys.write(position, lambda c, valid: load(source, row, start + c, valid=valid))
    new_values = tensors.new_values
    values.write(position, lambda c, valid: load(new_values, row, value_start + c, valid=valid))


def ready_queries(
    tensors: AttentionTensors, row: Expr, position: Expr, kv_head: Expr, is_first: Expr = True
) -> Queries:
    """Return the query heads that share `kv_head`, scaled and, with `turn`, rotated.

    Where several tasks share the positions, sinks count in the one for which `is_first` holds.
    """
    spec = tensors.spec
    queries = Queries.of(spec, position)
    if tensors.slopes is not None:
        queries.read_slopes(tensors.slopes, kv_head * spec.group)
    if tensors.sinks is not None:
        queries.start_with_sinks(tensors.sinks, kv_head * spec.group, is_first)
    scale = splat(spec.query_scale)
    with loop(0, queries.padded) as i:
        # Queries past the last fill up a tile, and nobody looks at what becomes of them.
        for c in range(spec.head_dim // LANES * LANES, spec.head_dim, LANES):
            store(queries.q, i, c, value=splat(0.0))
        start = bind((kv_head * spec.group + minimum(i, spec.group - 1)) * spec.head_dim)

        def keep(c: Expr, value: Expr, valid: int) -> None:
            store(queries.q, i, c, value=value * scale, valid=valid)

        if tensors.angles is not None:
            tensors.angles.turn((tensors.q, row, start), position, keep)
        else:
            blocks(spec.head_dim, lambda c, valid: keep(c, load(tensors.q, row, start + c, valid=valid), valid))
    return queries
