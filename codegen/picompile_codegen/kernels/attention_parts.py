"""Attention of single tokens whose positions several tasks share, where there are few heads of keys.

Parts are of fixed size and put together in order, so that results do not depend on the number of threads.
"""

from picompile_codegen.kernels.attention_arguments import (
    Shape,
    Tensors,
    extend_cache,
    first_position,
    give,
    ready_queries,
)
from picompile_codegen.kernels.attention_task import attend, finish
from picompile_codegen.kernels.attention_work import Span
from picompile_codegen.kernels.math import exp_of_negative
from picompile_codegen.kernels.step_rows import StepRows
from picompile_codegen.kernels.tensor import Expr, bind, local, loop, maximum, minimum, parallel, when
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store


def attend_parts(shape: Shape, tensors: Tensors, tokens: StepRows) -> None:
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
    first = bind(maximum(begin, first_position(shape, position)))
    stop = bind(minimum(end, position + 1))
    # Other rows may be further than this one, and a window leaves out the first parts.
    with when(first < stop):
        keys, values = tensors.keys.head(slot, kv_head), tensors.values.head(slot, kv_head)
        with when(stop == position + 1):
            extend_cache(shape, tensors, row, position, keys, values)
        queries = ready_queries(shape, tensors, row, position, kv_head)
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
    begin = bind(first_position(shape, position) // shape.part_positions)
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
    give(shape, tensors, row, head, lambda c: load(mixed, c) * factor)
