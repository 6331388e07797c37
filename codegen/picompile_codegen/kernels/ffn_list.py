"""Which neurons of a feed-forward block one token computes: their numbers, in order, side by side."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.dot import Vector, biased, dot
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, parallel, worth_a_region


@dataclass(frozen=True)
class NeuronList:
    """`neurons` int32 [F], the first `count` of which are numbers of neurons.

    `products` float32 [F] holds the deciding product of every neuron where the list was made from those.
    """

    neurons: Tensor
    count: Expr
    products: Tensor | None


@dataclass(frozen=True)
class ListMemory:
    """What a list is made in. Declared before any statement of a kernel."""

    neurons: Tensor
    products: Tensor | None


def declare_list(function: KernelFunction, arguments: FfnArguments) -> ListMemory | None:
    """The memory that a block's kind needs for its list; None where every neuron is computed."""
    shape = arguments.shape
    if not (shape.is_exact or shape.is_masked):
        return None
    products = function.scratch("products", "float32", shape.neurons) if shape.is_exact else None
    return ListMemory(function.scratch("fired", "int32", shape.neurons), products)


def make_list(arguments: FfnArguments, vector: Vector, memory: ListMemory) -> NeuronList:
    """The neurons that the mask names or, in `exact`, whose deciding product is above the threshold."""
    if memory.products is not None:
        _decide(arguments, vector, memory.products)
    count = local(1, dtype="int32")
    count[0] = 0
    with loop(0, arguments.shape.neurons) as neuron:
        # Written whether it is computed or not, and then kept or overwritten: a branch could not be predicted.
        memory.neurons[count[0]] = neuron
        count[0] = count[0] + tirx.Cast("int32", _is_computed(arguments, memory.products, neuron))
    return NeuronList(memory.neurons, bind(count[0]), memory.products)


def _decide(arguments: FfnArguments, vector: Vector, products: Tensor) -> None:
    """products[j] = x · decide[j] + bias[j] for all neurons."""
    is_worth = worth_a_region(arguments.bundle.bytes)
    with parallel(arguments.shape.neurons, when_worth=is_worth) as neuron:
        matrix, row = arguments.first_row(neuron)
        products[neuron] = biased(dot(matrix, row, vector, [row + matrix.rows_ahead]), arguments.first_bias, neuron)


def _is_computed(arguments: FfnArguments, products: Tensor | None, neuron: Expr) -> Expr:
    if products is not None:
        return products[neuron] > tirx.FloatImm("float32", arguments.shape.threshold)
    column = neuron if arguments.table is None else arguments.table[neuron]
    return arguments.mask[0, column]  # type: ignore[index]
