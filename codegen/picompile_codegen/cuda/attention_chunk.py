"""Attention of a chunk of a prompt on a GPU: products of matrices, a tile of queries by a tile of keys at a time.

A block takes queries of one head of keys: those of consecutive tokens, and of all the heads that share it. It goes
through the keys with a running maximum, sum and output for each query (arXiv 1805.02867). Outputs stay in registers;
what is multiplied comes through the memory of the block.
"""

from collections.abc import Callable
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
from picompile_codegen.cuda.linear import OWN, SIDE, THREADS, Padded, add_products, own_place
from picompile_codegen.cuda.memory import barrier, from_lane, registers, shared
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


# Threads that turn the scores of a query into weights.
_THREADS_A_QUERY = THREADS // SIDE


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

    def update(self, weights: Padded, begin: Expr) -> None:
        """Turn the scores of the positions from `begin` on into weights relative to the new maximum."""
        # With steps of two, threads of a warp meet different banks of memory.
        steps = [i // 2 * (2 * _THREADS_A_QUERY) + i % 2 for i in range(SIDE // _THREADS_A_QUERY)]
        keys = [bind(step + self.part * 2) for step in steps]
        seen = [bind(self._sees(bind(begin + key))) for key in keys]
        scores = [
            bind(tirx.Select(flag, weights.memory[weights.at(key, self.query)], LOWEST))
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
        for i, (key, score, flag) in enumerate(zip(keys, scores, seen, strict=True)):
            # Not for the score alone: a query that has seen nothing yet has LOWEST for its maximum.
            found[i] = weight_of(flag, score, now)
            weights.memory[weights.at(key, self.query)] = found[i]
            own = bind(own + found[i])
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

    def rescale_of(self, query: Expr) -> list[Expr]:
        """Return the factors of query `query`, a multiple of four, and the next three."""
        four = bind(self.rescale[tirx.Ramp(query, 1, 4)])
        return [bind(tirx.Shuffle([four], [i])) for i in range(4)]


# Tiles of queries, keys and values are multiplied in the memory of a block.


# Columns of queries and keys that are in memory at once.
DEPTH = SIDE // 2


def multiply_slices(slices: Padded, sums: KernelTensor, place: ThreadIndex) -> None:
    """sums[i, j] += query i · key j in the columns of a slice: 32 rows with the queries', and behind them the keys'."""
    add_products(slices, slices, DEPTH, sums, place, right_first=DEPTH)


def multiply_weights(weights: Padded, values: Padded, sums: KernelTensor, place: ThreadIndex) -> None:
    """sums[i, j] += Σ weights[key, query i] · values[key, column j]."""
    add_products(weights, values, SIDE, sums, place)


def load_queries(q: KernelTensor, queries: ChunkTile, depth: Expr, memory: Padded, place: ThreadIndex) -> None:
    """Load the columns of slice `depth` of the queries, scaled; zeros past the last column."""
    spec = queries.spec
    size = unit_size("float32", spec.head_dim)

    def load(index: Expr, unit: Expr) -> tuple[Expr, ...]:
        row, head = queries.query(index)
        values = load_unit(q, (row,), head * spec.head_dim + _inside(unit, spec.head_dim, size) * size, size)
        return tuple(tirx.Select(unit * size < spec.head_dim, value * spec.query_scale, 0.0) for value in values)

    _load_slice(load, size, depth, memory, 0, place)


def load_keys(
    keys: Cache, rows: Callable[[Expr], tuple[Expr, ...]], depth: Expr, memory: Padded, place: ThreadIndex
) -> None:
    """Load the columns of slice `depth` of the keys.

    Past the last column, where queries have zeros, it loads anything.
    """
    size = unit_size(keys.data.dtype, keys.dim)

    def load(index: Expr, unit: Expr) -> tuple[Expr, ...]:
        return _scaled(keys, rows(index), bind(_inside(unit, keys.dim, size)) * size, size)

    _load_slice(load, size, depth, memory, DEPTH, place)


def load_values(
    values: Cache, rows: Callable[[Expr], tuple[Expr, ...]], first: Expr, memory: Padded, place: ThreadIndex
) -> None:
    """Load columns of the values from `first` on, a multiple of 64. Past the last column it loads anything."""
    size = unit_size(values.data.dtype, values.dim)
    units = SIDE // size

    def load(index: Expr) -> None:
        key, unit = bind(index // units), bind(index % units)
        start = bind(_inside(first // size + unit, values.dim, size)) * size
        loaded = _scaled(values, rows(key), start, size)
        for i in range(0, size, OWN):
            memory.store(key, unit * size + i, loaded[i : i + OWN])

    _each(SIDE * units, load, place)


def _load_slice(
    load: Callable[[Expr, Expr], tuple[Expr, ...]], size: int, depth: Expr, memory: Padded, top: int, place: ThreadIndex
) -> None:
    """Store element c of slice `depth` of row `index` at row top + c, column index; `load(index, unit)` gives a
    unit."""
    units = DEPTH // size

    def one(number_of_unit: Expr) -> None:
        index, unit = bind(number_of_unit // units), bind(number_of_unit % units)
        for i, value in enumerate(load(index, bind(depth * units + unit))):
            memory.store(top + unit * size + i, index, (value,))

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
    return values if scale is None else tuple(bind(value * scale) for value in values)


# Columns of values of a block: its outputs take a register for each 16 of them. There may be several such slices.
_SLICE = 256
# This many blocks keep a GPU busy; where there are fewer, blocks share the positions.
_ENOUGH_BLOCKS = 256
# With three blocks a multiprocessor, registers would be spilled.
_RESIDENT = 2
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


def attend_chunk(function: CudaFunction, spec: AttentionSpec, parts: Parts, tensors: CudaAttentionTensors) -> None:
    """Write the launch that attends to a chunk."""
    with function.launch(grid=(_blocks(spec), parts.count), block=THREADS, resident=_RESIDENT) as place:
        tokens = step_rows(function, spec.mode, spec.rows, spec.context, spec.sequences)
        work = bind(place.block // _slices(spec))
        total = bind(tokens.count * spec.group)
        begin = bind(work // spec.kv_heads * SIDE)
        with when(begin < total):
            tile = ChunkTile(spec, tokens.slot(0), bind(work % spec.kv_heads), begin, total, tokens)
            first, last = tile.seen(0)[0], tile.seen(SIDE - 1)[1]
            span = parts.span(place.block_y, first, bind(last + 1))
            with when(span[0] < span[1]):
                _attend(tensors, tile, span, bind(place.block % _slices(spec) * _SLICE), place)


def _attend(
    tensors: CudaAttentionTensors, tile: ChunkTile, span: tuple[Expr, Expr], first_column: Expr, place: ThreadIndex
) -> None:
    """Attend to positions from `span`[0] up to `span`[1], with the columns of values from `first_column` on."""
    spec = tile.spec
    factors, weights = Padded.of(SIDE), Padded.of(SIDE)
    softmax = ChunkSoftmax.of(tensors, tile, span, place)
    outputs = [registers(16) for _ in range(blocks_for(min(spec.value_dim, _SLICE), SIDE))]
    for output in outputs:
        _clear(output)
    scores = registers(16)
    with loop(0, bind((span[1] - span[0] + (SIDE - 1)) // SIDE)) as turn:
        begin = bind(span[0] + turn * SIDE)
        key_rows = _rows(tile, begin, span[1])
        _clear(scores)
        with loop(0, blocks_for(spec.head_dim, DEPTH)) as depth:
            barrier()
            load_queries(tensors.q, tile, depth, factors, place)
            load_keys(tensors.keys, key_rows, depth, factors, place)
            barrier()
            multiply_slices(factors, scores, place)
        _store_scores(scores, weights, place)
        barrier()
        softmax.update(weights, begin)
        barrier()
        rescale = softmax.rescale_of(own_place(place)[0])
        for n, output in enumerate(outputs):
            for i in range(16):
                output[i] = output[i] * rescale[i // 4]
            barrier()
            load_values(tensors.values, key_rows, first_column + n * SIDE, factors, place)
            barrier()
            multiply_weights(weights, factors, output, place)
    _give(tensors, tile, outputs, softmax, first_column, place)


def _rows(tile: ChunkTile, begin: Expr, stop: Expr) -> Callable[[Expr], tuple[Expr, Expr, Expr]]:
    """Return where the rows of keys and values from `begin` on are; past the last, the last is repeated."""
    return lambda index: (tile.slot, tile.kv_head, bind(minimum(begin + index, stop - 1)))


def _clear(sums: KernelTensor) -> None:
    for i in range(16):
        sums[i] = 0.0


def _store_scores(scores: KernelTensor, weights: Padded, place: ThreadIndex) -> None:
    """weights[key, query] = score, of the 4 · 4 that this thread has."""
    query, key = own_place(place)
    for j in range(4):
        weights.store(key + j, query, [scores[i * 4 + j] for i in range(4)])


def _give(
    tensors: CudaAttentionTensors,
    tile: ChunkTile,
    outputs: list[KernelTensor],
    softmax: ChunkSoftmax,
    first_column: Expr,
    place: ThreadIndex,
) -> None:
    query, column = own_place(place)
    for i in range(4):
        with when(tile.begin + query + i < tile.total):
            row, head = tile.query(query + i)
            total = bind(softmax.totals[query + i])
            for n, output in enumerate(outputs):
                for j in range(4):
                    c = bind(first_column + n * SIDE + column + j)
                    with when(c < tile.spec.value_dim):
                        tensors.give(tile.spec, row, head, place.block_y, c, output[i * 4 + j], total)
            with when(tirx.And(column == 0, first_column == 0)):
                tensors.give_extremes(row, head, place.block_y, softmax.maxima[query + i], total)
