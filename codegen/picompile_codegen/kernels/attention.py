"""Causal attention over the cached keys and values: its arguments, and which task takes which queries.

What a task does is in `attention_task.py` for single tokens and in `attention_chunk.py` for chunks of a prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.kernels.attention_chunk import ChunkQueries, attend_queries, queries_of_task
from picompile_codegen.kernels.attention_task import attend, finish
from picompile_codegen.kernels.attention_work import Queries, Span
from picompile_codegen.kernels.cache import Cache, CachedHead, cache_argument
from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.math import exp_of_negative
from picompile_codegen.kernels.rotary import Angles, angles_argument
from picompile_codegen.kernels.step_rows import Mode, StepRows, mode_name, step_rows
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, maximum, minimum, parallel, when
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store, total

# Enough heads of keys for the cores of a desktop machine. Where there are fewer, tasks share the positions as well.
_ENOUGH_HEADS = 16
# Positions of a task then. A multiple of this for long contexts, of which there are no more parts than _MOST_PARTS.
_PART_POSITIONS = 512
_MOST_PARTS = 32


@dataclass(frozen=True)
class Shape:
    """What an attention kernel is made for (see `attention`)."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: int
    rows: int
    scale: float
    window: int

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def part_positions(self) -> int:
        """Positions that a task goes through at most. Not a matter of threads: results must not depend on these."""
        if self.kv_heads >= _ENOUGH_HEADS:
            return self.context
        return -(-self.context // (_MOST_PARTS * _PART_POSITIONS)) * _PART_POSITIONS

    @property
    def parts(self) -> int:
        """Parts of the context."""
        return -(-self.context // self.part_positions)


@dataclass(frozen=True)
class Tensors:
    """Arguments of an attention kernel (see `attention`). `partial` are what parts come to: for each row, head and
    part `outputs` [value_dim, padded], and in `extremes` the maximum of the scores and the sum of the weights."""

    q: Tensor
    keys: Cache
    values: Cache
    y: Tensor
    new_keys: Tensor | None
    new_values: Tensor | None
    angles: Angles | None
    outputs: Tensor | None
    extremes: Tensor | None


def attention(
    *, heads: int, kv_heads: int, head_dim: int, value_dim: int, context: int, rows: int, kv_dtype: str, scale: float,
    window: int, mode: Mode, sequences: int, extend: bool = False, turn: bool = False,
) -> Kernel:  # fmt: skip
    """softmax(q · kᵀ · scale) · v for each query head, over the cached positions that a token may see.

    A row at position p (see `step_rows`) sees positions max(0, p - window + 1) … p of its sequence, or all up to p when
    `window` is 0. q float32 [rows, heads · head_dim], k_cache and v_cache as in `cache.Cache`, of head_dim and value_dim
    → y float32 [rows, heads · value_dim].

    Not in chunks: with `extend`, k float32 [rows, kv_heads · head_dim] and v float32 [rows, kv_heads · value_dim] are
    first written to the caches; with `turn` as well, q and k are turned by cos and sin (see `rotary.rotary`) before.
    """
    shape = Shape(heads, kv_heads, head_dim, value_dim, context, rows, scale, window)
    dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}v{value_dim}"
    function = KernelFunction(
        "attention", kv_dtype, f"{heads}h{kv_heads}x{dims}", mode_name(mode, rows), f"c{context}", f"s{sequences}", scale,
        f"w{window}" if window else "", "extend" if extend else "", "turn" if turn else "",
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
        tokens = step_rows(function, mode, rows, sequences)
        if mode == "chunk":
            _attend_chunk(shape, tensors, tokens)
        elif shape.parts > 1:
            _attend_parts(shape, tensors, tokens)
        else:
            _attend_rows(shape, tensors, tokens)
    return function.kernel()


def _first_position(shape: Shape, position: Expr) -> Expr:
    return bind(maximum(position - (shape.window - 1), 0)) if shape.window else 0


def _attend_rows(shape: Shape, tensors: Tensors, tokens: StepRows) -> None:
    """A task takes a head of keys and all that is asked of it at one row."""
    with parallel(tokens.count * shape.kv_heads) as task:
        row = bind(task // shape.kv_heads) if shape.rows > 1 else 0
        kv_head = bind(task - row * shape.kv_heads)
        position, slot = bind(tokens.position(row)), bind(tokens.slot(row))
        keys, values = tensors.keys.head(slot, kv_head), tensors.values.head(slot, kv_head)
        _extend(shape, tensors, row, position, keys, values)
        queries = _queries(shape, tensors, row, position, kv_head)
        first = _first_position(shape, position)
        # The thread that is given this task is mostly given the next one, too.
        attend(Span(keys, values, first, bind(position + 1), kv_head + 1, first), queries)

        def emit(number: Expr, _: Expr, weights: Expr) -> None:
            factor = bind(splat(1.0) / splat(weights))
            head = bind(kv_head * shape.group + number)
            _give(shape, tensors, row, head, lambda c: load(queries.outputs, number, c) * factor)

        finish(queries, emit)


def _attend_parts(shape: Shape, tensors: Tensors, tokens: StepRows) -> None:
    """A task takes a part of the positions of a head of keys; what the parts come to is put together in their order."""
    last = local(1, dtype="int32")
    last[0] = 0
    with loop(0, tokens.count) as row:
        last[0] = maximum(last[0], tokens.position(row))
    parts = bind(last[0] // shape.part_positions + 1)
    with parallel(tokens.count * shape.kv_heads * parts) as task:
        unit = bind(task // parts)
        row = bind(unit // shape.kv_heads) if shape.rows > 1 else 0
        _attend_part(shape, tensors, tokens, row, bind(unit - row * shape.kv_heads), bind(task - unit * parts))
    with parallel(tokens.count * shape.heads) as task:
        row = bind(task // shape.heads) if shape.rows > 1 else 0
        _merge_parts(shape, tensors, row, bind(task - row * shape.heads), bind(tokens.position(row)))


def _attend_part(shape: Shape, tensors: Tensors, tokens: StepRows, row: Expr, kv_head: Expr, part: Expr) -> None:
    position, slot = bind(tokens.position(row)), bind(tokens.slot(row))
    begin, end = bind(part * shape.part_positions), bind((part + 1) * shape.part_positions)
    first = bind(maximum(begin, _first_position(shape, position)))
    stop = bind(minimum(end, position + 1))
    # Other rows may be further than this one, and a window leaves out the first parts.
    with when(first < stop):
        keys, values = tensors.keys.head(slot, kv_head), tensors.values.head(slot, kv_head)
        with when(stop == position + 1):
            _extend(shape, tensors, row, position, keys, values)
        queries = _queries(shape, tensors, row, position, kv_head)
        attend(Span(keys, values, first, stop, kv_head, stop), queries)

        def emit(number: Expr, highest: Expr, weights: Expr) -> None:
            head = bind(kv_head * shape.group + number)
            assert tensors.outputs is not None and tensors.extremes is not None
            outputs = tensors.outputs
            blocks(
                queries.width, lambda c, _: store(outputs, row, head, part, c, value=load(queries.outputs, number, c))
            )
            tensors.extremes[row, head, part, 0] = highest
            tensors.extremes[row, head, part, 1] = weights

        finish(queries, emit)


def _merge_parts(shape: Shape, tensors: Tensors, row: Expr, head: Expr, position: Expr) -> None:
    """y = Σ exp(m_p - m) · outputs_p / Σ exp(m_p - m) · sum_p over parts p, with the largest m of their maxima m_p."""
    assert tensors.outputs is not None and tensors.extremes is not None
    outputs, extremes = tensors.outputs, tensors.extremes
    width = -(-shape.value_dim // LANES) * LANES
    begin = bind(_first_position(shape, position) // shape.part_positions)
    end = bind(position // shape.part_positions + 1)
    highest, sums, mixed = local(1), local(LANES), local(width)
    highest[0] = extremes[row, head, begin, 0]
    with loop(begin + 1, end) as part:
        highest[0] = maximum(highest[0], extremes[row, head, part, 0])
    sums[at(0)] = splat(0.0)
    blocks(width, lambda c, _: store(mixed, c, value=splat(0.0)))
    with loop(begin, end) as part:
        weight = bind(exp_of_negative(splat(extremes[row, head, part, 0] - highest[0])))
        sums[at(0)] = sums[at(0)] + weight * splat(extremes[row, head, part, 1])
        blocks(width, lambda c, _: store(mixed, c, value=load(mixed, c) + load(outputs, row, head, part, c) * weight))
    factor = bind(splat(1.0) / sums[at(0)])
    _give(shape, tensors, row, head, lambda c: load(mixed, c) * factor)


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
            queries.firsts[i], queries.lasts[i] = _first_position(shape, position), position
            _copy(shape.head_dim, tensors.q, row, start, queries.q, i, splat(shape.scale))
        slot = tokens.slot(0)
        attend_queries(queries, tensors.keys.head(slot, kv_head), tensors.values.head(slot, kv_head), shape.group)
        with loop(0, count) as i:
            row, head = _place(shape, kv_head, begin + i)
            factor = bind(splat(1.0) / splat(total(queries.sums[i, at(0)])))
            _give(shape, tensors, row, head, lambda c: load(queries.outputs, i, c) * factor)


def _place(shape: Shape, kv_head: Expr, query: Expr) -> tuple[Expr, Expr]:
    """Row and head of query `query` of those that a chunk asks of a head of keys."""
    row = bind(query // shape.group)
    return row, bind(kv_head * shape.group + query - row * shape.group)


def _copy(width: int, x: Tensor, row: Expr, start: Expr, to: Tensor, to_row: Expr, factor: Expr) -> None:
    """to[to_row] = x[row, start …] · factor."""
    blocks(width, lambda c, n: store(to, to_row, c, value=load(x, row, start + c, valid=n) * factor, valid=n))


def _give(shape: Shape, tensors: Tensors, row: Expr, head: Expr, value: Callable[[Expr], Expr]) -> None:
    """y of a head at `row`: `value(column)` gives its vectors."""
    start = bind(head * shape.value_dim)
    blocks(shape.value_dim, lambda c, n: store(tensors.y, row, start + c, value=value(c), valid=n))


def _extend(shape: Shape, tensors: Tensors, row: Expr, position: Expr, keys: CachedHead, values: CachedHead) -> None:
    """Writes this row's key and value."""
    if tensors.new_keys is None or tensors.new_values is None:
        return
    key_start, value_start = bind(keys.number * shape.head_dim), bind(values.number * shape.value_dim)
    source, start = tensors.new_keys, key_start
    if tensors.angles is not None:
        turned = local(1, shape.head_dim)
        tensors.angles.turn(
            source, row, start, shape.head_dim // 2, position,
            lambda c, value, valid: store(turned, 0, c, value=value, valid=valid),
        )  # fmt: skip
        keys.write(position, lambda c, valid: load(turned, 0, c, valid=valid))
    else:
        keys.write(position, lambda c, valid: load(source, row, start + c, valid=valid))
    new_values = tensors.new_values
    values.write(position, lambda c, valid: load(new_values, row, value_start + c, valid=valid))


def _queries(shape: Shape, tensors: Tensors, row: Expr, position: Expr, kv_head: Expr) -> Queries:
    """The query heads that share `kv_head`, scaled and, where that is asked for, turned."""
    queries = Queries.of(shape.group, shape.head_dim, shape.value_dim)
    scale = splat(shape.scale)
    with loop(0, queries.padded) as i:
        # Queries past the last fill up a tile, and nobody looks at what becomes of them.
        for c in range(shape.head_dim // LANES * LANES, shape.head_dim, LANES):
            store(queries.q, i, c, value=splat(0.0))
        start = bind((kv_head * shape.group + minimum(i, shape.group - 1)) * shape.head_dim)

        def keep(c: Expr, value: Expr, valid: int) -> None:
            store(queries.q, i, c, value=value * scale, valid=valid)

        if tensors.angles is not None:
            tensors.angles.turn(tensors.q, row, start, shape.head_dim // 2, position, keep)
        else:
            blocks(shape.head_dim, lambda c, valid: keep(c, load(tensors.q, row, start + c, valid=valid), valid))
    return queries
