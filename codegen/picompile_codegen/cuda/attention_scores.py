"""Scores of a tile of positions, where a block has a few queries of one token."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.cache import Cache
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, when
from picompile_codegen.cuda.attention_common import load_unit, number, unit_scale, unit_size
from picompile_codegen.cuda.function import WARP, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import barrier, from_lane, registers

THREADS = 256
TILE = 256
# A warp turns the scores of a query into weights.
MOST_QUERIES = THREADS // WARP
# Sums that a thread has for keys whose loads are under way together.
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
        """Return where the row of a position is; past the last, the last again, since what lies behind it is not
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
        """For rows of a cache."""
        size = unit_size(dtype, width, _UNIT)
        units = width // size
        return cls(size, units, min(WARP, 1 << (units - 1).bit_length()))

    @property
    def turns(self) -> int:
        """Units of a thread."""
        return blocks_for(self.units, self.lanes)


def registers_of_query(dtype: str, width: int) -> int:
    """Registers that a thread needs for its share of a query."""
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
        """From the memory of the block, [count, head_dim]. All of its threads come."""
        lanes = Lanes.of(keys.data.dtype, keys.dim)
        elements = registers(count * lanes.turns * lanes.size)
        for turn in range(lanes.turns):
            unit = bind(turn * lanes.lanes + place.thread % lanes.lanes)
            start = bind(minimum(unit, lanes.units - 1) * lanes.size)
            for i in range(count):
                for e in range(lanes.size):
                    value = tirx.Select(unit < lanes.units, memory[i, start + e], number(0.0))
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
    """scores[i, p] = query i · key p of the tile. Several keys of a thread are on their way at once."""
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
    """Sums over `lanes` lanes of each of `values`: a lane gets (index, sum, whether it is its to store) of its share.

    While there are several, a lane hands half of them to another and gets the other's of the half that it keeps: that
    takes about as many exchanges as there are values, where sums one by one would take several for each.
    """
    count = len(values)
    padded = 1 << (count - 1).bit_length()
    kept = [*values, *[number(0.0)] * (padded - count)]
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
