"""The feed-forward block of one token, over the neurons that are predicted to fire.

1. The numbers of the neurons to compute are listed, in order (`ffn_list.py`): in `exact` by the deciding product of
   every neuron, in `masked` by the mask.
2. They are cut into SLICES equal runs (`ffn_slice.py`).
3. The slices' y are added up, in order.

The number of slices is fixed. So are then the order of all additions and every bit of y, for any number of threads.
"""

from tvm import tirx

from picompile_codegen.kernels.dot import prepare_vector
from picompile_codegen.kernels.ffn_list import declare_list, make_list
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.ffn_slice import Slices, compute_slice
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, local, loop, parallel, worth_a_region
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store

# Each has a y of its own, which costs time to add up; too few leave threads without work.
SLICES = 16
# Columns of y that a task of the last step adds up.
_SUM_COLUMNS = 128


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    shape = arguments.shape
    memory = declare_list(function, arguments)
    slices = Slices.declare(function, SLICES, shape.dim)
    y = function.floats("y", 1, shape.dim)

    vector = prepare_vector(arguments.x, arguments.bundle)
    is_worth = worth_a_region(arguments.bundle.bytes)
    listed = None if memory is None else make_list(arguments, vector, memory)
    with parallel(SLICES, when_worth=is_worth) as index:
        compute_slice(arguments, vector, listed, slices, index, index, SLICES)
    _sum_slices(arguments, slices.y, y)
    _count(arguments.stats, shape.neurons if listed is None else listed.count, slices.nonzero)


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
