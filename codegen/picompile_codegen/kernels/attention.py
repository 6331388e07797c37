"""Causal attention over the cached keys and values: its arguments, and which task takes which queries.

What a task does is in `attention_task.py` for single tokens and in `attention_chunk.py` for chunks of a prompt.
"""

from picompile_codegen.kernels.attention_arguments import (
    Shape,
    Tensors,
    extend_cache,
    first_position,
    give,
    ready_queries,
)
from picompile_codegen.kernels.attention_chunk import ChunkQueries, attend_queries, queries_of_task
from picompile_codegen.kernels.attention_parts import attend_parts
from picompile_codegen.kernels.attention_task import attend, finish
from picompile_codegen.kernels.attention_work import Span
from picompile_codegen.kernels.cache import cache_argument
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.rotary import angles_argument
from picompile_codegen.kernels.step_rows import Mode, StepRows, mode_name, step_rows
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, minimum, parallel
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store, total


def attention(
    *, heads: int, kv_heads: int, head_dim: int, value_dim: int, context: int, rows: int, kv_dtype: str, scale: float,
    window: int, mode: Mode, sequences: int, extend: bool = False, turn: bool = False,
) -> Kernel:  # fmt: skip
    """softmax(q · kᵀ · scale) · v for each query head, over the cached positions that a token may see.

    A row at position p (see `step_rows`) sees positions max(0, p - window + 1) … p of its sequence, or all up to p when
    `window` is 0. q float32 [rows, heads · head_dim], k_cache and v_cache as in `cache.Cache`, of head_dim and
    value_dim → y float32 [rows, heads · value_dim].

    Not in chunks: with `extend`, k float32 [rows, kv_heads · head_dim] and v float32 [rows, kv_heads · value_dim] are
    first written to the caches; with `turn` as well, q and k are turned by cos and sin (see `rotary.rotary`) before.
    """
    shape = Shape(heads, kv_heads, head_dim, value_dim, context, rows, scale, window)
    dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}v{value_dim}"
    function = KernelFunction(
        "attention", kv_dtype, f"{heads}h{kv_heads}x{dims}", mode_name(mode, rows), f"c{context}", f"s{sequences}",
        scale, f"w{window}" if window else "", "extend" if extend else "", "turn" if turn else "",
    )  # fmt: skip
    with function:
        q = function.floats("q", rows, heads * head_dim)
        new_keys = function.floats("k", rows, kv_heads * head_dim) if extend else None
        new_values = function.floats("v", rows, kv_heads * value_dim) if extend else None
        angles = angles_argument(function, context, head_dim // 2) if turn else None
        keys = cache_argument(function, "k_cache", kv_dtype, sequences, kv_heads, context, head_dim)
        values = cache_argument(function, "v_cache", kv_dtype, sequences, kv_heads, context, value_dim)
        y = function.floats("y", rows, heads * value_dim)
        outputs = extremes = None
        if mode != "chunk" and shape.parts > 1:
            width = -(-value_dim // LANES) * LANES
            outputs = function.scratch("outputs", "float32", rows, heads, shape.parts, width)
            extremes = function.scratch("extremes", "float32", rows, heads, shape.parts, 2)
        tensors = Tensors(q, keys, values, y, new_keys, new_values, angles, outputs, extremes)
        tokens = step_rows(function, mode, rows, context, sequences)
        if mode == "chunk":
            _attend_chunk(shape, tensors, tokens)
        elif shape.parts > 1:
            attend_parts(shape, tensors, tokens)
        else:
            _attend_rows(shape, tensors, tokens)
    return function.kernel()


def _attend_rows(shape: Shape, tensors: Tensors, tokens: StepRows) -> None:
    """A task takes a head of keys and all that is asked of it at one row."""
    with parallel(tokens.count * shape.kv_heads) as task:
        row = bind(task // shape.kv_heads) if shape.rows > 1 else 0
        kv_head = bind(task - row * shape.kv_heads)
        position, slot = bind(tokens.position(row)), bind(tokens.slot(row))
        keys, values = tensors.keys.head(slot, kv_head), tensors.values.head(slot, kv_head)
        extend_cache(shape, tensors, row, position, keys, values)
        queries = ready_queries(shape, tensors, row, position, kv_head)
        first = first_position(shape, position)
        # The thread that is given this task is mostly given the next one, too.
        attend(Span(keys, values, first, bind(position + 1), kv_head + 1, first), queries)

        def emit(number: Expr, _: Expr, weights: Expr) -> None:
            factor = bind(splat(1.0) / splat(weights))
            head = bind(kv_head * shape.group + number)
            give(shape, tensors, row, head, lambda c: load(queries.outputs, number, c) * factor)

        finish(queries, emit)


def _attend_chunk(shape: Shape, tensors: Tensors, tokens: StepRows) -> None:
    """A task takes queries of consecutive tokens, of all heads that share a head of keys."""
    most = queries_of_task(shape.rows, shape.group)
    tiles = bind((tokens.count * shape.group + (most - 1)) // most)
    with parallel(shape.kv_heads * tiles) as task:
        kv_head = bind(task // tiles)
        begin = bind((task - kv_head * tiles) * most)
        count = bind(minimum(most, tokens.count * shape.group - begin))
        queries = ChunkQueries.of(count, most, shape.head_dim, shape.value_dim)
        with loop(0, count) as i:
            row, head = _place(shape, kv_head, begin + i)
            position, start = bind(tokens.position(row)), bind(head * shape.head_dim)
            queries.firsts[i], queries.lasts[i] = first_position(shape, position), position
            _copy(shape.head_dim, tensors.q, row, start, queries.q, i, splat(shape.scale))
        slot = tokens.slot(0)
        attend_queries(queries, tensors.keys.head(slot, kv_head), tensors.values.head(slot, kv_head), shape.group)
        with loop(0, count) as i:
            row, head = _place(shape, kv_head, begin + i)
            factor = bind(splat(1.0) / splat(total(queries.sums[i, at(0)])))
            give(shape, tensors, row, head, lambda c: load(queries.outputs, i, c) * factor)


def _place(shape: Shape, kv_head: Expr, query: Expr) -> tuple[Expr, Expr]:
    """Row and head of query `query` of those that a chunk asks of a head of keys."""
    row = bind(query // shape.group)
    return row, bind(kv_head * shape.group + query - row * shape.group)


def _copy(width: int, x: Tensor, row: Expr, start: Expr, to: Tensor, to_row: Expr, factor: Expr) -> None:
    """to[to_row] = x[row, start …] · factor."""
    blocks(width, lambda c, n: store(to, to_row, c, value=load(x, row, start + c, valid=n) * factor, valid=n))
