"""Causal attention over the cached keys and values.

A task takes a few queries that share their keys: query heads of one group in decode, consecutive tokens of one head in
prefill. It goes through the keys a block at a time, keeping a running maximum, sum and output for each query (arXiv
1805.02867), so it needs no memory that grows with the context.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.math import exp
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, maximum, minimum, parallel, select
from picompile_codegen.kernels.vector import LANES, at, blocks, fma, fold, load, splat, store, total

_KEY_BLOCK = 64
_QUERIES = 4
# Enough tasks for the cores of a desktop machine; below that, queries are not bundled.
_MIN_TASKS = 16
# Stands for minus infinity, of which differences would not be numbers.
_LOWEST = -1e30


@dataclass(frozen=True)
class _Query:
    """One query: row and first column in q (and of its output, in y), and the first and last key that it sees."""

    row: Expr
    head: Expr
    first: Expr
    last: Expr


@dataclass(frozen=True)
class _Attention:
    """The tensors and shapes of a kernel."""

    q: Tensor
    keys: Tensor
    values: Tensor
    y: Tensor
    head_dim: int
    value_dim: int
    scale: float


def attention(
    *, heads: int, kv_heads: int, head_dim: int, value_dim: int, context: int, rows: int, kv_dtype: str, scale: float,
    window: int,
) -> Kernel:  # fmt: skip
    """softmax(q · kᵀ · scale) · v for each query head, over the cached positions that a token may see.

    Token t of the step has position p = step[1] + t and sees positions max(0, p - window + 1) … p, or all up to p when
    `window` is 0. q float32 [rows, heads · head_dim], k_cache kv_dtype [kv_heads, context, head_dim], v_cache kv_dtype
    [kv_heads, context, value_dim] → y float32 [rows, heads · value_dim].
    """
    dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}v{value_dim}"
    function = KernelFunction(
        "attention", kv_dtype, f"{heads}h{kv_heads}x{dims}", f"r{rows}", f"c{context}", scale, f"w{window}"
    )
    with function:
        q = function.floats("q", rows, heads * head_dim)
        keys = function.argument("k_cache", kv_dtype, kv_heads, context, head_dim)
        values = function.argument("v_cache", kv_dtype, kv_heads, context, value_dim)
        y = function.floats("y", rows, heads * value_dim)
        tensors = _Attention(q, keys, values, y, head_dim, value_dim, scale)
        tokens, position = function.tokens(rows), function.position()
        if rows == 1:
            _attend_one(tensors, heads, kv_heads, position, window)
        else:
            _attend_chunk(tensors, heads, kv_heads, tokens, position, window)
    return function.kernel()


def _query(row: Expr, head: Expr, position: Expr, window: int) -> _Query:
    first = bind(maximum(position - (window - 1), 0)) if window else 0
    return _Query(row, head, first, position)


def _attend_one(tensors: _Attention, heads: int, kv_heads: int, position: Expr, window: int) -> None:
    """One token: a task takes query heads of one group."""
    together = _heads_together(heads, kv_heads)
    with parallel(heads // together) as task:
        first = bind(task * together)
        kv_head = bind(tirx.floordiv(first, heads // kv_heads))
        _attend(tensors, kv_head, [_query(0, bind(first + i), position, window) for i in range(together)])


def _heads_together(heads: int, kv_heads: int) -> int:
    group = heads // kv_heads
    sizes = [size for size in range(1, _QUERIES + 1) if group % size == 0]
    return max([size for size in sizes if heads // size >= _MIN_TASKS], default=1)


def _attend_chunk(
    tensors: _Attention, heads: int, kv_heads: int, tokens: Expr, position: Expr, window: int
) -> None:
    """A chunk: a task takes consecutive tokens of one head. The last one stands in for those past the end."""
    tiles = bind(tirx.floordiv(tokens + (_QUERIES - 1), _QUERIES))
    with parallel(heads * tiles) as task:
        head = bind(tirx.floordiv(task, tiles))
        tile = bind(task - head * tiles)
        rows = [bind(minimum(tile * _QUERIES + i, tokens - 1)) for i in range(_QUERIES)]
        kv_head = bind(tirx.floordiv(head, heads // kv_heads))
        _attend(tensors, kv_head, [_query(row, head, bind(position + row), window) for row in rows])


def _attend(tensors: _Attention, kv_head: Expr, queries: list[_Query]) -> None:
    count = len(queries)
    scores = local(count, _KEY_BLOCK)
    outputs = local(count, _padded(tensors.value_dim))
    maxima, sums = local(count), local(count)
    for i in range(count):
        maxima[i] = _LOWEST
        sums[i] = 0.0
        blocks(_padded(tensors.value_dim), lambda c, _, i=i: store(outputs, i, c, value=splat(0.0)))  # type: ignore[misc]

    # Queries come in the order of their positions.
    first, last = queries[0].first, queries[-1].last
    first_block = tirx.floordiv(first, _KEY_BLOCK) if not isinstance(first, int) else 0
    with loop(first_block, tirx.floordiv(last, _KEY_BLOCK) + 1) as block:
        start = bind(block * _KEY_BLOCK)
        begin, end = bind(maximum(start, first)), bind(minimum(start + _KEY_BLOCK, last + 1))
        _score(tensors, kv_head, queries, start, begin, end, scores)
        for i in range(count):
            _soften(scores, maxima, sums, outputs, i, tensors.value_dim)
        _mix(tensors, kv_head, count, start, begin, end, scores, outputs)
    for i, query in enumerate(queries):
        inverse = bind(splat(bind(tirx.FloatImm("float32", 1.0) / sums[i])))

        def finish(c: Expr, valid: int, i: int = i, query: _Query = query, inverse: Expr = inverse) -> None:
            value = outputs[i, at(c)] * inverse
            store(tensors.y, query.row, query.head * tensors.value_dim + c, value=value, valid=valid)

        blocks(tensors.value_dim, finish)


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _score(
    tensors: _Attention, kv_head: Expr, queries: list[_Query], start: Expr, begin: Expr, end: Expr, scores: Tensor
) -> None:
    """scores[i, j - start] = q_i · k_j · scale, or _LOWEST where query i does not see key j."""
    for i in range(len(queries)):
        blocks(_KEY_BLOCK, lambda c, _, i=i: store(scores, i, c, value=splat(_LOWEST)))  # type: ignore[misc]
    with loop(begin, end) as j:
        products = local(len(queries), LANES)
        for i in range(len(queries)):
            products[i, at(0)] = splat(0.0)

        def add(c: Expr, valid: int) -> None:
            key = bind(load(tensors.keys, kv_head, j, c, valid=valid))
            for i, query in enumerate(queries):
                value = load(tensors.q, query.row, query.head * tensors.head_dim + c, valid=valid)
                products[i, at(0)] = fma(key, value, products[i, at(0)])

        blocks(tensors.head_dim, add)
        for i, query in enumerate(queries):
            score = total(products[i, at(0)]) * tirx.FloatImm("float32", tensors.scale)
            is_visible = tirx.all(j >= query.first, j <= query.last)
            scores[i, j - start] = select(is_visible, score, tirx.FloatImm("float32", _LOWEST))


def _soften(scores: Tensor, maxima: Tensor, sums: Tensor, outputs: Tensor, i: int, value_dim: int) -> None:
    """Turns a block of scores into weights relative to the running maximum, and rescales what came before."""
    highest = local(LANES)
    highest[at(0)] = splat(maxima[i])
    blocks(_KEY_BLOCK, lambda c, _: store(highest, 0, value=maximum(highest[at(0)], scores[i, at(c)])))
    new_maximum = fold(highest[at(0)], maximum)
    shift = bind(splat(new_maximum))
    rescale = exp(splat(maxima[i]) - shift)
    added = local(LANES)
    added[at(0)] = splat(0.0)

    def weigh(c: Expr, _: int) -> None:
        score = bind(scores[i, at(c)])
        weight = bind(select(score > splat(_LOWEST), exp(score - shift), splat(0.0)))
        scores[i, at(c)] = weight
        added[at(0)] = added[at(0)] + weight

    blocks(_KEY_BLOCK, weigh)
    sums[i] = sums[i] * tirx.Shuffle([rescale], [0]) + total(added[at(0)])
    maxima[i] = new_maximum
    blocks(_padded(value_dim), lambda c, _: store(outputs, i, c, value=outputs[i, at(c)] * rescale))


def _mix(
    tensors: _Attention, kv_head: Expr, count: int, start: Expr, begin: Expr, end: Expr, scores: Tensor, outputs: Tensor
) -> None:
    """outputs[i] += Σ weight[i, j] · v_j."""

    def one_vector(c: Expr, valid: int) -> None:
        with loop(begin, end) as j:
            value = bind(load(tensors.values, kv_head, j, c, valid=valid))
            for i in range(count):
                outputs[i, at(c)] = fma(splat(scores[i, j - start]), value, outputs[i, at(c)])

    blocks(tensors.value_dim, one_vector)
