"""The feed-forward block of one token, over the neurons that are predicted to fire.

1. The numbers of the neurons to compute are listed, in order (`ffn_list.py`): in `exact` by the deciding product of
   every neuron, in `masked` by the mask.
2. They are cut into SLICES equal runs (`ffn_slice.py`).
3. The slices' y are added up, in order.

The number of slices is fixed. So are then the order of all additions and every bit of y, for any number of threads.
"""

from picompile_codegen.kernels.dot import prepare_vector
from picompile_codegen.kernels.ffn_list import declare_list, make_list
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.ffn_slice import compute_slice
from picompile_codegen.kernels.ffn_slices import Slices
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import parallel, worth_a_region

# Each has a y of its own, which costs time to add up; too few leave threads without work.
SLICES = 16


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    shape = arguments.shape
    memory = declare_list(function, arguments)
    slices = Slices.declare(function, arguments, SLICES)
    y = function.floats("y", 1, shape.dim)

    vector = prepare_vector(arguments.x, arguments.bundle)
    is_worth = worth_a_region(arguments.bundle.bytes)
    listed = None if memory is None else make_list(arguments, vector, memory)
    with parallel(SLICES, when_worth=is_worth) as index:
        compute_slice(arguments, vector, listed, slices, index, index)
    slices.add_up(y, arguments.down_bias, shape.dim, 1)
    slices.count(arguments.stats, shape.neurons if listed is None else listed.count, 1)
