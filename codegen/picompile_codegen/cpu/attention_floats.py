"""Scores and mixtures over a block of a cache in float16 or float32."""

from picompile_codegen.build import isa
from picompile_codegen.cpu.attention_work import Work
from picompile_codegen.cpu.tensor import Expr, bind, in_slices, local, loop
from picompile_codegen.cpu.vector import LANES, at, blocks, eight_totals, fma, load, splat, store


def products(work: Work, indices: list[Expr]) -> Expr:
    """A vector of q · k, for the keys `indices` of the block.

    All keys are read side by side: so many lines are asked for before the first is there.
    """
    keys, queries = work.block.span.keys, work.queries
    sums = local(LANES, LANES)
    for lane in range(LANES):
        sums[lane, at(0)] = splat(0.0)

    def add(c: Expr, valid: int) -> None:
        vectors = [bind(load(queries.q, work.row(i), c)) for i in range(queries.tile)]
        for k, index in enumerate(indices):
            key = bind(keys.raw(work.block.begin + index, c, valid))
            for i, vector in enumerate(vectors):
                lane = k * queries.tile + i
                sums[lane, at(0)] = fma(key, vector, sums[lane, at(0)])

    blocks(keys.cache.dim, add)
    return eight_totals([sums[lane, at(0)] for lane in range(LANES)])


def mix(work: Work, rescale: list[Expr]) -> None:
    """outputs[i] = outputs[i] · rescale[i] + Σ weight[i, j] · v_j over a block, a few vectors at a time."""
    queries, block = work.queries, work.block
    values = block.span.values
    # Outputs that are held in registers, over all queries; the other half is for weights and values.
    together = isa.current().registers // 2 // queries.tile * LANES

    def mix_columns(first: Expr, columns: int, is_first: bool) -> None:
        starts = range(0, columns, LANES)
        places = [(i, start, i * len(starts) + n) for i in range(queries.tile) for n, start in enumerate(starts)]
        mixed = local(len(places), LANES)
        for i, start, place in places:
            mixed[place, at(0)] = load(queries.outputs, work.row(i), first + start) * rescale[i]
        with loop(0, block.count) as index:
            if is_first:
                block.prefetch_following([index])
            weights = [bind(splat(work.scores[index * queries.tile + i])) for i in range(queries.tile)]
            read = {
                start: bind(values.raw(block.begin + index, first + start, min(LANES, columns - start)))
                for start in starts
            }
            for i, start, place in places:
                mixed[place, at(0)] = fma(weights[i], read[start], mixed[place, at(0)])
        for i, start, place in places:
            store(queries.outputs, work.row(i), first + start, value=mixed[place, at(0)])

    in_slices(values.cache.dim, together, mix_columns)
