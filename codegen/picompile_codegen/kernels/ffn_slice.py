"""A slice of the neurons of a feed-forward block, for one token: what `ffn_one` and `ffn_batch` are made of.

The neurons are gone through a few at a time: products with gate and up, and the activation; then the rows of down of
those whose output is not zero, four at a time, times their outputs, added to the slice's own y (`add_rows.py`). While
rows are read, as many of neurons further on are fetched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.add_rows import ROWS_TOGETHER, FourRows, add_rows
from picompile_codegen.kernels.dot import Vector, biased, dot
from picompile_codegen.kernels.ffn_list import NeuronList
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, minimum, when
from picompile_codegen.kernels.vector import blocks, splat, store

# Neurons whose products are computed before their rows of down are added: these rows wait in the cache meanwhile.
_NEURONS_TOGETHER = 16


@dataclass(frozen=True)
class Slices:
    """What slices make: y of their neurons [slices, dim], and how many of their outputs are not zero [slices]."""

    y: Tensor
    nonzero: Tensor

    @classmethod
    def declare(cls, function: KernelFunction, count: int, dim: int) -> "Slices":
        """Memory for `count` slices."""
        return cls(function.scratch("slices", "float32", count, dim), function.scratch("nonzero", "int32", count))


@dataclass(frozen=True)
class _Waiting:
    """Neurons whose rows of down are to be added: `count[0]` of them, their rows' numbers and their outputs."""

    numbers: Tensor
    outputs: Tensor
    count: Tensor


def compute_slice(
    arguments: FfnArguments,
    vector: Vector,
    listed: NeuronList | None,
    slices: Slices,
    index: Expr,
    number: Expr,
    of: int,
) -> None:
    """Slice `number` of `of` of all neurons, or of those that are listed: row `index` of `slices`."""
    blocks(arguments.shape.dim, lambda c, valid: store(slices.y, index, c, value=splat(0.0), valid=valid))
    slices.nonzero[index] = 0
    places = _NEURONS_TOGETHER + ROWS_TOGETHER
    waiting = _Waiting(local(places, dtype="int32"), local(places), local(1, dtype="int32"))
    waiting.count[0] = 0
    count = arguments.shape.neurons if listed is None else listed.count
    start, stop = bind(count * number // of), bind(count * (number + 1) // of)
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
    return bind(position if listed is None else listed.number(position))


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
