"""Which neurons of a feed-forward block one token computes: their numbers, in order, side by side."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.dot import Vector, biased, dot
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, maximum, parallel, worth_a_region
from picompile_codegen.kernels.vector import at

# Elements of a mask that are looked at together: a word.
_EIGHT = 8
# Neurons that are written for every eight of a mask without asking how many it names.
_TWO = 2


@dataclass(frozen=True)
class NeuronList:
    """Row `row` of `neurons` int32 [tokens, F], the first `count` of which are numbers of neurons.

    `products` float32 [F] holds the deciding product of every neuron where the list was made from those.
    """

    neurons: Tensor
    row: Expr
    count: Expr
    products: Tensor | None

    def number(self, position: Expr) -> Expr:
        """The number of a neuron by its position in the list."""
        return self.neurons[self.row, position]


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
    return ListMemory(function.scratch("fired", "int32", shape.rows, shape.neurons), products)


def make_list(arguments: FfnArguments, vector: Vector, memory: ListMemory) -> NeuronList:
    """The neurons that the mask names or, in `exact`, whose deciding product is above the threshold."""
    if memory.products is not None:
        _decide(arguments, vector, memory.products)
    return list_neurons(arguments, memory, 0)


def list_neurons(arguments: FfnArguments, memory: ListMemory, token: Expr) -> NeuronList:
    """The same, once the products are known, for any of several tokens with a mask each."""
    count = local(1, dtype="int32")
    count[0] = 0
    neurons, start = arguments.shape.neurons, 0
    if memory.products is None and arguments.table is None and arguments.mask is not None:
        start = neurons // _EIGHT * _EIGHT
        _list_by_eights(arguments.mask, memory.neurons, token, start // _EIGHT, count)
    with loop(start, neurons) as neuron:
        # Written whether it is computed or not, and then kept or overwritten: a branch could not be predicted.
        memory.neurons[token, count[0]] = neuron
        count[0] = count[0] + tirx.Cast("int32", _is_computed(arguments, memory.products, token, neuron))
    return NeuronList(memory.neurons, token, bind(count[0]), memory.products)


def _list_by_eights(mask: Tensor, neurons: Tensor, token: Expr, eights: int, count: Tensor) -> None:
    """The neurons of a mask whose first eights are to be gone through.

    Two are written for every eight, whether there are any or not; that there are more is rare.
    """
    rest = local(1, dtype="uint64")
    with loop(0, eights) as eight:
        eight_bytes = bind(mask[token, at(eight * _EIGHT, _EIGHT)])
        rest[0] = tirx.reinterpret("uint64", eight_bytes)
        named = bind(tirx.Cast("int32", tirx.popcount(rest[0])))
        first = bind(count[0])
        for i in range(_TWO):
            neurons[token, first + i] = eight * _EIGHT + _take_lowest(rest)
        with loop(0, maximum(named - _TWO, 0)) as i:
            neurons[token, first + _TWO + i] = eight * _EIGHT + _take_lowest(rest)
        count[0] = first + named


def _take_lowest(rest: Tensor) -> Expr:
    """The number of the lowest byte that is not 0 (some number where all are), which becomes 0."""
    word, one = bind(rest[0]), tirx.IntImm("uint64", 1)
    # Ones below the lowest bit that is set: eight for each byte.
    below = bind(tirx.popcount((word - one) & ~word))
    rest[0] = word & (word - one)
    return bind(tirx.Cast("int32", below >> tirx.IntImm("uint64", 3)))


def _decide(arguments: FfnArguments, vector: Vector, products: Tensor) -> None:
    """products[j] = x · decide[j] + bias[j] for all neurons."""
    is_worth = worth_a_region(arguments.bundle.bytes)
    with parallel(arguments.shape.neurons, when_worth=is_worth) as neuron:
        matrix, row = arguments.first_row(neuron)
        products[neuron] = biased(dot(matrix, row, vector, [row + matrix.rows_ahead]), arguments.first_bias, neuron)


def _is_computed(arguments: FfnArguments, products: Tensor | None, token: Expr, neuron: Expr) -> Expr:
    if products is not None:
        return products[neuron] > tirx.FloatImm("float32", arguments.shape.threshold)
    column = neuron if arguments.table is None else arguments.table[neuron]
    return arguments.mask[token, column]  # type: ignore[index]
