"""The feed-forward block of one token, over the neurons that are predicted to fire.

1. The numbers of the neurons to compute are listed, in order (`ffn_list.py`): in `exact` by the deciding product of
   every neuron, in `masked` by the mask.
2. They are cut into SLICES equal runs. Each slice goes through its neurons one after the other: products with gate and
   up, activation, and down's row, times what came out, added to the slice's own y. A neuron's rows lie together, so
   this reads memory in long pieces, once.
3. The slices' y are added up, in order.

The number of slices is fixed. So are then the order of all additions and every bit of y, for any number of threads.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from picompile_codegen.kernels.dot import Vector, biased, dot, prepare_vector
from picompile_codegen.kernels.ffn_list import NeuronList, declare_list, make_list
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.matrix import Matrix, each_group
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, minimum, parallel, when, worth_a_region
from picompile_codegen.kernels.vector import LANES, at, blocks, fma, load, splat, store
from picompile_passes.dialect.formats import GROUP

# Divisible among 1, 2, 3, 4, 6, 8, 12 and 24 threads.
SLICES = 24
# Columns of y that a task of the last step adds up.
_SUM_COLUMNS = 128


@dataclass(frozen=True)
class _Slices:
    """What each slice makes: y of its neurons [SLICES, dim], and how many of their outputs are not zero [SLICES]."""

    y: Tensor
    nonzero: Tensor


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
    computed: Expr = shape.neurons
    if memory is None:
        with parallel(SLICES, when_worth=is_worth) as index:
            _dense_slice(arguments, vector, slices, index)
    else:
        listed = make_list(arguments, vector, memory)
        computed = listed.count
        with parallel(SLICES, when_worth=is_worth) as index:
            _listed_slice(arguments, vector, listed, slices, index)
    _sum_slices(arguments, slices.y, y)
    _count(arguments.stats, computed, slices.nonzero)


def _dense_slice(arguments: FfnArguments, vector: Vector, slices: _Slices, index: Expr) -> None:
    """A slice of all neurons."""
    _start_slice(arguments, slices, index)
    with _run(arguments.shape.neurons, index) as neuron:
        matrix, row = arguments.first_row(neuron)
        first = biased(dot(matrix, row, vector), arguments.first_bias, neuron)
        up = None
        if arguments.shape.gated:
            up = biased(dot(arguments.bundle, arguments.up_row(neuron), vector), arguments.up_bias, neuron)
        h = _output(arguments, first, up)
        slices.nonzero[index] = slices.nonzero[index] + tirx.Cast("int32", _is_nonzero(h))
        # Even where h is zero: to leave out rows here and there would break the one stream that this reads.
        _add_row(arguments.bundle, arguments.down_row(neuron), h, None, slices.y, index)


def _listed_slice(arguments: FfnArguments, vector: Vector, listed: NeuronList, slices: _Slices, index: Expr) -> None:
    """A slice of the listed neurons. While one is computed, the next is fetched."""
    shape = arguments.shape
    _start_slice(arguments, slices, index)
    with _run(listed.count, index) as position:
        neuron = bind(listed.neurons[position])
        following = bind(listed.neurons[minimum(position + 1, listed.count - 1)])
        first = _first_product(arguments, vector, listed, neuron, following)
        with _unless_silent(arguments, listed, first):
            up = None
            if shape.gated:
                up_row, ahead = arguments.up_row(neuron), arguments.up_row(following)
                up = biased(dot(arguments.bundle, up_row, vector, ahead), arguments.up_bias, neuron)
            h = _output(arguments, first, up)
            with when(_is_nonzero(h)):
                slices.nonzero[index] = slices.nonzero[index] + 1
                # A row that its up may yet silence is not worth fetching.
                ahead = None if shape.up_is_sparse else arguments.down_row(following)
                _add_row(arguments.bundle, arguments.down_row(neuron), h, ahead, slices.y, index)


def _first_product(arguments: FfnArguments, vector: Vector, listed: NeuronList, neuron: Expr, following: Expr) -> Expr:
    """The product with gate (with up, where there is no gate), which in `exact` is known."""
    if listed.products is not None:
        return listed.products[neuron]
    (matrix, row), (_, ahead) = arguments.first_row(neuron), arguments.first_row(following)
    return biased(dot(matrix, row, vector, ahead), arguments.first_bias, neuron)


def _unless_silent(arguments: FfnArguments, listed: NeuronList, first: Expr) -> AbstractContextManager[None]:
    """Leaves out the rest of a neuron that a mask named and that is silent all the same."""
    if listed.products is not None or not arguments.shape.is_sparse:
        return nullcontext()
    return when(first > tirx.FloatImm("float32", arguments.shape.threshold))


def _run(total: Expr, index: Expr) -> Any:
    """Loops over the part of `total` neurons that belongs to slice `index`."""
    return loop(total * index // SLICES, total * (index + 1) // SLICES)


def _start_slice(arguments: FfnArguments, slices: _Slices, index: Expr) -> None:
    blocks(arguments.shape.dim, lambda c, valid: store(slices.y, index, c, value=splat(0.0), valid=valid))
    slices.nonzero[index] = 0


def _is_nonzero(value: Expr) -> Expr:
    return value != tirx.FloatImm("float32", 0.0)


def _output(arguments: FfnArguments, first: Expr, up: Expr | None) -> Expr:
    """h of one neuron. The functions are written for vectors; LLVM sees that all lanes but one are for nothing."""
    return bind(tirx.Shuffle([bind(arguments.output(splat(first), None if up is None else splat(up)))], [0]))


def _add_row(matrix: Matrix, number: Expr, factor: Expr, ahead: Expr | None, out: Tensor, index: Expr) -> None:
    """out[index] += factor · row `number`. Row `ahead` is added next (see `Matrix.row`)."""
    row = matrix.row(number, factor=factor, ahead=ahead)

    def add(group: Expr, lane_counts: tuple[int, ...]) -> None:
        part = row.group(group)
        for i, (value, valid) in enumerate(zip(part.unscaled(), lane_counts, strict=False)):
            c = group * GROUP + i * LANES
            store(out, index, c, value=fma(value, part.scale, load(out, index, c, valid=valid)), valid=valid)

    each_group(matrix.columns, add, unroll=matrix.groups_per_line)


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
