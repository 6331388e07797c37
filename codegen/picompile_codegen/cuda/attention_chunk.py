"""Attention of a chunk of a prompt on a GPU: products of matrices, a tile of queries by a tile of keys at a time.

A block takes queries of one head of keys: those of consecutive tokens, and of all the heads that share it. It goes
through the keys with a running maximum, sum and output for each query (arXiv 1805.02867). Outputs stay in registers;
factors are staged as halves in the block's shared memory and multiplied on tensor cores with sums in float32, as in
FlashAttention-2 (arXiv 2307.08691). Scores, maxima and sums are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.attention_work import LOWEST, first_position
from picompile_codegen.cpu.cache import Cache
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum, minimum, when
from picompile_codegen.cpu.token_ops import StepRows, step_rows
from picompile_codegen.cuda.attention_common import (
    CudaAttentionTensors,
    Parts,
    adjusted_scores,
    load_unit,
    unit_scale,
    unit_size,
    weight_of,
)
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import (
    barrier,
    extern,
    from_lane,
    place_in,
    registers,
    run_extern,
    shared,
    zero_registers,
)
from picompile_codegen.cuda.mma import places_of_pair
from picompile_codegen.specs import AttentionSpec


@dataclass(frozen=True)
class ChunkTile:
    """The queries of a block: from `begin` on of `total`, which are numbered token by token, and in these head by head.

    They are of head `kv_head` of the keys of the sequence in `slot`.
    """

    spec: AttentionSpec
    slot: Expr
    kv_head: Expr
    begin: Expr
    total: Expr
    tokens: StepRows

    def query(self, index: Expr) -> tuple[Expr, Expr]:
        """Return row and head of a query of the tile; past the last query, those of the last."""
        query = bind(minimum(self.begin + index, self.total - 1))
        row = bind(query // self.spec.group)
        return row, bind(self.kv_head * self.spec.group + query % self.spec.group)

    def seen(self, index: Expr) -> tuple[Expr, Expr]:
        """Return the first and the last position that a query sees."""
        position = bind(self.tokens.position(self.query(index)[0]))
        return first_position(self.spec, position), position


# Queries and keys of a tile, and threads of a block: eight warps.
SIDE = 64
THREADS = 256
# A warp has 16 queries, and 32 keys or 32 columns of values.
_WARP_QUERIES, _WARP_COLUMNS = 16, 32
_FRAGMENTS = _WARP_COLUMNS // 8


@dataclass(frozen=True)
class HalfRows:
    """Rows of halves in the memory of a block, 16 bytes longer than their `width`.

    So the 16 bytes of eight rows that `ldmatrix` reads lie in different banks.
    """

    memory: KernelTensor
    width: int
    first: int = 0

    @classmethod
    def of(cls, rows: int, width: int) -> "HalfRows":
        """Return memory for `rows` rows."""
        return cls(shared(rows * (width + 8), dtype="uint16"), width)

    def behind(self, rows: int) -> "HalfRows":
        """Return the rows behind the first `rows`."""
        return HalfRows(self.memory, self.width, self.first + rows * (self.width + 8))

    def at(self, row: Expr, column: Expr) -> Expr:
        """Return the index of an element."""
        return self.first + row * (self.width + 8) + column

    def store(self, row: Expr, column: Expr, values: Sequence[Expr]) -> None:
        """Round and store elements from `column` on, a multiple of their number, which is a power of two."""
        for start in range(0, len(values), 8):
            run = values[start : start + 8]
            if len(run) == 1:
                half = bind(tirx.Cast("float16", run[0]))
                self.memory[self.at(row, column + start)] = tirx.reinterpret("uint16", half)
            else:
                run_extern("pi_store_halves", place_in(self.memory, self.at(row, column + start)), *run)

    def load(self, row: Expr, column: Expr, to: KernelTensor, *, transposed: bool = False) -> None:
        """Load four matrices [8, 8]; `row` and `column` are where the row that this lane loads begins."""
        name = "pi_ldmatrix_x4_trans" if transposed else "pi_ldmatrix_x4"
        run_extern(name, place_in(to, 0), place_in(self.memory, self.at(row, column)))


@dataclass(frozen=True)
class WarpTile:
    """The part of a tile that a warp has: its first query, and its first key or column."""

    query: Expr
    column: Expr
    lane: Expr

    @classmethod
    def of(cls, place: ThreadIndex) -> "WarpTile":
        """Return the part of the warp at `place`."""
        groups = SIDE // _WARP_QUERIES
        return cls(
            bind(place.warp % groups * _WARP_QUERIES), bind(place.warp // groups * _WARP_COLUMNS), bind(place.lane)
        )

    def query_of(self, half: int) -> Expr:
        """Return the query of a lane's results i with i // 2 == `half`."""
        return self.query + half * 8 + self.lane // 4

    def column_of(self, fragment: int, i: int) -> Expr:
        """Return the key or column of a lane's results i with i % 2 == `i`."""
        return self.column + fragment * 8 + self.lane % 4 * 2 + i

    def multiply(
        self, left: HalfRows, right: HalfRows, depth: int, sums: KernelTensor, *, by_columns: bool = False
    ) -> None:
        """sums += left · rightᵀ over `depth` columns, or left · right over `depth` rows of right with `by_columns`."""
        of_queries, of_columns = (registers(4, dtype="uint32") for _ in range(2))
        for start in range(0, depth, 16):
            left.load(self.query + self.lane % 16, start + self.lane // 16 * 8, of_queries)
            for fragment in range(_FRAGMENTS):
                if fragment % 2 == 0:
                    output, deep = places_of_pair(self.lane, start // 16, fragment // 2)
                    output = self.column + output
                    if by_columns:
                        right.load(deep + self.lane % 8, output, of_columns, transposed=True)
                    else:
                        right.load(output + self.lane % 8, deep, of_columns)
                factors = place_in(of_queries, 0), place_in(of_columns, fragment % 2 * 2)
                run_extern("pi_mma", place_in(sums, fragment * 4), *factors)


# Threads that turn the scores of a query into weights.
_THREADS_A_QUERY = THREADS // SIDE
# Scores in the memory of a block, [key, query] with four more between keys.
_SCORE_PITCH = SIDE + 4


@dataclass(frozen=True)
class ChunkSoftmax:
    """Online-softmax state. Four adjacent threads share one query, which sees positions `first` … `last`.

    In the memory of the block, for each query: the running maximum of scores in `maxima` and sum of weights in
    `totals`, and `rescale`, by which all before the last tile is to be multiplied. They take no registers, of which
    outputs need all. So do `slopes` of the heads. A query is at `position`.
    """

    spec: AttentionSpec
    query: Expr
    part: Expr
    first: Expr
    last: Expr
    position: Expr
    rescale: KernelTensor
    maxima: KernelTensor
    totals: KernelTensor
    slopes: KernelTensor | None

    @classmethod
    def of(
        cls, tensors: CudaAttentionTensors, tile: ChunkTile, span: tuple[Expr, Expr], place: ThreadIndex
    ) -> "ChunkSoftmax":
        """Start with nothing seen, which is visible behind the next barrier. Only positions in `span` count.

        Sinks are seen before the first position that a query sees at all.
        """
        query, (begin, stop) = bind(place.thread // _THREADS_A_QUERY), span
        first, position = tile.seen(query)
        memory = (shared(SIDE), shared(SIDE), shared(SIDE), None if tensors.slopes is None else shared(SIDE))
        last = bind(minimum(position, stop - 1))
        part = bind(place.thread % _THREADS_A_QUERY)
        softmax = cls(tile.spec, query, part, first, last, position, *memory)
        with when(softmax.part == 0):
            softmax.maxima[query], softmax.totals[query] = LOWEST, 0.0
            if tensors.sinks is not None:
                with when(tirx.And(first >= begin, first < stop)):
                    softmax.maxima[query], softmax.totals[query] = tensors.sinks[tile.query(query)[1]], 1.0
            if softmax.slopes is not None and tensors.slopes is not None:
                softmax.slopes[query] = tensors.slopes[tile.query(query)[1]]
        return softmax

    def update(self, scores_of_tile: KernelTensor, weights: HalfRows, begin: Expr) -> None:
        """Turn the scores of the positions from `begin` on into weights relative to the new maximum."""
        # With steps of two, threads of a warp meet different banks of memory.
        steps = [i // 2 * (2 * _THREADS_A_QUERY) + i % 2 for i in range(SIDE // _THREADS_A_QUERY)]
        keys = [bind(step + self.part * 2) for step in steps]
        seen = [bind(self._sees(bind(begin + key))) for key in keys]
        scores = [
            bind(tirx.Select(flag, scores_of_tile[key * _SCORE_PITCH + self.query], LOWEST))
            for key, flag in zip(keys, seen, strict=True)
        ]
        slope = None if self.slopes is None else bind(self.slopes[self.query])
        first = begin + self.part * 2 - self.position
        scores = adjusted_scores(self.spec, scores, seen, slope, first, steps)
        before, total = bind(self.maxima[self.query]), bind(self.totals[self.query])
        # Threads write nothing but what they alone have read. TVM does not see that, and wants a barrier in between.
        barrier()
        largest = before
        for score in scores:
            largest = tirx.Max(largest, score)
        now = self._over_four(largest, maximum)
        own: Expr = 0.0
        # TVM would compute a weight again wherever it is used, if it were not stored.
        found = registers(len(keys))
        for i, (score, flag) in enumerate(zip(scores, seen, strict=True)):
            # Not for the score alone: a query that has seen nothing yet has LOWEST for its maximum.
            found[i] = weight_of(flag, score, now)
            own = bind(own + found[i])
        for i in range(0, len(keys), 2):
            weights.store(self.query, keys[i], [found[i], found[i + 1]])
        factor = bind(tirx.exp(before - now))
        total = bind(total * factor + self._over_four(own, lambda a, b: a + b))
        with when(self.part == 0):
            self.maxima[self.query], self.totals[self.query], self.rescale[self.query] = now, total, factor

    def _sees(self, position: Expr) -> Expr:
        return tirx.And(position >= self.first, position <= self.last)

    @staticmethod
    def _over_four(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        for offset in (1, 2):
            value = bind(value)
            value = combine(value, from_lane(value, offset))
        return bind(value)


# Tiles of queries, keys and values are multiplied in the memory of a block.


# Columns of queries and keys that are in memory at once.
DEPTH = SIDE // 2


def load_queries(q: KernelTensor, queries: ChunkTile, depth: Expr, memory: HalfRows, place: ThreadIndex) -> None:
    """Load the columns of slice `depth` of the queries, scaled; zeros past the last column."""
    spec = queries.spec
    size = unit_size("float32", spec.head_dim)

    def load(index: Expr, unit: Expr) -> tuple[Expr, ...]:
        row, head = queries.query(index)
        values = load_unit(q, (row,), head * spec.head_dim + _inside(unit, spec.head_dim, size) * size, size)
        inside = unit * size < spec.head_dim
        return tuple(tirx.Select(inside, _in_range(value * spec.query_scale), 0.0) for value in values)

    _load_slice(load, size, depth, memory, place)


def load_keys(
    keys: Cache, rows: Callable[[Expr], tuple[Expr, ...]], depth: Expr, memory: HalfRows, place: ThreadIndex
) -> None:
    """Load the columns of slice `depth` of the keys.

    Past the last column, where queries have zeros, it loads anything.
    """
    size = unit_size(keys.data.dtype, keys.dim)

    def load(index: Expr, unit: Expr) -> tuple[Expr, ...]:
        return _scaled(keys, rows(index), bind(_inside(unit, keys.dim, size)) * size, size)

    _load_slice(load, size, depth, memory, place)


def load_values(
    values: Cache, rows: Callable[[Expr], tuple[Expr, ...]], first: Expr, memory: HalfRows, place: ThreadIndex
) -> None:
    """Load columns of the values from `first` on, a multiple of 64. Past the last column it loads anything."""
    size = unit_size(values.data.dtype, values.dim)
    units = SIDE // size

    def load(index: Expr) -> None:
        key, unit = bind(index // units), bind(index % units)
        start = bind(_inside(first // size + unit, values.dim, size)) * size
        memory.store(key, unit * size, _scaled(values, rows(key), start, size))

    _each(SIDE * units, load, place)


def _load_slice(
    load: Callable[[Expr, Expr], tuple[Expr, ...]], size: int, depth: Expr, memory: HalfRows, place: ThreadIndex
) -> None:
    """Store slice `depth` of row `index`, 32 columns, as row `index`; `load(index, unit)` gives a unit."""
    units = DEPTH // size

    def one(number_of_unit: Expr) -> None:
        index, unit = bind(number_of_unit // units), bind(number_of_unit % units)
        memory.store(index, unit * size, load(index, bind(depth * units + unit)))

    _each(SIDE * units, one, place)


def _each(count: int, body: Callable[[Expr], None], place: ThreadIndex) -> None:
    """Run `body(i)` for `count` numbers, which the threads of the block take in turns."""
    with loop(0, blocks_for(count, THREADS)) as turn:
        index = bind(turn * THREADS + place.thread)
        with when(index < count):
            body(index)


def _inside(unit: Expr, width: int, size: int) -> Expr:
    """Return `unit`, or the last unit of a row `width` wide if it is past that."""
    return minimum(unit, width // size - 1)


def _scaled(cache: Cache, row: tuple[Expr, ...], start: Expr, size: int) -> tuple[Expr, ...]:
    values, scale = load_unit(cache.data, row, start, size), unit_scale(cache, row, start)
    if scale is not None:
        values = tuple(bind(value * scale) for value in values)
    return values if cache.data.dtype == "float16" else tuple(_in_range(value) for value in values)


def _in_range(value: Expr) -> Expr:
    """Return what a half can hold of a value: an infinite one would make NaN of keys with a weight of 0."""
    return bind(extern("pi_in_range", value))


# Columns of values of a block: its outputs take a register for each 16 of them. There may be several such slices.
_SLICE = 256
# This many blocks keep a GPU busy; where there are fewer, blocks share the positions.
_ENOUGH_BLOCKS = 256
# With two asked for, ptxas spills registers; with values of up to 80 columns two fit anyway.
_RESIDENT = 1
_PART_POSITIONS = 512


def chunk_parts(spec: AttentionSpec) -> Parts:
    """Return parts that make enough blocks, if the context is long enough for that."""
    wanted = blocks_for(_ENOUGH_BLOCKS, _blocks(spec))
    return Parts.of(spec.context, max(_PART_POSITIONS, blocks_for(spec.context, wanted * SIDE) * SIDE))


def _tiles(spec: AttentionSpec) -> int:
    return blocks_for(spec.rows * spec.group, SIDE)


def _slices(spec: AttentionSpec) -> int:
    return blocks_for(spec.value_dim, _SLICE)


def _blocks(spec: AttentionSpec) -> int:
    return spec.kv_heads * _tiles(spec) * _slices(spec)


def attend_chunk(function: CudaFunction, parts: Parts, tensors: CudaAttentionTensors) -> None:
    """Write the launch that attends to a chunk."""
    spec = tensors.spec
    with function.launch(grid=(_blocks(spec), parts.count), block=THREADS, resident=_RESIDENT) as place:
        tokens = step_rows(function, spec)
        work = bind(place.block // _slices(spec))
        total = bind(tokens.count * spec.group)
        begin = bind(work // spec.kv_heads * SIDE)
        with when(begin < total):
            tile = ChunkTile(
                spec, slot=tokens.slot(0), kv_head=bind(work % spec.kv_heads), begin=begin, total=total, tokens=tokens
            )
            first, last = tile.seen(0)[0], tile.seen(SIDE - 1)[1]
            span = parts.span(place.block_y, first, bind(last + 1))
            with when(span[0] < span[1]):
                _attend(tensors, tile, span, first_column=bind(place.block % _slices(spec) * _SLICE), place=place)


def _attend(
    tensors: CudaAttentionTensors, tile: ChunkTile, span: tuple[Expr, Expr], first_column: Expr, place: ThreadIndex
) -> None:
    """Attend to positions from `span`[0] up to `span`[1], with the columns of values from `first_column` on."""
    spec, warp = tile.spec, WarpTile.of(place)
    # Slices of queries and keys, and then slices of values, take turns in the same memory.
    factors = shared(max(2 * SIDE * (DEPTH + 8), SIDE * (SIDE + 8)), dtype="uint16")
    queries, values = HalfRows(factors, DEPTH), HalfRows(factors, SIDE)
    keys, weights = queries.behind(SIDE), HalfRows.of(SIDE, SIDE)
    scores_of_tile = shared(SIDE * _SCORE_PITCH)
    softmax = ChunkSoftmax.of(tensors, tile, span, place)
    slices = blocks_for(min(spec.value_dim, _SLICE), SIDE)
    outputs = [zero_registers(_FRAGMENTS * 4) for _ in range(slices)]
    scores = registers(_FRAGMENTS * 4)
    with loop(0, bind((span[1] - span[0] + (SIDE - 1)) // SIDE)) as turn:
        begin = bind(span[0] + turn * SIDE)
        key_rows = _rows(tile, begin, span[1])
        for i in range(_FRAGMENTS * 4):
            scores[i] = 0.0
        with loop(0, blocks_for(spec.head_dim, DEPTH)) as depth:
            barrier()
            load_queries(tensors.q, queries=tile, depth=depth, memory=queries, place=place)
            load_keys(tensors.keys, rows=key_rows, depth=depth, memory=keys, place=place)
            barrier()
            warp.multiply(queries, keys, DEPTH, scores)
        for fragment in range(_FRAGMENTS):
            for i in range(4):
                key = warp.column_of(fragment, i % 2)
                scores_of_tile[key * _SCORE_PITCH + warp.query_of(i // 2)] = scores[fragment * 4 + i]
        barrier()
        softmax.update(scores_of_tile, weights, begin)
        barrier()
        rescale = [bind(softmax.rescale[warp.query_of(half)]) for half in range(2)]
        for n, output in enumerate(outputs):
            for i in range(_FRAGMENTS * 4):
                output[i] = output[i] * rescale[i % 4 // 2]
            barrier()
            load_values(tensors.values, rows=key_rows, first=first_column + n * SIDE, memory=values, place=place)
            barrier()
            warp.multiply(weights, values, SIDE, output, by_columns=True)
    _give(tensors, tile, outputs, softmax, first_column, warp, place)


def _rows(tile: ChunkTile, begin: Expr, stop: Expr) -> Callable[[Expr], tuple[Expr, Expr, Expr]]:
    """Return where the rows of keys and values from `begin` on are; past the last, the last is repeated."""
    return lambda index: (tile.slot, tile.kv_head, bind(minimum(begin + index, stop - 1)))


def _give(
    tensors: CudaAttentionTensors,
    tile: ChunkTile,
    outputs: list[KernelTensor],
    softmax: ChunkSoftmax,
    first_column: Expr,
    warp: WarpTile,
    place: ThreadIndex,
) -> None:
    for half in range(2):
        query = bind(warp.query_of(half))
        with when(tile.begin + query < tile.total):
            row, head = tile.query(query)
            total = bind(softmax.totals[query])
            for n, output in enumerate(outputs):
                for fragment in range(_FRAGMENTS):
                    for i in range(2):
                        c = bind(first_column + n * SIDE + warp.column_of(fragment, i))
                        with when(c < tile.spec.value_dim):
                            value = output[fragment * 4 + half * 2 + i]
                            tensors.give(row, head, place.block_y, c, value=value, total=total)
            with when(tirx.And(warp.column_of(0, 0) == 0, first_column == 0)):
                tensors.give_extremes(row, head, place.block_y, highest=softmax.maxima[query], total=total)
