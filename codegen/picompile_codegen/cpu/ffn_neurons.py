"""Arguments of a feed-forward block, where each matrix of a neuron is, and the list of neurons that a token
computes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tvm import tirx

from picompile_codegen.cpu.dot import Vector, biased, dot, dots
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix, M
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    TensorView,
    bind,
    counter,
    local,
    loop,
    maximum,
    minimum,
    parallel,
    select,
    worth_a_region,
)
from picompile_codegen.cpu.token_experts import TokenExperts
from picompile_codegen.cpu.vector import LANES, activate, at, load, splat, store
from picompile_codegen.specs import FfnSpec

F = TypeVar("F", bound="FfnTensors[Any]")


@dataclass(frozen=True)
class FfnTensors(Generic[M]):
    """The tensors of a feed-forward block, in the order in which they are passed, on the CPU or on a GPU."""

    spec: FfnSpec
    count: KernelTensor | None
    x: KernelTensor
    mask: KernelTensor | None
    table: KernelTensor | None
    gains: KernelTensor | None
    decide: M | None
    bundle: M
    gate_bias: KernelTensor | None
    up_bias: KernelTensor | None
    down_bias: KernelTensor | None
    gate_limits: KernelTensor | None
    output_limits: KernelTensor | None
    expert_bias: KernelTensor | None
    stats: KernelTensor
    y: KernelTensor

    @classmethod
    def of(cls: type[F], spec: FfnSpec, function: KernelFunction, matrix: type[M]) -> F:
        """Return the arguments of the kernel that is being written, its packed matrices as `matrix`."""
        return cls(
            spec=spec,
            count=function.get("count"),
            x=function["x"],
            mask=function.get("mask"),
            table=function.get("table"),
            gains=function.get("gains"),
            decide=matrix.optional(function, "decide_w"),
            bundle=matrix.argument(function, "neuron_w"),
            gate_bias=function.get("gate_bias"),
            up_bias=function.get("up_bias"),
            down_bias=function.get("down_bias"),
            gate_limits=function.get("gate_limits"),
            output_limits=function.get("output_limits"),
            expert_bias=function.get("expert_bias"),
            stats=function["stats"],
            y=function["y"],
        )

    def neurons(self) -> Expr:
        """Return how many neurons there are, in a launch on a GPU; no more than `spec.neurons`."""
        return self.spec.neurons if self.count is None else bind(self.count[0])

    def mask_index(self, token: Expr, column: Expr) -> tuple[Expr, ...]:
        """Return the index of a column of the mask, or of several side by side."""
        if not self.spec.has_flat_mask:
            return token, column
        return (column,) if self.spec.rows == 1 else (token * self.neurons() + column,)

    @property
    def first_matrix(self) -> M:
        """The gating matrix: it has the rows of gate, or of up where there is no gate."""
        return self.bundle if self.decide is None else self.decide

    @property
    def first_bias(self) -> KernelTensor | None:
        """The bias of `first_matrix`."""
        return self.gate_bias if self.spec.gated else self.up_bias

    def first_row(self, neuron: Expr) -> Expr:
        """The row of a neuron in `first_matrix`."""
        return neuron if self.decide is not None else neuron * self.spec.bundle_parts

    def up_row(self, neuron: Expr) -> Expr:
        """The row of up in the bundle of a gated block."""
        return neuron * self.spec.bundle_parts + (self.spec.bundle_parts - 2)

    def down_row(self, neuron: Expr) -> Expr:
        """The row of down in the bundle."""
        return neuron * self.spec.bundle_parts + (self.spec.bundle_parts - 1)


@dataclass(frozen=True)
class FfnArguments(FfnTensors[KernelMatrix]):
    """The tensors of a block for the CPU, whose first neuron is number `first` of those in its matrices."""

    first: Expr = 0

    def from_row(self, row: Expr) -> "FfnArguments":
        """Return the tensors as they are seen from row `row` of a step on."""

        def seen(tensor: KernelTensor) -> KernelTensor:
            return TensorView(tensor, row=lambda i: row + i)

        mask, gains = (None if each is None else seen(each) for each in (self.mask, self.gains))
        return replace(self, x=seen(self.x), y=seen(self.y), mask=mask, gains=gains)

    def first_row(self, neuron: Expr) -> Expr:
        """The row of a neuron in `first_matrix`."""
        return super().first_row(self.first + neuron)

    def up_row(self, neuron: Expr) -> Expr:
        """The row of up in the bundle of a gated block."""
        return super().up_row(self.first + neuron)

    def down_row(self, neuron: Expr) -> Expr:
        """The row of down in the bundle."""
        return super().down_row(self.first + neuron)

    def bundle_rows(self, neuron: Expr) -> list[Expr]:
        """All rows of a neuron in the bundle."""
        parts = self.spec.bundle_parts
        return [bind((self.first + neuron) * parts + part) for part in range(parts)]

    def first_products(self, neuron: Expr, vectors: Sequence[Vector], ahead: Expr) -> list[Expr]:
        """Products of a neuron with gate, or up where there is no gate, biases included, while `ahead`'s is fetched."""
        products = dots(self.first_matrix, self.first_row(neuron), vectors, [self.first_row(ahead)])
        return [biased(product, self.first_bias, neuron) for product in products]

    def up_products(self, neuron: Expr, vectors: Sequence[Vector], ahead: Expr) -> list[Expr | None]:
        """Products with up of a gated block, as `first_products` makes them; None where there is no gate."""
        if not self.spec.gated:
            return [None] * len(vectors)
        products = dots(self.bundle, self.up_row(neuron), vectors, [self.up_row(ahead)])
        return [biased(product, self.up_bias, neuron) for product in products]

    def output(self, first: Expr, up: Expr | None) -> Expr:
        """h of eight lanes, from the products with gate and up, biases included (`up` None where there is no gate)."""
        value = activate(self.spec.activation, first)
        return value if up is None else bind(value * activate(self.spec.up_activation, up))

    def output_of_one(self, first: Expr, up: Expr | None) -> Expr:
        """h of one neuron. Activations are written for vectors; LLVM removes the lanes that are not used."""
        output = bind(self.output(splat(first), None if up is None else splat(up)))
        return bind(tirx.Shuffle([output], [0]))

    def is_above_gate_limit(self, first: Expr, limits: KernelTensor, neuron: Expr) -> Expr:
        """Return whether a neuron, with the product `first` with gate, is above the limit of its activated gate."""
        is_above = bind(tirx.Shuffle([self._activated(splat(first))], [0])) > limits[neuron]
        return tirx.And(first > self.spec.threshold, is_above) if self.spec.is_sparse else is_above

    def are_above_gate_limits(self, first: Expr, limits: Expr) -> Expr:
        """Return the same of eight neurons, as ones and zeros in float32. The activation silences no neuron."""
        return select(self._activated(first) > limits, splat(1.0), splat(0.0))

    def _activated(self, first: Expr) -> Expr:
        return bind(tirx.abs(activate(self.spec.activation, first)))


# The list of neurons to compute holds their places in order, side by side. The place of a neuron is its number; in a
# block of experts, that among the neurons of the experts that the token has chosen (`token_experts.py`).


# Elements of a mask that are looked at together: a word.
_EIGHT = 8
# Neurons that are written for every eight of a mask without asking how many it names.
_TWO = 2


@dataclass(frozen=True)
class NeuronList:
    """Row `row` of `places` int32 [tokens, F], the first `count` of which are places of neurons.

    `products` float32 [tokens, F] holds, by place, the product with the gating matrix of every neuron where the list
    was made from those, and `outputs` float32 [tokens, F] those of the neurons listed where they have been computed.
    """

    places: KernelTensor
    row: Expr
    count: Expr
    products: KernelTensor | None
    outputs: KernelTensor | None = None

    def place(self, position: Expr) -> Expr:
        """The place of a neuron by its position in the list."""
        return self.places[self.row, position]

    def product(self, place: Expr) -> Expr | None:
        """The product of a neuron with the gating matrix, where it is known."""
        return None if self.products is None else bind(self.products[self.row, place])


@dataclass(frozen=True)
class ListMemory:
    """Memory for a list of neurons. `above` uint8 [tokens, F]: whether each is above the limit of its gate or, in a
    block of experts, the threshold."""

    places: KernelTensor
    products: KernelTensor | None
    above: KernelTensor | None = None


def declare_list(function: KernelFunction, arguments: FfnArguments, by_gate: bool = False) -> ListMemory | None:
    """Declare the memory that a block's kind needs for its list; None where every neuron is computed.

    With `by_gate` it is a list of neurons whose gate is above the threshold, whatever the kind.
    """
    spec = arguments.spec
    by_gate = by_gate or spec.is_exact
    if not (by_gate or spec.is_masked):
        return None
    products = function.scratch("products", "float32", spec.rows, spec.row_neurons) if by_gate else None
    fired = function.scratch("fired", "int32", spec.rows, spec.row_neurons)
    decides = by_gate and (spec.gate_limits or spec.experts)
    above = function.scratch("above", "uint8", spec.rows, spec.row_neurons) if decides else None
    return ListMemory(fired, products, above)


def make_list(
    arguments: FfnArguments, vector: Vector, memory: ListMemory, experts: TokenExperts | None = None
) -> NeuronList:
    """List the neurons that the mask names or, in `exact`, whose gate product is above the threshold or limit."""
    if memory.products is not None:
        _decide(arguments, vector, memory, memory.products, experts)
    return list_neurons(arguments, memory, 0, experts)


def list_neurons(
    arguments: FfnArguments, memory: ListMemory, token: Expr, experts: TokenExperts | None = None
) -> NeuronList:
    """List the neurons of token `token`; in `exact` the products must be known."""
    count = counter()
    if memory.products is None and experts is not None:
        with loop(0, experts.count) as i:
            of_expert = bind(experts.first_neuron(i))
            _list_range(
                arguments, memory, token, count, of_expert, arguments.spec.expert_neurons, i * experts.neurons_each
            )
    else:
        _list_range(arguments, memory, token, count, 0, arguments.neurons() if experts is None else experts.neurons, 0)
    return NeuronList(memory.places, token, bind(count[0]), memory.products)


def _list_range(
    arguments: FfnArguments,
    memory: ListMemory,
    token: Expr,
    count: KernelTensor,
    first: Expr,
    neurons: Expr,
    first_place: Expr,
) -> None:
    """List those of `neurons` neurons from `first` on whose places begin with `first_place`."""
    start: Expr = 0
    # Most neurons of an activation that silences none are above their limits, and go into the list one by one.
    flags = memory.above if arguments.spec.is_sparse else None
    of_first: tuple[Expr, ...] = (token, first)
    if memory.products is None and arguments.table is None:
        flags, of_first = arguments.mask, arguments.mask_index(token, first)
    if flags is not None:
        eights = bind(neurons // _EIGHT)
        start = eights * _EIGHT
        _list_by_eights(flags, of_first, memory.places, token, eights, count, first_place)
    with loop(start, neurons) as i:
        # Written whether it is computed or not, and then kept or overwritten: a branch could not be predicted.
        memory.places[token, count[0]] = first_place + i
        count[0] = count[0] + tirx.Cast("int32", _is_computed(arguments, memory, token, first + i))


def _list_by_eights(
    mask: KernelTensor,
    first: tuple[Expr, ...],
    places: KernelTensor,
    token: Expr,
    eights: Expr,
    count: KernelTensor,
    first_place: Expr,
) -> None:
    """List the neurons of `eights` · 8 bytes of a mask, from its element `first` on.

    Two places are written for every eight neurons, whether there are any or not; more than two are rare.
    """
    rest, (*row, column) = local(1, dtype="uint64"), first
    with loop(0, eights) as eight:
        eight_bytes = bind(mask[(*row, at(column + eight * _EIGHT, _EIGHT))])
        rest[0] = tirx.reinterpret("uint64", eight_bytes)
        named = bind(tirx.Cast("int32", tirx.popcount(rest[0])))
        listed, place = bind(count[0]), first_place + eight * _EIGHT
        for i in range(_TWO):
            places[token, listed + i] = place + _take_lowest(rest)
        with loop(0, maximum(named - _TWO, 0)) as i:
            places[token, listed + _TWO + i] = place + _take_lowest(rest)
        count[0] = listed + named


def _take_lowest(rest: KernelTensor) -> Expr:
    """Return the number of the lowest byte that is not 0, and set it to 0; any number where all bytes are 0."""
    word, one = bind(rest[0]), tirx.IntImm("uint64", 1)
    # Ones below the lowest bit that is set: eight for each byte.
    below = bind(tirx.popcount((word - one) & ~word))
    rest[0] = word & (word - one)
    return bind(tirx.Cast("int32", below >> tirx.IntImm("uint64", 3)))


def _decide(
    arguments: FfnArguments,
    vector: Vector,
    memory: ListMemory,
    products: KernelTensor,
    experts: TokenExperts | None,
) -> None:
    """products[j] = x · decide[j] + bias[j] for all neurons, and which of them are above their limits."""
    if experts is not None:
        with parallel(experts.neurons) as place:
            decide_place(arguments, vector, memory, 0, place, experts)
        return
    neurons, is_worth = arguments.spec.neurons, worth_a_region(arguments.bundle.bytes)
    if arguments.gate_limits is None or arguments.spec.is_sparse:
        with parallel(neurons, when_worth=is_worth) as neuron:
            _multiply(arguments, vector, products, neuron)
            compare_with_limit(arguments, memory, 0, neuron)
        return
    # An activation with an exponential takes as long for one neuron as for a vector of them.
    full, rest = divmod(neurons, LANES)
    if full:
        with parallel(full, when_worth=is_worth) as block:
            _decide_together(arguments, vector, memory, first=bind(block * LANES), count=LANES)
    if rest:
        _decide_together(arguments, vector, memory, first=full * LANES, count=rest)


def decide_place(
    arguments: FfnArguments, vector: Vector, memory: ListMemory, token: Expr, place: Expr, experts: TokenExperts
) -> None:
    """Compute the product of a token's neuron with the gating matrix, and whether it is to be listed."""
    matrix = arguments.first_matrix
    neuron = bind(experts.neuron(place))
    ahead = bind(experts.neuron(minimum(place + matrix.rows_ahead, experts.neurons - 1)))
    (product,) = arguments.first_products(neuron, [vector], ahead)
    decide(arguments, memory, token, (place, neuron), product)


def decide(
    arguments: FfnArguments, memory: ListMemory, token: Expr, at_place: tuple[Expr, Expr], product: Expr
) -> None:
    """Keep the product of a token's neuron with the gating matrix, and whether the neuron, (place, number), is to be
    listed."""
    (place, neuron), product, limits = at_place, bind(product), arguments.gate_limits
    assert memory.products is not None
    assert memory.above is not None
    memory.products[token, place] = product
    is_above = product > arguments.spec.threshold
    if limits is not None:
        is_above = arguments.is_above_gate_limit(product, limits, neuron)
    if arguments.mask is not None:
        is_above = tirx.And(is_above, arguments.mask[token, neuron] != 0)
    memory.above[token, place] = tirx.Cast("uint8", is_above)


def _decide_together(arguments: FfnArguments, vector: Vector, memory: ListMemory, first: Expr, count: int) -> None:
    """Multiply, and then compare, the `count` neurons from `first` on: at most a vector of them."""
    products, above, limits = memory.products, memory.above, arguments.gate_limits
    assert products is not None
    assert above is not None
    assert limits is not None
    with loop(0, count) as i:
        _multiply(arguments, vector, products, bind(first + i))
    product, limit = bind(load(products, 0, first, valid=count)), bind(load(limits, first, valid=count))
    store(above, 0, first, value=arguments.are_above_gate_limits(product, limit), valid=count)


def _multiply(arguments: FfnArguments, vector: Vector, products: KernelTensor, neuron: Expr) -> None:
    matrix, row = arguments.first_matrix, arguments.first_row(neuron)
    products[0, neuron] = biased(dot(matrix, row, vector, [row + matrix.rows_ahead]), arguments.first_bias, neuron)


def compare_with_limit(arguments: FfnArguments, memory: ListMemory, token: Expr, neuron: Expr) -> None:
    """Note whether a neuron whose product is known is above the limit of its gate, where there are such limits."""
    if memory.products is None or memory.above is None or arguments.gate_limits is None:
        return
    is_above = arguments.is_above_gate_limit(bind(memory.products[token, neuron]), arguments.gate_limits, neuron)
    memory.above[token, neuron] = tirx.Cast("uint8", is_above)


def _is_computed(arguments: FfnArguments, memory: ListMemory, token: Expr, neuron: Expr) -> Expr:
    """Return whether a neuron is listed: one by its place where its product is known, and else by its number."""
    if memory.above is not None:
        return memory.above[token, neuron]
    if memory.products is not None:
        return memory.products[token, neuron] > arguments.spec.threshold
    column = neuron if arguments.table is None else arguments.table[neuron]
    return arguments.mask[arguments.mask_index(token, column)]  # type: ignore[index]
