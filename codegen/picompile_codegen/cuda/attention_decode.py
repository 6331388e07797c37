"""Attention of single tokens on a GPU: a block has query heads that share a head of keys, and a part of the positions.

So keys and values are read once for up to eight query heads. A block goes through its positions a tile at a time, with
a running maximum, sum and output for each query (arXiv 1805.02867): scores of a tile, their weights, values.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.attention_work import LOWEST, first_position
from picompile_codegen.cpu.cache import Cache
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, when
from picompile_codegen.cpu.token_ops import step_rows
from picompile_codegen.cuda.attention_common import (
    MOST_QUERIES,
    THREADS,
    TILE,
    CudaAttentionTensors,
    HeldQueries,
    Parts,
    Tile,
    adjusted_scores,
    extend_caches,
    head_element,
    load_unit,
    registers_of_query,
    unit_scale,
    unit_size,
    weight_of,
    write_scores,
)
from picompile_codegen.cuda.attention_merge import MergedHeads, merge_parts
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import barrier, last_block, registers, shared, warp_max, warp_sum, zero_registers
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import AttentionSpec

# Positions that a thread takes at once: one load brings their weights, and all of their values are loaded together.
# With many sums their values would not fit the registers beside them.
_POSITIONS, _FEW_POSITIONS, _MANY_SUMS = 4, 2, 56
_UNIT = 8
# The float32 of shared memory, 16 KiB, that add up the sets.
_MEMORY = 4096


@dataclass(frozen=True)
class Mixture:
    """Sums of `count` queries: a thread has a unit of columns of all of them, `sums` [count · size].

    Threads side by side have the `units` units of a row; `sets` of them take different positions.
    """

    count: int
    size: int
    units: int
    sums: KernelTensor
    unit: Expr
    set: Expr
    place: ThreadIndex

    @classmethod
    def of(cls, count: int, values: Cache, place: ThreadIndex) -> "Mixture":
        """Return sums of 0. Raises `CodegenError` for rows that have more units than a block has threads."""
        size = unit_size(values.data.dtype, values.dim, _UNIT)
        units = values.dim // size
        if units > THREADS:
            raise CodegenError(f"attention cannot have values that are {values.dim} wide: {THREADS * size} at most")
        sums = zero_registers(count * size)
        return cls(count, size, units, sums, bind(place.thread % units), bind(place.thread // units), place)

    @property
    def sets(self) -> int:
        """Sets of threads. A few threads may be left over."""
        return THREADS // self.units

    @property
    def positions(self) -> int:
        """Positions that a thread takes at once."""
        return _FEW_POSITIONS if self.count * self.size >= _MANY_SUMS else _POSITIONS

    def add(self, values: Cache, tile: Tile, weights: KernelTensor, rescale: KernelTensor) -> None:
        """Multiply the sums by `rescale`, and add the values of a tile times `weights`."""
        for i in range(self.count):
            factor = bind(rescale[i])
            for e in range(self.size):
                self.sums[i * self.size + e] = self.sums[i * self.size + e] * factor
        at_once = self.sets * self.positions
        with loop(0, bind((tile.count + (at_once - 1)) // at_once)) as turn:
            first = bind(turn * at_once + self.set * self.positions)
            with when(tirx.And(self.set < self.sets, first < tile.count)):
                self._add_positions(values, tile, weights, first)

    def _add_positions(self, values: Cache, tile: Tile, weights: KernelTensor, first: Expr) -> None:
        rows = [tile.row(first + j) for j in range(self.positions)]
        start = self.unit * self.size
        read = [load_unit(values.data, row, start, self.size) for row in rows]
        scales = [unit_scale(values, row, start) for row in rows]
        for i in range(self.count):
            of_query = bind(weights[i, tirx.Ramp(first, 1, self.positions)])
            for j, (elements, scale) in enumerate(zip(read, scales, strict=True)):
                weight = tirx.Shuffle([of_query], [j])
                weight = bind(weight if scale is None else weight * scale)
                for e, element in enumerate(elements):
                    self.sums[i * self.size + e] = self.sums[i * self.size + e] + weight * element

    def finish(self, give: Callable[[Expr, Expr, Expr], None]) -> None:
        """Add up the sums of the sets in order, and pass each to `give(query, column, sum)`."""
        width = self.units * self.size
        at_once = min(self.count, max(1, _MEMORY // (self.sets * width)))
        memory = shared(at_once, self.sets, width)
        for begin in range(0, self.count, at_once):
            queries = min(at_once, self.count - begin)
            if begin:
                barrier()
            with when(self.set < self.sets):
                for i in range(queries):
                    for e in range(self.size):
                        memory[i, self.set, self.unit * self.size + e] = self.sums[(begin + i) * self.size + e]
            barrier()
            self._add_sets(memory, (begin, queries), width, give)

    def _add_sets(
        self, memory: KernelTensor, span: tuple[int, int], width: int, give: Callable[[Expr, Expr, Expr], None]
    ) -> None:
        total, (begin, queries) = registers(1), span
        with loop(0, blocks_for(queries * width, THREADS)) as turn:
            index = bind(turn * THREADS + self.place.thread)
            with when(index < queries * width):
                i, column = bind(index // width), bind(index % width)
                total[0] = 0.0
                with loop(0, self.sets) as each:
                    total[0] = total[0] + memory[i, each, column]
                give(begin + i, column, total[0])


@dataclass(frozen=True)
class OnlineSoftmax:
    """Online-softmax state in the memory of the block: warp i keeps that of query i.

    `highest` is the running maximum of scores, `totals` the running sum of weights, and `rescale` what all
    before the last tile is to be multiplied by. They take no registers, of which sums of values need all. The queries
    are at `position`; `slope` is that of the warp's query.
    """

    spec: AttentionSpec
    count: int
    highest: KernelTensor
    totals: KernelTensor
    rescale: KernelTensor
    place: ThreadIndex
    position: Expr
    slope: Expr | None

    @classmethod
    def of(
        cls,
        tensors: CudaAttentionTensors,
        queries: HeldQueries,
        row_place: tuple[Expr, Expr, Expr],
        first: Expr,
        *,
        place: ThreadIndex,
    ) -> "OnlineSoftmax":
        """Start with nothing seen, which is visible behind the next barrier. Positions from `first` on follow.

        Sinks are seen before the first position that the token sees at all.
        """
        spec, (_, kv_head, position), count = tensors.spec, row_place, queries.count

        def head(i: Expr) -> Expr:
            return bind(kv_head * spec.group + minimum(queries.first + i, spec.group - 1))

        slope = None if tensors.slopes is None else bind(tensors.slopes[head(minimum(place.warp, count - 1))])
        weights = cls(spec, count, shared(count), shared(count), shared(count), place, position, slope)
        with when(place.thread < count):
            weights.highest[place.thread], weights.totals[place.thread] = LOWEST, 0.0
            if tensors.sinks is not None:
                with when(first == first_position(spec, position)):
                    weights.highest[place.thread] = tensors.sinks[head(place.thread)]
                    weights.totals[place.thread] = 1.0
        return weights

    def update(self, scores: KernelTensor, tile: Tile) -> None:
        """Turn the scores of a tile into weights relative to the new maximum; zeros where there is no position."""
        query, lane = bind(minimum(self.place.warp, self.count - 1)), self.place.lane
        places = [bind(lane + j * WARP) for j in range(TILE // WARP)]
        found = [bind(tirx.if_then_else(p < tile.count, scores[query, p], LOWEST)) for p in places]
        seen, steps = [p < tile.count for p in places], [j * WARP for j in range(len(places))]
        found = adjusted_scores(
            self.spec, scores=found, seen=seen, slope=self.slope, first=tile.begin + lane - self.position, steps=steps
        )
        before, total = bind(self.highest[query]), bind(self.totals[query])
        # Lanes write nothing but what they alone have read. TVM does not see that, and wants a barrier in between.
        barrier()
        largest = before
        for score in found:
            largest = tirx.Max(largest, score)
        now = warp_max(largest)
        own: Expr = 0.0
        # TVM would compute a weight again wherever it is used, if it were not stored.
        weights = registers(len(places))
        with when(self.place.warp < self.count):
            for i, (p, score) in enumerate(zip(places, found, strict=True)):
                weights[i] = weight_of(p < tile.count, score, now)
                scores[query, p] = weights[i]
                own = bind(own + weights[i])
            factor = bind(tirx.exp(before - now))
            total = bind(total * factor + warp_sum(own))
            with when(lane == 0):
                self.highest[query], self.totals[query], self.rescale[query] = now, total, factor

    def each(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """Run `body(i, highest, total)` for each query, in one thread, behind a barrier."""
        thread = self.place.thread
        with when(thread < self.count):
            body(thread, self.highest[thread], self.totals[thread])


# The outputs of parts are read again, and a long list of them takes long to merge.
_MOST_PARTS = 512
_REGISTERS = 64


def decode_parts(spec: AttentionSpec) -> Parts:
    """Return parts of one tile each, or of several in long contexts."""
    return Parts.of(spec.context, TILE * blocks_for(spec.context, TILE * _MOST_PARTS))


def queries_of_block(spec: AttentionSpec, kv_dtype: str) -> int:
    """Return how many query heads a block has: as many as fit the registers, evenly divided."""
    a_query = registers_of_query(kv_dtype, spec.head_dim)
    most = max(1, min(MOST_QUERIES, spec.group, _REGISTERS // a_query))
    return blocks_for(spec.group, blocks_for(spec.group, most))


def _resident(spec: AttentionSpec, kv_dtype: str, parts: Parts) -> int:
    """Return `Grid.resident`: as many as do not make ptxas spill registers."""
    held = queries_of_block(spec, kv_dtype) * registers_of_query(kv_dtype, spec.head_dim)
    is_small = parts.positions == TILE and held <= _REGISTERS // 2 and kv_dtype != "float32"
    return 3 if is_small else 2


def attend_rows(function: CudaFunction, parts: Parts, tensors: CudaAttentionTensors) -> None:
    """Write one launch; two where several blocks must see a new key.

    Where there are several parts, the last block of them puts their outputs together.
    """
    spec = tensors.spec
    queries = queries_of_block(spec, tensors.keys.data.dtype)
    sets = blocks_for(spec.group, queries)
    units = spec.kv_heads * sets
    if sets > 1 and tensors.new_keys is not None:
        _extend(function, tensors)
    tickets = function.tickets(spec.rows * units) if parts.count > 1 else None
    resident = _resident(spec, tensors.keys.data.dtype, parts)
    with function.launch(grid=(units * parts.count, spec.rows), block=THREADS, resident=resident) as place:
        tokens, row = step_rows(function, spec), place.block_y
        part, unit = bind(place.block // units), bind(place.block % units)
        with when(row < tokens.count):
            position = bind(tokens.position(row))
            row_place = (bind(tokens.slot(row)), bind(unit // sets), position)
            first_seen = first_position(spec, position)
            first, stop = parts.span(part, first_seen, bind(position + 1))
            with when(first < stop):
                if sets == 1 and tensors.new_keys is not None:
                    with when(stop == position + 1):
                        extend_caches(tensors, row, row_place, place)
                taken = bind(unit % sets * queries), queries
                held = _read_queries(tensors, taken, row, row_place, place=place)
                _attend(
                    tensors,
                    queries=held,
                    of=(row, part),
                    row_place=row_place,
                    span=(first, stop),
                    parts=parts,
                    place=place,
                )
                if tickets is not None:
                    span = parts.seen(first_seen, position)
                    with when(last_block(tickets, row * units + unit, span[1] - span[0], place)):
                        heads = MergedHeads(
                            row, row_place[1] * spec.group + held.first, held.count, spec.group - held.first
                        )
                        merge_parts(tensors, heads, span, parts, place=place)


def _extend(function: CudaFunction, tensors: CudaAttentionTensors) -> None:
    """Write the launch that extends the caches: a block has a new key and value of a head."""
    spec = tensors.spec
    with function.launch(grid=(spec.kv_heads, spec.rows), block=64) as place:
        tokens, row = step_rows(function, spec), place.block_y
        with when(row < tokens.count):
            row_place = (bind(tokens.slot(row)), place.block, bind(tokens.position(row)))
            extend_caches(tensors, row, row_place, place)


def _read_queries(
    tensors: CudaAttentionTensors, span: tuple[Expr, int], row: Expr, row_place: tuple[Expr, Expr, Expr],
    *, place: ThreadIndex,
) -> HeldQueries:  # fmt: skip
    """Read the query heads of `span`, first and count, of those that share a head of keys, scaled and turned; past the
    last, the last again."""
    spec, (first, count), (_, kv_head, position) = tensors.spec, span, row_place
    memory = shared(count, spec.head_dim)
    with loop(0, blocks_for(count * spec.head_dim, THREADS)) as turn:
        index = bind(turn * THREADS + place.thread)
        with when(index < count * spec.head_dim):
            i, column = bind(index // spec.head_dim), bind(index % spec.head_dim)
            head = bind(kv_head * spec.group + minimum(first + i, spec.group - 1))
            element = head_element(
                tensors.q, row, start=head * spec.head_dim, dim=spec.head_dim, angles=tensors.angles, position=position
            )
            memory[i, column] = element(column) * spec.query_scale
    # Also for the new key and value: what a block has written it sees behind a barrier.
    barrier()
    return HeldQueries.of(memory, count, first, tensors.keys, place)


def _attend(
    tensors: CudaAttentionTensors, queries: HeldQueries, of: tuple[Expr, Expr], row_place: tuple[Expr, Expr, Expr],
    span: tuple[Expr, Expr], *, parts: Parts, place: ThreadIndex,
) -> None:  # fmt: skip
    """Attend to the positions from `span`[0] up to `span`[1], and give their outputs."""
    spec, (slot, kv_head, _), (first, stop), (row, part) = tensors.spec, row_place, span, of
    scores = shared(queries.count, TILE)
    weights = OnlineSoftmax.of(tensors, queries, row_place, first, place=place)
    mixture = Mixture.of(queries.count, tensors.values, place)
    tiles = blocks_for(parts.positions, TILE)
    with loop(0, 1 if tiles == 1 else bind((stop - first + (TILE - 1)) // TILE)) as number:
        begin = bind(first + number * TILE)
        tile = Tile((slot, kv_head), begin, bind(minimum(TILE, stop - begin)))
        write_scores(tensors.keys, queries, tile, scores, place)
        barrier()
        weights.update(scores, tile)
        barrier()
        mixture.add(tensors.values, tile, scores, weights.rescale)
        barrier()

    def give(i: Expr, column: Expr, value: Expr) -> None:
        with when(queries.first + i < spec.group):
            head = bind(kv_head * spec.group + queries.first + i)
            tensors.give(row, head, part, column, value=value, total=weights.totals[i])

    mixture.finish(give)
    if tensors.extremes is None:
        return

    def give_extremes(i: Expr, highest: Expr, total: Expr) -> None:
        with when(queries.first + i < spec.group):
            head = kv_head * spec.group + queries.first + i
            tensors.give_extremes(row, head, part, highest=highest, total=total)

    weights.each(give_extremes)
