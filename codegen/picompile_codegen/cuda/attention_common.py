"""Arguments of attention kernels on a GPU, parts of the positions, and rows of caches and queries as they are read."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.attention_work import LOWEST, AttentionTensors
from picompile_codegen.cpu.cache import Cache
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum, minimum, when
from picompile_codegen.cpu.token_ops import Angles
from picompile_codegen.cuda.function import WARP, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import barrier, extern, from_lane, registers
from picompile_codegen.cuda.token_ops import write_row
from picompile_codegen.specs import AttentionSpec
from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.formats import GROUP

_LANES = 4


@dataclass(frozen=True)
class Parts:
    """`count` parts of the context, each of `positions` but for the last. They do not depend on what a step brings."""

    positions: int
    count: int

    @classmethod
    def of(cls, context: int, positions: int) -> "Parts":
        """Return parts of `positions` positions each."""
        return cls(positions, -(-context // positions))

    def span(self, part: Expr, first: Expr, stop: Expr) -> tuple[Expr, Expr]:
        """Return which of the positions `first` … `stop` - 1 are in a part, as (first, stop)."""
        if self.count == 1:
            return first, stop
        return bind(maximum(first, part * self.positions)), bind(minimum(stop, (part + 1) * self.positions))

    def seen(self, first: Expr, position: Expr) -> tuple[Expr, Expr]:
        """Return the first part with positions `first` … `position`, and the one behind the last."""
        return bind(first // self.positions), bind(position // self.positions + 1)


@dataclass(frozen=True)
class CudaAttentionTensors(AttentionTensors):
    """Arguments of an attention kernel on a GPU. A block gives elements, to the result or to the output of its part."""

    def give(self, row: Expr, head: Expr, part: Expr, column: Expr, *, value: Expr, total: Expr) -> None:
        """Write an element of a head's output: of the part or, where there is only one part, of the result."""
        if self.outputs is None:
            self.y[row, head * self.spec.value_dim + column] = value / total
        else:
            self.outputs[row, head, part, column] = value

    def give_extremes(self, row: Expr, head: Expr, part: Expr, *, highest: Expr, total: Expr) -> None:
        """Write the maximum and the sum that belong to the output of a part."""
        if self.extremes is not None:
            self.extremes[row, head, part, 0] = highest
            self.extremes[row, head, part, 1] = total


def padded_width(value_dim: int) -> int:
    """Return the columns of a part's output."""
    return -(-value_dim // _LANES) * _LANES


def weight_of(is_seen: Expr, score: Expr, highest: Expr) -> Expr:
    """Return exp(score - highest), which is NaN for NaN, and 0 for a position that is not seen.

    The choice is made in front of exp, which would otherwise be a branch for each weight.
    """
    return tirx.exp(tirx.Select(is_seen, score - highest, LOWEST))


def adjusted_scores(
    spec: AttentionSpec, scores: list[Expr], seen: list[Expr], slope: Expr | None, first: Expr, steps: list[int]
) -> list[Expr]:
    """Return scores with the soft cap, by which queries are divided already, and slope · distance.

    The position of key i less that of the query is `first` + `steps`[i]. Scores of keys that are not `seen` become
    LOWEST.
    """
    if spec.softcap:
        scores = [bind(tirx.tanh(score)) * spec.softcap for score in scores]
    if slope is not None:
        distance = registers(1)
        # TVM fails on bound sums of what is cast from an integer; it does not look into registers.
        distance[0] = tirx.Cast("float32", first)
        scores = [score + slope * (distance[0] + float(step)) for score, step in zip(scores, steps, strict=True)]
    if not spec.softcap and slope is None:
        return scores
    return [bind(tirx.Select(is_seen, score, LOWEST)) for score, is_seen in zip(scores, seen, strict=True)]


def head_element(
    x: KernelTensor, row: Expr, start: Expr, dim: int, angles: Angles | None, position: Expr
) -> Callable[[Expr], Expr]:
    """Return a function for the elements of the head x[row, start …], turned by the angles of `position` if there are
    any.

    Nothing is read before the element is used, so that a condition can stand in front of it.
    """

    def element(column: Expr) -> Expr:
        if angles is None:
            return x[row, start + column]
        half = dim // 2
        in_first = column < half
        angle = bind(tirx.Select(in_first, column, column - half))
        partner = bind(tirx.Select(in_first, column + half, column - half))
        sign = tirx.Select(in_first, -1.0, 1.0)
        along = x[row, start + column] * angles.cos[position, angle]
        return along + sign * (x[row, start + partner] * angles.sin[position, angle])

    return element


def extend_caches(
    tensors: CudaAttentionTensors, row: Expr, place_in_caches: tuple[Expr, Expr, Expr], place: ThreadIndex
) -> None:
    """Write a row's key and value to (slot, head, position), each by one warp of the block."""
    if tensors.new_keys is None or tensors.new_values is None:
        return
    spec, (_, head, position) = tensors.spec, place_in_caches
    sides = (
        (tensors.keys, tensors.new_keys, spec.head_dim, tensors.angles),
        (tensors.values, tensors.new_values, spec.value_dim, None),
    )
    for warp, (cache, source, dim, angles) in enumerate(sides):
        with when(place.warp == warp):
            write_row(
                cache,
                place_in_caches,
                head_element(source, row, start=head * dim, dim=dim, angles=angles, position=position),
                place.lane,
            )


# Rows are read as float32 in units of up to 16 bytes. They follow one another without padding, so a unit is as wide as
# the alignment of all rows allows.


_UNIT_BYTES = 16
_WORD_BYTES = 4


def unit_size(dtype: str, width: int, most: int = _UNIT_BYTES) -> int:
    """Return the elements of a unit of rows `width` wide: a power of two, at most `most` elements and 16 bytes."""
    size = 1
    while width % (2 * size) == 0 and 2 * size <= most and 2 * size * ITEM_BYTES[dtype] <= _UNIT_BYTES:
        size *= 2
    return size


def load_unit(x: KernelTensor, row: tuple[Expr, ...], start: Expr, size: int) -> tuple[Expr, ...]:
    """Load elements `start` … `start` + `size` - 1 of a row as float32; `start` is a multiple of `size`."""
    if size == 1:
        return (bind(tirx.Cast("float32", x[(*row, start)])),)
    vector = bind(x[(*row, tirx.Ramp(start, 1, size))])
    if x.dtype == "int8" and size >= _WORD_BYTES:
        return _bytes(vector, size)
    return tuple(bind(tirx.Cast("float32", tirx.Shuffle([vector], [i]))) for i in range(size))


def unit_scale(cache: Cache, row: tuple[Expr, ...], start: Expr) -> Expr | None:
    """Return the scale of the unit that begins at `start`; None for 1. A unit is inside one group."""
    if cache.scales is None:
        return None
    return bind(tirx.Cast("float32", cache.scales[(*row, start // GROUP)]))


def _bytes(vector: Expr, size: int) -> tuple[Expr, ...]:
    count = size // _WORD_BYTES
    words = bind(tirx.reinterpret("uint32" if count == 1 else f"uint32x{count}", vector))
    each = [words] if count == 1 else [bind(tirx.Shuffle([words], [i])) for i in range(count)]
    return tuple(bind(extern("pi_byte", each[i // _WORD_BYTES], i % _WORD_BYTES)) for i in range(size))


# A block that has a few queries of one token computes the scores of a tile of positions.


THREADS = 256
TILE = 256
# A warp turns the scores of a query into weights.
MOST_QUERIES = THREADS // WARP
# A thread has this many sums, for keys that are loaded at the same time.
_SUMS = 16
_MOST_KEYS = 4
# A thread has this many elements of a key at once: more would take too many registers with eight queries.
_UNIT = 8


@dataclass(frozen=True)
class Tile:
    """`count` positions from `begin` on, of the sequence and head of keys `head`."""

    head: tuple[Expr, Expr]
    begin: Expr
    count: Expr

    def row(self, index: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the place of a position's row; past the last, the last again, since memory behind it is not
        defined."""
        return (*self.head, bind(self.begin + minimum(index, self.count - 1)))


@dataclass(frozen=True)
class Lanes:
    """`lanes` threads side by side share a row of `units` units: each has `turns` of them."""

    size: int
    units: int
    lanes: int

    @classmethod
    def of(cls, dtype: str, width: int) -> "Lanes":
        """Return the lanes for rows of a cache that are `width` wide."""
        size = unit_size(dtype, width, _UNIT)
        units = width // size
        return cls(size, units, min(WARP, 1 << (units - 1).bit_length()))

    @property
    def turns(self) -> int:
        """Units of a thread."""
        return blocks_for(self.units, self.lanes)


def registers_of_query(dtype: str, width: int) -> int:
    """Return how many registers a thread needs for its share of a query."""
    lanes = Lanes.of(dtype, width)
    return lanes.turns * lanes.size


@dataclass(frozen=True)
class HeldQueries:
    """`count` queries, the first of which is query `first` of its head of keys. Threads hold their shares of them.

    `elements` [count · turns · size]; zeros past the end of a row.
    """

    count: int
    first: Expr
    lanes: Lanes
    elements: KernelTensor

    @classmethod
    def of(cls, memory: KernelTensor, count: int, first: Expr, keys: Cache, place: ThreadIndex) -> "HeldQueries":
        """Read queries from the memory of the block, [count, head_dim]. All threads of the block must call this."""
        lanes = Lanes.of(keys.data.dtype, keys.dim)
        elements = registers(count * lanes.turns * lanes.size)
        for turn in range(lanes.turns):
            unit = bind(turn * lanes.lanes + place.thread % lanes.lanes)
            start = bind(minimum(unit, lanes.units - 1) * lanes.size)
            for i in range(count):
                for e in range(lanes.size):
                    value = tirx.Select(unit < lanes.units, memory[i, start + e], 0.0)
                    elements[(i * lanes.turns + turn) * lanes.size + e] = value
        # TVM gives memory that nobody uses any more to what comes next.
        barrier()
        return cls(count, first, lanes, elements)

    def products(self, keys: Cache, row: tuple[Expr, ...], lane: Expr) -> list[Expr]:
        """Return the products of this thread's share of a row of keys with each query."""
        sums: list[Expr] = [None] * self.count
        for turn in range(self.lanes.turns):
            unit = turn * self.lanes.lanes + lane
            start = minimum(unit, self.lanes.units - 1) * self.lanes.size if self._is_ragged else unit * self.lanes.size
            values, scale = load_unit(keys.data, row, start, self.lanes.size), unit_scale(keys, row, start)
            for i in range(self.count):
                product = self._product(i * self.lanes.turns + turn, values)
                product = product if scale is None else product * scale
                sums[i] = bind(product if sums[i] is None else sums[i] + product)
        return sums

    @property
    def _is_ragged(self) -> bool:
        return self.lanes.turns * self.lanes.lanes != self.lanes.units

    def _product(self, unit: int, values: tuple[Expr, ...]) -> Expr:
        total = None
        for e, value in enumerate(values):
            product = self.elements[unit * self.lanes.size + e] * value
            total = product if total is None else total + product
        return bind(total)


def write_scores(keys: Cache, queries: HeldQueries, tile: Tile, scores: KernelTensor, place: ThreadIndex) -> None:
    """scores[i, p] = query i · key p of the tile. A thread loads several keys at once."""
    lanes = queries.lanes.lanes
    side_by_side = THREADS // lanes
    # A power of two, so that turns fill a tile.
    each = min(_MOST_KEYS, lanes, 1 << (_SUMS // queries.count).bit_length() - 1)
    lane, group = bind(place.thread % lanes), bind(place.thread // lanes)
    with loop(0, bind((tile.count + (side_by_side * each - 1)) // (side_by_side * each))) as turn:
        first = bind(turn * (side_by_side * each) + group)
        sums: list[Expr] = []
        for key in range(each):
            sums += queries.products(keys, tile.row(first + key * side_by_side), lane)
        for index, total, is_mine in _spread_sums(sums, lane, lanes):
            with when(is_mine):
                scores[index % queries.count, first + index // queries.count * side_by_side] = total


def _spread_sums(values: list[Expr], lane: Expr, lanes: int) -> list[tuple[Expr, Expr, Expr]]:
    """Sum each of `values` over `lanes` lanes: a lane gets (index, sum, whether it stores it) for its share of them.

    While there are several values, a lane hands half of them to another lane and gets that lane's values of the half
    that it keeps. This takes about as many shuffles as there are values; single sums would take several for each.
    """
    count = len(values)
    padded = 1 << (count - 1).bit_length()
    kept = [*values, *[0.0] * (padded - count)]
    first: Expr = 0
    is_mine: Expr = None
    offset = 1
    while offset < lanes:
        upper = bind(lane // offset % 2 == 1)
        if len(kept) == 1:
            kept = [bind(kept[0] + from_lane(kept[0], offset))]
            is_mine = tirx.Not(upper) if is_mine is None else tirx.And(is_mine, tirx.Not(upper))
        else:
            half = len(kept) // 2
            give = [bind(tirx.Select(upper, kept[i], kept[i + half])) for i in range(half)]
            keep = [bind(tirx.Select(upper, kept[i + half], kept[i])) for i in range(half)]
            kept = [bind(mine + from_lane(other, offset)) for mine, other in zip(keep, give, strict=True)]
            first = first + lane // offset % 2 * half
        offset *= 2
    found = []
    for i, value in enumerate(kept):
        index = bind(first + i)
        inside = index < count
        found.append((index, value, inside if is_mine is None else tirx.And(inside, is_mine)))
    return found
