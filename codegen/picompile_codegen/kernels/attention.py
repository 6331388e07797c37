"""Causal attention over the cached keys and values: which task takes which queries.

A task takes a few queries that share their keys: query heads of one group in decode, consecutive tokens of one head in
prefill. What it does with them is in `attention_task.py`.
"""

from picompile_codegen.kernels.attention_task import MAX_QUERIES, AttentionTensors, Query, attend
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.tensor import Expr, bind, maximum, minimum, parallel

# Enough tasks for the cores of a desktop machine. Queries that would make fewer are not taken together.
_MIN_TASKS = 16


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
    shape = (f"{heads}h{kv_heads}x{dims}", f"r{rows}", f"c{context}", scale, f"w{window}" if window else "")
    function = KernelFunction("attention", kv_dtype, *shape)
    with function:
        q = function.floats("q", rows, heads * head_dim)
        keys = function.argument("k_cache", kv_dtype, kv_heads, context, head_dim)
        values = function.argument("v_cache", kv_dtype, kv_heads, context, value_dim)
        y = function.floats("y", rows, heads * value_dim)
        tensors = AttentionTensors(q, keys, values, y, head_dim, value_dim, scale)
        tokens, position = function.tokens(rows), function.position()
        if rows == 1:
            _attend_one(tensors, heads, kv_heads, position, window)
        else:
            _attend_chunk(tensors, heads, kv_heads, tokens, position, window)
    return function.kernel()


def _query(row: Expr, head: Expr, position: Expr, window: int) -> Query:
    first = bind(maximum(position - (window - 1), 0)) if window else 0
    return Query(row, head, first, position)


def _attend_one(tensors: AttentionTensors, heads: int, kv_heads: int, position: Expr, window: int) -> None:
    """One token: a task takes query heads of one group."""
    together = _heads_together(heads, kv_heads)
    with parallel(heads // together) as task:
        first = bind(task * together)
        kv_head = bind(first // (heads // kv_heads))
        attend(tensors, kv_head, [_query(0, bind(first + i), position, window) for i in range(together)])


def _heads_together(heads: int, kv_heads: int) -> int:
    sizes = [size for size in (4, 2) if (heads // kv_heads) % size == 0 and heads // size >= _MIN_TASKS]
    return max(sizes, default=1)


def _attend_chunk(
    tensors: AttentionTensors, heads: int, kv_heads: int, tokens: Expr, position: Expr, window: int
) -> None:
    """A chunk: a task takes consecutive tokens of one head. The last one stands in for those past the end."""
    tiles = bind((tokens + (MAX_QUERIES - 1)) // MAX_QUERIES)
    with parallel(heads * tiles) as task:
        head = bind(task // tiles)
        tile = bind(task - head * tiles)
        rows = [bind(minimum(tile * MAX_QUERIES + i, tokens - 1)) for i in range(MAX_QUERIES)]
        kv_head = bind(head // (heads // kv_heads))
        attend(tensors, kv_head, [_query(row, head, bind(position + row), window) for row in rows])
