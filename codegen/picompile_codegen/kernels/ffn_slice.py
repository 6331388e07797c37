"""A slice of the neurons of a feed-forward block, for one token: what `ffn_one` and `ffn_batch` are made of.

The neurons are gone through a few at a time: products with gate and up, and the activation; then the rows of down of
those whose output is not zero, four at a time, times their outputs, added to the slice's own y (`add_rows.py`). While
rows are read, as many of neurons further on are fetched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.add_rows import SomeRows, add_rows, rows_together
from picompile_codegen.kernels.dot import Vector, biased, dot
from picompile_codegen.kernels.ffn_list import NeuronList
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.ffn_slices import Slices
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, minimum, when
from picompile_codegen.kernels.vector import blocks, splat, store

# Neurons whose products are computed before their rows of down are added: these rows wait in the cache meanwhile.
_NEURONS_TOGETHER = 16


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
) -> None:
    """Slice `number` of one token's, of all neurons or of those that are listed: row `index` of `slices`."""
    width, of = slices.order.width(arguments.shape.dim), slices.per_token
    blocks(width, lambda c, valid: store(slices.y, index, c, value=splat(0.0), valid=valid))
    slices.nonzero[index] = 0
    places = _NEURONS_TOGETHER + rows_together(arguments.bundle)[-1]
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
            _fill_up(waiting, rows_together(arguments.bundle)[-1])
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


def _fill_up(waiting: _Waiting, together: int) -> None:
    """Makes the number of those that wait a multiple of `together`: the first stands in for the missing, times zero."""
    count = bind(waiting.count[0])
    for i in range(together - 1):
        waiting.numbers[count + i], waiting.outputs[count + i] = waiting.numbers[0], tirx.FloatImm("float32", 0.0)
    waiting.count[0] = (count + (together - 1)) // together * together


def _add_waiting(
    arguments: FfnArguments, waiting: _Waiting, out: Tensor, index: Expr, following: Callable[[Expr], Expr]
) -> None:
    """Adds the rows of down that wait, as many at a time as can be; a few are left, and move to the front.

    Meanwhile the rows of down of the neurons `following(0)`, `following(1)`, … are fetched.
    """
    done, numbers_of_rows = local(1, dtype="int32"), rows_together(arguments.bundle)
    done[0] = 0
    for together in numbers_of_rows:
        first = bind(done[0])
        times = bind((waiting.count[0] - first) // together)
        with loop(0, times) as time:
            places = [bind(first + time * together + i) for i in range(together)]
            numbers, outputs = ([bind(t[place]) for place in places] for t in (waiting.numbers, waiting.outputs))
            ahead = [bind(arguments.down_row(following(place))) for place in places]
            add_rows(SomeRows(arguments.bundle, numbers, outputs, out, index, ahead))
        done[0] = first + times * together
    left = bind(done[0])
    for i in range(numbers_of_rows[-1] - 1):
        for tensor in (waiting.numbers, waiting.outputs):
            tensor[i] = tensor[left + i]
    waiting.count[0] = waiting.count[0] - left
