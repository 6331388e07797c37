"""What parts of the positions come to, put together in their order."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import LOWEST, Parts, Tensors, number, padded_width
from picompile_codegen.cuda.function import CudaFunction, Place
from picompile_codegen.cuda.memory import barrier, block_max, block_sum, registers, shared
from picompile_codegen.kernels.attention_arguments import Shape, first_position
from picompile_codegen.kernels.step_rows import StepRows
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, when

_THREADS = 256
_LANES = 4


def merge_parts(
    function: CudaFunction, shape: Shape, parts: Parts, tensors: Tensors, read_step: Callable[[], StepRows]
) -> None:
    """y = Σ exp(m_p - m) · outputs_p / Σ exp(m_p - m) · sum_p over parts p, with the largest m of their maxima m_p.

    A block has a head of a row.
    """
    with function.launch(grid=(shape.heads, shape.rows), block=_THREADS) as place:
        tokens, row, head = read_step(), place.block_y, place.block
        with when(row < tokens.count):
            position = bind(tokens.position(row))
            begin = bind(first_position(shape, position) // parts.positions)
            end = bind(position // parts.positions + 1)
            weights = shared(parts.count)
            total = _weigh(tensors, (row, head), (begin, end), weights, place)
            _mix(shape, tensors, (row, head), (begin, end), weights, total, place)


def _weigh(tensors: Tensors, of: tuple[Expr, Expr], span: tuple[Expr, Expr], weights: Tensor, place: Place) -> Expr:
    """Weights of the parts from `span`[0] up to `span`[1], and the sum of those of all positions."""
    assert tensors.extremes is not None
    part, (begin, end) = place.thread, span
    inside = bind(tirx.And(part >= begin, part < end))
    highest = bind(tirx.if_then_else(inside, tensors.extremes[(*of, part, 0)], number(LOWEST)))
    of_all = block_max(highest, place.thread, _THREADS)
    weight = bind(tirx.if_then_else(inside, tirx.exp(highest - of_all), number(0.0)))
    # TVM gives memory that nobody uses any more, here that of the maximum, to what comes next.
    barrier()
    with when(inside):
        weights[part] = weight
    own = bind(tirx.if_then_else(inside, weight * tensors.extremes[(*of, part, 1)], number(0.0)))
    # It has barriers, behind which all see the weights.
    return block_sum(own, place.thread, _THREADS)


def _mix(
    shape: Shape, tensors: Tensors, of: tuple[Expr, Expr], span: tuple[Expr, Expr], weights: Tensor, total: Expr,
    place: Place,
) -> None:  # fmt: skip
    """Threads side by side have four columns each; sets of them take different parts."""
    assert tensors.outputs is not None
    width = padded_width(shape.value_dim)
    units, (begin, end) = width // _LANES, span
    sets = _THREADS // units
    mine, column = bind(place.thread // units), bind(place.thread % units * _LANES)
    sums, mixed = registers(_LANES), shared(sets, width)
    for i in range(_LANES):
        sums[i] = number(0.0)
    with when(mine < sets):
        with loop(0, (end - begin + (sets - 1 - mine)) // sets) as turn:
            part = bind(begin + mine + turn * sets)
            weight, four = bind(weights[part]), bind(tensors.outputs[(*of, part, tirx.Ramp(column, 1, _LANES))])
            for i in range(_LANES):
                sums[i] = sums[i] + weight * tirx.Shuffle([four], [i])
        for i in range(_LANES):
            mixed[mine, column + i] = sums[i]
    barrier()
    row, head = of
    for start in range(0, shape.value_dim, _THREADS):
        c = bind(start + place.thread)
        with when(c < shape.value_dim):
            sums[0] = number(0.0)
            with loop(0, sets) as each:
                sums[0] = sums[0] + mixed[each, c]
            tensors.y[row, head * shape.value_dim + c] = sums[0] / total
