"""The feed-forward block of one token, over the neurons that are predicted to fire.

1. The numbers of the neurons to compute are listed, in order (`ffn_list.py`): in `exact` by the deciding product of
   every neuron, in `masked` by the mask.
2. They are cut into SLICES equal runs. Each slice goes through its neurons a few at a time: products with gate and up,
   and the activation; then the rows of down of those whose output is not zero, four at a time, times their outputs,
   added to the slice's own y (`add_rows.py`). While rows are read, as many of neurons further on are fetched.
3. The slices' y are added up, in order.

The number of slices is fixed. So are then the order of all additions and every bit of y, for any number of threads.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.add_rows import ROWS_TOGETHER, FourRows, add_rows
from picompile_codegen.kernels.dot import Vector, biased, dot, prepare_vector
from picompile_codegen.kernels.ffn_list import NeuronList, declare_list, make_list
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import (
    Expr,
    Tensor,
    bind,
    local,
    loop,
    minimum,
    parallel,
    when,
    worth_a_region,
)
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store

# Each has a y of its own, which costs time to add up; too few leave threads without work.
SLICES = 16
# Columns of y that a task of the last step adds up.
_SUM_COLUMNS = 128
# Neurons whose products are computed before their rows of down are added: these rows wait in the cache meanwhile.
_NEURONS_TOGETHER = 16


@dataclass(frozen=True)
class _Slices:
    """What each slice makes: y of its neurons [SLICES, dim], and how many of their outputs are not zero [SLICES]."""

    y: Tensor
    nonzero: Tensor


@dataclass(frozen=True)
class _Waiting:
    """Neurons whose rows of down are to be added: `count[0]` of them, their rows' numbers and their outputs."""

    numbers: Tensor
    outputs: Tensor
    count: Tensor


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    shape = arguments.shape
    memory = declare_list(function, arguments)
    slices = _Slices(
        function.scratch("slices", "float32", SLICES, shape.dim), function.scratch("nonzero", "int32", SLICES)
    )
    y = function.floats("y", 1, shape.dim)

    vector = prepare_vector(arguments.x, arguments.bundle)
    is_worth = worth_a_region(arguments.bundle.bytes)
    listed = None if memory is None else make_list(arguments, vector, memory)
    with parallel(SLICES, when_worth=is_worth) as index:
        _compute_slice(arguments, vector, listed, slices, index)
    _sum_slices(arguments, slices.y, y)
    _count(arguments.stats, shape.neurons if listed is None else listed.count, slices.nonzero)


def _compute_slice(
    arguments: FfnArguments, vector: Vector, listed: NeuronList | None, slices: _Slices, index: Expr
) -> None:
    """A slice of all neurons, or of those that are listed."""
    blocks(arguments.shape.dim, lambda c, valid: store(slices.y, index, c, value=splat(0.0), valid=valid))
    slices.nonzero[index] = 0
    places = _NEURONS_TOGETHER + ROWS_TOGETHER
    waiting = _Waiting(local(places, dtype="int32"), local(places), local(1, dtype="int32"))
    waiting.count[0] = 0
    count = arguments.shape.neurons if listed is None else listed.count
    start, stop = bind(count * index // SLICES), bind(count * (index + 1) // SLICES)
    distance = -(-arguments.bundle.rows_ahead // arguments.shape.bundle_parts)
    with loop(start, minimum(start + distance, stop)) as position:
        for row in arguments.bundle_rows(_neuron(listed, position)):
            arguments.bundle.fetch_row(row)
    parts = bind((stop - start + (_NEURONS_TOGETHER - 1)) // _NEURONS_TOGETHER)
    with loop(0, parts) as part:
        first = bind(start + part * _NEURONS_TOGETHER)
        with loop(first, minimum(first + _NEURONS_TOGETHER, stop)) as position:
            neuron, ahead = (_neuron(listed, place) for place in (position, minimum(position + distance, count - 1)))
            _compute(arguments, vector, listed, neuron, ahead, waiting, slices.nonzero, index)
        with when(part == parts - 1):
            _fill_up(waiting)
        following = bind(first + _NEURONS_TOGETHER)
        _add_waiting(
            arguments, waiting, slices.y, index, lambda i: _neuron(listed, minimum(following + i, count - 1))
        )  # fmt: skip


def _compute(
    arguments: FfnArguments,
    vector: Vector,
    listed: NeuronList | None,
    neuron: Expr,
    ahead: Expr,
    waiting: _Waiting,
    nonzero: Tensor,
    index: Expr,
) -> None:
    """Computes one neuron's output and puts it among those that wait, in a list unless it is zero."""
    shape, down = arguments.shape, bind(arguments.down_row(neuron))
    if listed is not None and listed.products is not None:
        first = bind(listed.products[neuron])
    else:
        (matrix, row), (_, fetched) = arguments.first_row(neuron), arguments.first_row(ahead)
        first = biased(dot(matrix, row, vector, [fetched]), arguments.first_bias, neuron)
    with _unless_silent(arguments, listed, first):
        up = None
        if shape.gated:
            product = dot(arguments.bundle, arguments.up_row(neuron), vector, [arguments.up_row(ahead)])
            up = biased(product, arguments.up_bias, neuron)
        h = _output(arguments, first, up)
        fired = bind(tirx.Cast("int32", h != tirx.FloatImm("float32", 0.0)))
        nonzero[index] = nonzero[index] + fired
        place = bind(waiting.count[0])
        waiting.numbers[place], waiting.outputs[place] = down, h
        # Of all neurons even those whose h is zero: to leave out rows here and there would break the one stream.
        waiting.count[0] = place + (1 if listed is None else fired)


def _neuron(listed: NeuronList | None, position: Expr) -> Expr:
    return bind(position if listed is None else listed.neurons[position])


def _unless_silent(arguments: FfnArguments, listed: NeuronList | None, first: Expr) -> AbstractContextManager[None]:
    """Leaves out the rest of a neuron that a mask named and that is silent all the same."""
    if listed is None or listed.products is not None or not arguments.shape.is_sparse:
        return nullcontext()
    return when(first > tirx.FloatImm("float32", arguments.shape.threshold))


def _output(arguments: FfnArguments, first: Expr, up: Expr | None) -> Expr:
    """h of one neuron. The functions are written for vectors; LLVM sees that all lanes but one are for nothing."""
    return bind(tirx.Shuffle([bind(arguments.output(splat(first), None if up is None else splat(up)))], [0]))


def _fill_up(waiting: _Waiting) -> None:
    """Makes the number of those that wait a multiple of four: the first stands in for those missing, times zero."""
    count = bind(waiting.count[0])
    for i in range(ROWS_TOGETHER - 1):
        waiting.numbers[count + i], waiting.outputs[count + i] = waiting.numbers[0], tirx.FloatImm("float32", 0.0)
    waiting.count[0] = (count + (ROWS_TOGETHER - 1)) // ROWS_TOGETHER * ROWS_TOGETHER


def _add_waiting(
    arguments: FfnArguments, waiting: _Waiting, out: Tensor, index: Expr, following: Callable[[Expr], Expr]
) -> None:
    """Adds the rows of down that wait, four by four; fewer than four are left, and move to the front.

    Meanwhile the rows of down of the neurons `following(0)`, `following(1)`, … are fetched.
    """
    quads = bind(waiting.count[0] // ROWS_TOGETHER)
    with loop(0, quads) as quad:
        places = [bind(quad * ROWS_TOGETHER + i) for i in range(ROWS_TOGETHER)]
        numbers, outputs = ([bind(t[place]) for place in places] for t in (waiting.numbers, waiting.outputs))
        ahead = [bind(arguments.down_row(following(place))) for place in places]
        add_rows(FourRows(arguments.bundle, numbers, outputs, out, index, ahead))
    for i in range(ROWS_TOGETHER - 1):
        for tensor in (waiting.numbers, waiting.outputs):
            tensor[i] = tensor[quads * ROWS_TOGETHER + i]
    waiting.count[0] = waiting.count[0] - quads * ROWS_TOGETHER


def _sum_slices(arguments: FfnArguments, slices: Tensor, y: Tensor) -> None:
    """y = down_bias + Σ slices[s], s in order."""
    dim, bias = arguments.shape.dim, arguments.down_bias

    def add_up(c: Expr, valid: int) -> None:
        value = local(LANES)
        value[at(0)] = splat(0.0) if bias is None else load(bias, c, valid=valid)
        with loop(0, SLICES) as index:
            value[at(0)] = value[at(0)] + load(slices, index, c, valid=valid)
        store(y, 0, c, value=value[at(0)], valid=valid)

    full, rest = divmod(dim, _SUM_COLUMNS)
    with parallel(full, when_worth=worth_a_region(dim * SLICES * 4)) as block:
        blocks(_SUM_COLUMNS, lambda c, valid: add_up(block * _SUM_COLUMNS + c, valid))
    if rest:
        blocks(rest, lambda c, valid: add_up(full * _SUM_COLUMNS + c, valid))


def _count(stats: Tensor, computed: Expr, nonzero: Tensor) -> None:
    stats[0] = stats[0] + tirx.Cast("int64", computed)
    with loop(0, SLICES) as index:
        stats[1] = stats[1] + tirx.Cast("int64", nonzero[index])
