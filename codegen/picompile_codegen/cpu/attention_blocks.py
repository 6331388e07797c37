"""Scores and mixtures over a block of cached positions: in float32, and in integers where the cache is q8.

For q8, queries become 16-bit integers with one scale each; so do the weights of the softmax times the scales of values,
with one scale for each query and block. Against float32 arithmetic on the same cache the result is off by 2^-16 of the
largest query element and weight. Integers take half as long; conversion to float32 would not keep up with memory.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.attention_work import Block, PositionSpan, Queries, Work, lanes_below, query_lanes
from picompile_codegen.cpu.cache import CachedHead
from picompile_codegen.cpu.quantized import LARGEST_WORD, dot_pairs, in_order, interleave, splat_pair, to_words, zeros
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, in_slices, local, loop, maximum, minimum, select
from picompile_codegen.cpu.vector import (
    LANES,
    add_halves,
    at,
    blocks,
    eight_totals,
    fma,
    highest,
    load,
    splat,
    to_floats,
    zero_vector,
    zero_vectors,
)
from picompile_passes.formats import GROUP

# The arithmetic for caches in float16 or float32.


def _lanes(dim: int, multiple: int = 1) -> int:
    """Return the lanes of vectors for rows of `dim` elements, `multiple` elements a lane: the most that are all used.

    Fewer instructions leave more time to ask for what is to be read next, also where memory is what is waited for.
    """
    wide = isa.current().wide_lanes
    return wide if dim % (wide * multiple) == 0 else LANES


def _totals(sums: KernelTensor, lanes: int) -> Expr:
    """The sums of the lanes of each of eight vectors: eight lanes."""
    values = [sums[lane, at(0, lanes)] for lane in range(LANES)]
    while lanes > LANES:
        values, lanes = [add_halves(value, lanes) for value in values], lanes // 2
    return eight_totals(values)


def float_products(work: Work, indices: list[Expr]) -> Expr:
    """Return a vector of q · k for the keys `indices` of the block.

    All keys are read side by side: so many lines are asked for before the first is there.
    """
    keys, queries = work.block.span.keys, work.queries
    lanes = _lanes(keys.cache.dim)
    sums = zero_vectors(LANES, lanes)

    def add(c: Expr, valid: int) -> None:
        vectors = [bind(queries.q[work.row(i), at(c, lanes)]) for i in range(queries.tile)]
        for k, index in enumerate(indices):
            key = bind(keys.raw(work.block.begin + index, c, valid, lanes))
            for i, vector in enumerate(vectors):
                lane = k * queries.tile + i
                sums[lane, at(0, lanes)] = fma(key, vector, sums[lane, at(0, lanes)], lanes)

    blocks(keys.cache.dim, add, lanes=lanes)
    return _totals(sums, lanes)


# A multiply-add takes four cycles, and two can start in each.
_CHAINS = 8


def float_mix(work: Work, rescale: list[Expr]) -> None:
    """outputs[i] = outputs[i] · rescale[i] + Σ weight[i, j] · v_j over a block, a few vectors at a time.

    Where these are less than `_CHAINS`, every second value has sums of its own.
    """
    queries, block = work.queries, work.block
    values = block.span.values
    lanes = _lanes(values.cache.dim)
    # Outputs that are held in registers, over all queries; the other half is for weights and values.
    together = isa.current().registers // 2 // queries.tile * lanes

    def mix_columns(first: Expr, columns: int, is_first: bool) -> None:
        starts = range(0, columns, lanes)
        places = [(i, start, i * len(starts) + n) for i in range(queries.tile) for n, start in enumerate(starts)]
        chains = 2 if lanes > LANES and len(places) < _CHAINS else 1
        mixed = zero_vectors(chains * len(places), lanes)
        for i, start, place in places:
            before = bind(queries.outputs[work.row(i), at(first + start, lanes)])
            mixed[place, at(0, lanes)] = before * splat(rescale[i], lanes)

        def add(index: Expr, chain: int) -> None:
            if is_first:
                block.prefetch_following([index])
            weights = [bind(splat(work.scores[index * queries.tile + i], lanes)) for i in range(queries.tile)]
            read = {
                start: bind(values.raw(block.begin + index, first + start, min(lanes, columns - start), lanes))
                for start in starts
            }
            for i, start, place in places:
                at_sum = (chain * len(places) + place, at(0, lanes))
                mixed[at_sum] = fma(weights[i], read[start], mixed[at_sum], lanes)

        full = bind(block.count // chains) if chains > 1 else block.count
        with loop(0, full) as step:
            for chain in range(chains):
                add(bind(step * chains + chain), chain)
        if chains > 1:
            with loop(full * chains, block.count) as index:
                add(index, 0)
        for i, start, place in places:
            parts = [mixed[chain * len(places) + place, at(0, lanes)] for chain in range(chains)]
            queries.outputs[work.row(i), at(first + start, lanes)] = sum(parts[1:], parts[0])

    in_slices(values.cache.dim, together, mix_columns)


# The arithmetic for caches in q8.


@dataclass(frozen=True)
class ByteQueries:
    """Queries as integers: `words` int16 [padded count, head_dim padded to 32], `scales` [tiles, LANES] in the lanes of
    a vector of scores."""

    words: KernelTensor
    scales: KernelTensor

    @classmethod
    def of(cls, queries: Queries, head_dim: int) -> "ByteQueries":
        """Return `queries.q` rounded to integers."""
        width = -(-head_dim // GROUP) * GROUP
        words = local(queries.padded, width, dtype="int16")
        largest, scales = local(queries.padded), local(queries.tiles, LANES)
        with loop(0, queries.padded) as i:
            largest[i] = _largest(queries.q, i, head_dim)
            inverse = bind(splat(_inverse(largest[i])))
            for c in range(head_dim // LANES * LANES, width, LANES):
                words[i, at(c)] = tirx.Broadcast(tirx.IntImm("int16", 0), LANES)

            def keep(c: Expr, _: int) -> None:
                words[i, at(c)] = to_words(tirx.nearbyint(load(queries.q, i, c) * inverse))

            blocks(head_dim, keep)

        def one_tile(tile: Expr) -> None:
            of_tile = [bind(largest[tile * queries.tile + i]) for i in range(queries.tile)]
            scales[tile, at(0)] = query_lanes(of_tile) * splat(1.0 / LARGEST_WORD)

        queries.each_tile(one_tile)
        return cls(words, scales)


def _largest(q: KernelTensor, i: Expr, head_dim: int) -> Expr:
    """Return the largest magnitude of a query, whose padding is 0."""
    found = zero_vector()

    def look(c: Expr, _: int) -> None:
        found[at(0)] = maximum(found[at(0)], tirx.abs(load(q, i, c)))

    blocks(head_dim, look)
    return highest(found[at(0)])


def _inverse(largest: Expr) -> Expr:
    """Return the factor that makes `largest` the largest word; 0 if all are 0."""
    # A number so small that its inverse is none counts for nothing.
    return bind(select(largest > 1e-30, LARGEST_WORD / largest, 0.0))


@dataclass(frozen=True)
class BlockScales:
    """Scales of the rows of a block as float32: [groups, positions]."""

    keys: KernelTensor
    values: KernelTensor

    @classmethod
    def of(cls, span: PositionSpan) -> "BlockScales":
        """Return memory for the scales of the blocks of `span`."""
        return cls(local(span.keys.groups, span.block), local(span.values.groups, span.block))

    def read(self, block: Block) -> None:
        """Read the scales of a block, eight positions at a time and none past its end."""
        _read_scales(block.span.keys, block, self.keys)
        _read_scales(block.span.values, block, self.values)
        block.prefetch_following_scales()


def _read_scales(head: CachedHead, block: Block, scales: KernelTensor) -> None:
    with loop(0, block.count // LANES) as index:
        for group, value in enumerate(head.scales_of_eight(block.begin + index * LANES)):
            scales[group, at(index * LANES)] = value
    with loop(block.count // LANES * LANES, block.count) as index, loop(0, head.groups) as group:
        scales[group, index] = head.scale(block.begin + index, group)


def byte_products(work: Work, indices: list[Expr], queries: ByteQueries, scales: BlockScales) -> Expr:
    """Return a vector of q · k for the keys `indices` of the block."""
    keys, tile = work.block.span.keys, work.queries.tile
    lanes = _lanes(keys.cache.dim, 2)
    sums, words = zero_vectors(LANES, lanes), 2 * lanes

    def add_group(group: Expr, size: int) -> None:
        starts = range(0, size, words)
        vectors = [
            [bind(queries.words[work.row(i), at(group * GROUP + start, words)]) for start in starts]
            for i in range(tile)
        ]
        for k, index in enumerate(indices):
            position = work.block.begin + index
            parts = [bind(keys.bytes(position, group * GROUP + start, size - start, words)) for start in starts]
            scale = bind(splat(scales.keys[group, index], lanes))
            for i, vector in enumerate(vectors):
                pairs = [dot_pairs(part, of_query, lanes) for part, of_query in zip(parts, vector, strict=True)]
                lane = k * tile + i
                both = to_floats(sum(pairs[1:], pairs[0]), lanes)
                sums[lane, at(0, lanes)] = fma(both, scale, sums[lane, at(0, lanes)], lanes)

    full, rest = divmod(keys.cache.dim, GROUP)
    if full:
        with loop(0, full) as group:
            add_group(group, GROUP)
    if rest:
        add_group(full, rest)
    return _totals(sums, lanes) * queries.scales[work.tile, at(0)]


def byte_mix(work: Work, rescale: list[Expr], scales: BlockScales) -> None:
    """outputs[i] = outputs[i] · rescale[i] + Σ weight[i, j] · v_j over a block, two values at a time."""
    queries, block = work.queries, work.block
    values = block.span.values
    lanes = _lanes(values.cache.dim, 2)
    weights_of, factors = _weights(work, scales)
    together = isa.current().registers // 2 // queries.tile * lanes

    def mix_columns(first: Expr, columns: int, is_first: bool) -> None:
        starts = range(0, columns, 2 * lanes)
        places = [(i, start, 2 * (i * len(starts) + n)) for i in range(queries.tile) for n, start in enumerate(starts)]
        sums = local(2 * len(places), lanes, dtype="int32")
        for place in range(2 * len(places)):
            sums[place, at(0, lanes)] = zeros(lanes)
        with loop(0, (block.count + 1) // 2) as pair:
            a = bind(pair * 2)
            b = bind(minimum(a + 1, block.count - 1))
            if is_first:
                block.prefetch_following([a, a + 1])
            read = {}
            for start in starts:
                first_row, second_row = (
                    bind(values.bytes(block.begin + index, first + start, columns - start, 2 * lanes))
                    for index in (a, b)
                )
                read[start] = interleave(first_row, second_row, lanes)
            for i, start, place in places:
                weights = splat_pair(weights_of, i, (first + start) // GROUP, a, lanes=lanes)
                for half in range(2):
                    at_sum = (place + half, at(0, lanes))
                    sums[at_sum] = sums[at_sum] + dot_pairs(read[start][half], weights, lanes)
        for i, start, place in places:
            low, high = (bind(to_floats(sums[place + half, at(0, lanes)], lanes)) for half in range(2))
            for half, mixed in enumerate(in_order(low, high, lanes)):
                if start + half * lanes < columns:
                    outputs = (work.row(i), at(first + start + half * lanes, lanes))
                    before = bind(queries.outputs[outputs] * splat(rescale[i], lanes))
                    queries.outputs[outputs] = fma(mixed, splat(factors[i], lanes), before, lanes)

    in_slices(values.cache.dim, together, mix_columns)


def _weights(work: Work, scales: BlockScales) -> tuple[KernelTensor, list[Expr]]:
    """Weights times scales as int16 [queries, groups, positions], zero past the block, and what they are to be
    multiplied by."""
    queries, block, groups = work.queries, work.block, work.block.span.values.groups
    floats = local(queries.tile, groups, block.span.block)
    words = local(queries.tile, groups, block.span.block, dtype="int16")
    largest = zero_vectors(queries.tile)
    with loop(0, (block.count + (LANES - 1)) // LANES) as index:
        start = bind(index * LANES)
        exists = lanes_below(block.count - start)
        read = [bind(work.scores[at((start * queries.tile) + n * LANES)]) for n in range(queries.tile)]
        for i in range(queries.tile):
            of_query = bind(tirx.Shuffle(read, [lane * queries.tile + i for lane in range(LANES)]))
            for group in range(groups):
                weight = bind(select(exists, of_query * scales.values[group, at(start)], splat(0.0)))
                floats[i, group, at(start)] = weight
                # Scales of q4 may be below zero.
                largest[i, at(0)] = maximum(largest[i, at(0)], tirx.abs(weight))
    found = [highest(largest[i, at(0)]) for i in range(queries.tile)]
    inverses = [bind(splat(_inverse(value))) for value in found]
    with loop(0, (block.count + (LANES - 1)) // LANES) as index:
        for i in range(queries.tile):
            for group in range(groups):
                near = tirx.nearbyint(floats[i, group, at(index * LANES)] * inverses[i])
                words[i, group, at(index * LANES)] = to_words(near)
    return words, [bind(value * (1.0 / LARGEST_WORD)) for value in found]
