"""Attention of 1, 2 or 4 queries to the keys and values of one head.

The keys are gone through a block at a time, with a running maximum, sum and output for each query (arXiv 1805.02867):
no memory is needed that grows with the context. The scores of a block lie key by key, and for each key query by query.
So one vector holds the scores of 8, 4 or 2 keys, and the softmax treats all queries at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from picompile_codegen.kernels.math import exp
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, maximum, minimum, select
from picompile_codegen.kernels.vector import LANES, at, blocks, eight_totals, fma, load, splat, store

MAX_QUERIES = 4
_KEY_BLOCK = 64
# Vectors of outputs that are held in registers, over all queries.
_OUTPUT_VECTORS = 8
# Stands for minus infinity, of which differences would not be numbers.
_LOWEST = -1e30


@dataclass(frozen=True)
class Query:
    """One query: where it is in q (and its output in y), and the first and last position that it sees."""

    row: Expr
    head: Expr
    first: Expr
    last: Expr


@dataclass(frozen=True)
class AttentionTensors:
    """Tensors and widths of an attention kernel (see `attention.attention`)."""

    q: Tensor
    keys: Tensor
    values: Tensor
    y: Tensor
    head_dim: int
    value_dim: int
    scale: float


@dataclass(frozen=True)
class _Task:
    """The queries of a task and what is kept from block to block.

    `maxima` and `sums` have the lanes of a vector of scores: lanes of one query have the same maximum, and sums that
    are yet to be added up. `outputs` [queries, value_dim, padded] are yet to be divided by those.
    """

    tensors: AttentionTensors
    kv_head: Expr
    queries: list[Query]
    scores: Tensor
    maxima: Tensor
    sums: Tensor
    outputs: Tensor

    @property
    def keys_a_vector(self) -> int:
        """Keys whose scores share a vector."""
        return LANES // len(self.queries)

    def query_lanes(self, values: list[Expr]) -> Expr:
        """A vector with each query's value in the lanes of its scores."""
        scalars = [tirx.IntImm("int32", value) if isinstance(value, int) else value for value in values]
        lanes = [scalars[lane % len(scalars)] for lane in range(LANES)]
        return bind(tirx.Shuffle(lanes, list(range(LANES))))


@dataclass(frozen=True)
class _Block:
    """The positions `begin` … `end` - 1 of a block of keys, whose vectors of scores are counted from `origin`."""

    origin: Expr
    begin: Expr
    end: Expr

    def vectors(self, keys: int) -> Any:
        """Loops over the vectors of scores, of `keys` keys each."""
        return loop((self.begin - self.origin) // keys, (self.end - self.origin + (keys - 1)) // keys)


def attend(tensors: AttentionTensors, kv_head: Expr, queries: list[Query]) -> None:
    """y = softmax(q · kᵀ · scale) · v for `queries`, which come in the order of their positions."""
    width = -(-tensors.value_dim // LANES) * LANES
    scores, outputs = local(_KEY_BLOCK * len(queries)), local(len(queries), width)
    task = _Task(tensors, kv_head, queries, scores, local(LANES), local(LANES), outputs)
    task.maxima[at(0)] = splat(_LOWEST)
    task.sums[at(0)] = splat(0.0)
    _each_output(task, lambda i, c: store(outputs, i, c, value=splat(0.0)))

    first, last = queries[0].first, queries[-1].last
    with loop(first // _KEY_BLOCK, last // _KEY_BLOCK + 1) as index:
        origin = bind(index * _KEY_BLOCK)
        block = _Block(origin, bind(maximum(origin, first)), bind(minimum(origin + _KEY_BLOCK, last + 1)))
        _score(task, block)
        _soften(task, block)
        _mix(task, block)
    _finish(task)


def _each_output(task: _Task, body: Callable[[int, Expr], None]) -> None:
    """Runs `body(query, column)` for each vector of `outputs`."""
    for i in range(len(task.queries)):
        blocks(-(-task.tensors.value_dim // LANES) * LANES, lambda c, _, i=i: body(i, c))  # type: ignore[misc]


def _score(task: _Task, block: _Block) -> None:
    """The scores of a block: q · k · scale, or _LOWEST where a query does not see a key."""
    firsts = task.query_lanes([query.first for query in task.queries])
    lasts = task.query_lanes([query.last for query in task.queries])
    offsets = [tirx.IntImm("int32", lane // len(task.queries)) for lane in range(LANES)]
    with block.vectors(task.keys_a_vector) as index:
        start = bind(block.origin + index * task.keys_a_vector)
        products = _products(task, start, block.end - 1)
        positions = bind(tirx.Broadcast(start, LANES) + tirx.Shuffle(offsets, list(range(LANES))))
        scores = select(positions >= firsts, products * splat(task.tensors.scale), splat(_LOWEST))
        task.scores[at(index * LANES)] = select(positions <= lasts, scores, splat(_LOWEST))


def _products(task: _Task, start: Expr, last: Expr) -> Expr:
    """A vector of q · k, for keys from position `start` on. Past `last` its key is taken; the result is not used."""
    positions = [bind(minimum(start + i, last)) for i in range(task.keys_a_vector)]
    sums = local(LANES, LANES)
    for lane in range(LANES):
        sums[lane, at(0)] = splat(0.0)

    def add(c: Expr, valid: int) -> None:
        queries = [
            bind(load(task.tensors.q, query.row, query.head * task.tensors.head_dim + c, valid=valid))
            for query in task.queries
        ]
        for k, position in enumerate(positions):
            key = bind(load(task.tensors.keys, task.kv_head, position, c, valid=valid))
            for i, query in enumerate(queries):
                lane = k * len(queries) + i
                sums[lane, at(0)] = fma(key, query, sums[lane, at(0)])

    blocks(task.tensors.head_dim, add)
    return eight_totals([sums[lane, at(0)] for lane in range(LANES)])


def _soften(task: _Task, block: _Block) -> None:
    """Turns a block's scores into weights relative to the new maxima, to which all that came before is rescaled."""
    highest = local(LANES)
    highest[at(0)] = task.maxima[at(0)]
    with block.vectors(task.keys_a_vector) as index:
        highest[at(0)] = maximum(highest[at(0)], task.scores[at(index * LANES)])
    maxima = _combine_lanes(highest[at(0)], len(task.queries), maximum)
    rescale = exp(task.maxima[at(0)] - maxima)
    task.maxima[at(0)] = maxima
    task.sums[at(0)] = task.sums[at(0)] * rescale
    with block.vectors(task.keys_a_vector) as index:
        score = bind(task.scores[at(index * LANES)])
        # Not merely a small number: a query that has seen nothing yet has _LOWEST for its maximum.
        weight = bind(select(score > splat(_LOWEST), exp(score - maxima), splat(0.0)))
        task.scores[at(index * LANES)] = weight
        task.sums[at(0)] = task.sums[at(0)] + weight
    factors = [bind(splat(tirx.Shuffle([rescale], [i]))) for i in range(len(task.queries))]
    _each_output(task, lambda i, c: store(task.outputs, i, c, value=load(task.outputs, i, c) * factors[i]))


def _combine_lanes(values: Expr, queries: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """The lanes of each query combined, in all of them."""
    distance = queries
    while distance < LANES:
        values = bind(values)
        values = combine(values, tirx.Shuffle([values], [lane ^ distance for lane in range(LANES)]))
        distance *= 2
    return bind(values)


def _mix(task: _Task, block: _Block) -> None:
    """outputs[i] += Σ weight[i, j] · v_j over a block's keys, a few vectors at a time."""
    count = len(task.queries)
    width = task.tensors.value_dim
    together = _OUTPUT_VECTORS // count * LANES

    def mix_columns(first: Expr, columns: int) -> None:
        with loop(block.begin, block.end) as position:
            weights = [bind(splat(task.scores[(position - block.origin) * count + i])) for i in range(count)]
            for start in range(0, columns, LANES):
                c = first + start
                valid = min(LANES, columns - start)
                value = bind(load(task.tensors.values, task.kv_head, position, c, valid=valid))
                for i, weight in enumerate(weights):
                    task.outputs[i, at(c)] = fma(weight, value, task.outputs[i, at(c)])

    for first in range(0, width, together):
        mix_columns(first, min(together, width - first))


def _finish(task: _Task) -> None:
    """y = outputs / sums."""
    sums = _combine_lanes(task.sums[at(0)], len(task.queries), lambda a, b: a + b)
    factors = bind(splat(1.0) / sums)
    for i, query in enumerate(task.queries):
        _finish_query(task, i, query, bind(splat(tirx.Shuffle([factors], [i]))))


def _finish_query(task: _Task, i: int, query: Query, factor: Expr) -> None:
    column = bind(query.head * task.tensors.value_dim)

    def finish(c: Expr, valid: int) -> None:
        store(task.tensors.y, query.row, column + c, value=load(task.outputs, i, c) * factor, valid=valid)

    blocks(task.tensors.value_dim, finish)
