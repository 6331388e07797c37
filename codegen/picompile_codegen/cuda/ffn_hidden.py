"""Hidden values of a feed-forward block for one token, on a GPU: gate, up and the activation.

A block of threads has a group of neurons. In `exact`, where gates have limits, and where a mask names neurons of a gate
that can be silent, gate comes first, and up is read only for those that it does not leave out. Elsewhere a warp reads
both rows of a neuron at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import tirx

from picompile_codegen.cpu.ffn_neurons import FfnTensors
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, select, when
from picompile_codegen.cuda.dot import BlockInput, add_part, product
from picompile_codegen.cuda.function import WARP, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import (
    Numbering,
    activate,
    address,
    barrier,
    run_extern,
    shared,
    warp_sum,
    zero_registers,
)


@dataclass(frozen=True)
class CudaFfn(FfnTensors[CudaMatrix]):
    """The tensors of a block for a GPU."""

    def is_named(self, token: Expr, neuron: Expr) -> Expr:
        """Return whether the mask names a neuron."""
        column = neuron if self.table is None else self.table[neuron]
        return self.mask[self.mask_index(token, column)] != tirx.const(0, "uint8")  # type: ignore[index]

    def fires(self, first: Expr, neuron: Expr) -> Expr:
        """Return whether a neuron with the product `first` with `first_matrix` may fire.

        It is above the activation's threshold and, activated, above the limit of its gate, where there are these.
        """
        if self.gate_limits is None:
            return first > self.spec.threshold
        is_above = bind(tirx.abs(activate(self.spec.activation, first))) > self.gate_limits[neuron]
        return tirx.And(first > self.spec.threshold, is_above) if self.spec.is_sparse else is_above

    def sent(self, first: Expr, up: Expr | None, neuron: Expr) -> Expr:
        """Return a neuron's output: h, or 0 if that is within the limit of its output."""
        return self.above_limit(self.output(first, up), neuron)

    def above_limit(self, value: Expr, neuron: Expr) -> Expr:
        """Return h, or 0 if it is within the limit of the neuron's output; what is not a number shows."""
        if self.output_limits is None:
            return value
        value = bind(value)
        return select(tirx.abs(value) <= self.output_limits[neuron], tirx.const(0.0, "float32"), value)

    def output(self, first: Expr, up: Expr | None) -> Expr:
        """Return h from the products with gate and up, biases included (`up` None where there is no gate)."""
        value = activate(self.spec.activation, first)
        return value if up is None else bind(value * activate(self.spec.up_activation, up))


def biased(value: Expr, bias: KernelTensor | None, index: Expr) -> Expr:
    """Return `value` plus its bias, if there is any."""
    return bind(value if bias is None else value + bias[index])


# A block of threads computes one group of neurons.


# A few for each multiprocessor of a large GPU (an RTX 4090 has 128), so that it always has something to read.
_GROUPS = 448
# The block has a thread for each neuron of its group.
_LARGEST = 256


@dataclass(frozen=True)
class NeuronGroups:
    """`count` groups of `size`. Neuron n is in group n mod `count`.

    Neurons that are stored side by side fire alike where they were sorted, so that each group has some of all. There
    may be fewer `neurons` than the groups were made for, and then groups have fewer members, or none.
    """

    neurons: Expr
    size: int
    count: int

    @classmethod
    def of(cls, neurons: int) -> "NeuronGroups":
        """Return groups of whole warps."""
        size = min(blocks_for(neurons, WARP * _GROUPS) * WARP, _LARGEST)
        return cls(neurons, size, blocks_for(neurons, size))

    @property
    def places(self) -> int:
        """Places of all groups together; a few have no neuron."""
        return self.size * self.count

    def members(self, group: Expr) -> Expr:
        """Return how many neurons a group has."""
        return (self.neurons - group + (self.count - 1)) // self.count

    def neuron(self, group: Expr, member: Expr) -> Expr:
        """Return the number of a group's neuron."""
        return member * self.count + group

    def at_place(self, place: Expr) -> Expr:
        """Return the number of the neuron at a place: places 0 … `size` - 1 are the members of group 0, and so on."""
        return self.neuron(place // self.size, place % self.size)


HIDDEN_THREADS = 256


@dataclass(frozen=True)
class _Listed:
    """The first `count` of a group's members to be computed: `member` of a position."""

    member: Callable[[Expr], Expr]
    count: Expr


@dataclass(frozen=True)
class _Group:
    """The work of one block: a token, a group, and the block's memory.

    `products` has a row for each part of the inputs, with room for as many results as there can be.
    """

    block: CudaFfn
    groups: NeuronGroups
    place: ThreadIndex
    inputs: BlockInput
    numbering: Numbering
    products: KernelTensor
    outputs: KernelTensor

    @property
    def token(self) -> Expr:
        return self.place.block

    def neuron(self, member: Expr) -> Expr:
        return self.groups.neuron(self.place.block_y, member)

    def multiply(self, matrix: CudaMatrix, row: Callable[[Expr], Expr], count: Expr, together: int) -> None:
        """Compute x · row `row(i)` of the matrix for i < `count`, to be read by `product`.

        All threads of the block must come. TVM sees no races where each part of `products` is only written. A warp
        reads `together` rows at a time: what it has read of x serves them all, and more reads are under way.
        """
        place, a_turn = self.place, self.inputs.threads // WARP * together
        for part, span in enumerate(self.inputs.parts()):
            vector = self.inputs.fill(span[0], place)
            with loop(0, (count + (a_turn - 1)) // a_turn) as turn:
                first = bind(turn * a_turn + place.warp * together)
                with when(first < count):
                    # Past the last row its own is read again, and nothing written.
                    rows = [bind(row(bind(minimum(first + i, count - 1)))) for i in range(together)]
                    sums = zero_registers(together)
                    add_part(vector, matrix, rows, part=span, sums=sums, lane=place.lane)
                    totals = [warp_sum(sums[i]) for i in range(together)]
                    for i, total in enumerate(totals):
                        with when(tirx.And(place.lane == 0, first + i < count)):
                            self.products[part, first + i] = total
        barrier()


def compute_hidden(block: CudaFfn, groups: NeuronGroups, hidden: KernelTensor, place: ThreadIndex) -> None:
    """hidden[token, place] for all places of this block's group, 0 where nothing is sent down; counts neurons."""
    spec, groups = block.spec, replace(groups, neurons=block.neurons())
    inputs = BlockInput(block.x, place.block, spec.dim, HIDDEN_THREADS)
    products, outputs = shared(len(inputs.parts()), 2 * groups.size), shared(groups.size)
    group = _Group(
        block, groups, place, inputs, numbering=Numbering(HIDDEN_THREADS), products=products, outputs=outputs
    )
    with when(place.thread < groups.size):
        outputs[place.thread] = 0.0
    listed = _named(group) if spec.is_masked else _all(group)
    if spec.is_masked:
        computed = listed.count
        # A group without a named neuron does not even read x.
        with when(computed > 0):
            _compute(group, listed)
    else:
        computed = _compute(group, listed)
    barrier()
    _store(group, hidden, computed)


def _compute(group: _Group, listed: _Listed) -> Expr:
    """Compute the hidden values of listed neurons; return for how many of them all products were computed."""
    spec = group.block.spec
    if spec.is_exact or spec.gate_limits or (spec.is_masked and spec.gated and spec.is_sparse):
        firing = _one_after_the_other(group, listed)
        return firing if spec.is_exact else listed.count
    _at_once(group, listed)
    return listed.count


def _all(group: _Group) -> _Listed:
    return _Listed(lambda position: position, bind(group.groups.members(group.place.block_y)))


def _named(group: _Group) -> _Listed:
    """List the members that the mask names."""
    thread, members = group.place.thread, group.groups.members(group.place.block_y)
    neuron = bind(group.neuron(minimum(thread, members - 1)))
    flag = bind(tirx.if_then_else(thread < members, group.block.is_named(group.token, neuron), False))
    return _those(group, flag, lambda position: thread, [])


def _those(
    group: _Group, flag: Expr, member: Callable[[Expr], Expr], values: list[tuple[KernelTensor, Expr]]
) -> _Listed:
    """List the members of the threads that have a `flag`, and keep their values in the order of the list."""
    members = shared(group.groups.size, dtype="int32")
    thread = group.place.thread
    position, count = group.numbering.number(flag, group.place)
    with when(flag):
        members[position] = member(thread)
        for kept, value in values:
            kept[position] = value
    barrier()
    return _Listed(lambda index: members[index], count)


def _at_once(group: _Group, listed: _Listed) -> None:
    """Compute gate and up of all listed neurons together."""
    block, parts = group.block, 1 + group.block.spec.gated
    # Neurons here and there are few for a block: each to a warp of its own.
    together = 2 if block.spec.gated or not block.spec.is_masked else 1

    def row(index: Expr) -> Expr:
        # Gate and up of a neuron are neighbours in the bundle.
        return block.first_row(group.neuron(listed.member(index // parts))) + index % parts

    group.multiply(block.first_matrix, row, listed.count * parts, together)
    thread = group.place.thread
    with when(thread < listed.count):
        member = bind(listed.member(thread))
        neuron = bind(group.neuron(member))
        first = biased(product(group.products, thread * parts), block.first_bias, neuron)
        up = biased(product(group.products, thread * parts + 1), block.up_bias, neuron) if parts == 2 else None
        group.outputs[member] = block.sent(first, up, neuron)


def _one_after_the_other(group: _Group, listed: _Listed) -> Expr:
    """Compute the gate products of the listed neurons and the rest of those that fire; return how many these are."""
    block, thread = group.block, group.place.thread
    together = 2 if block.spec.is_exact else 1
    row = block.first_row
    group.multiply(block.first_matrix, lambda i: row(group.neuron(listed.member(i))), listed.count, together)
    # There may be nobody listed; then the group's first stands in for what is not used.
    position = bind(tirx.Max(minimum(thread, listed.count - 1), 0))
    is_listed = bind(thread < listed.count)
    decided = tirx.if_then_else(is_listed, product(group.products, position), 0.0)
    member = bind(tirx.if_then_else(is_listed, listed.member(position), 0))
    neuron = group.neuron(member)
    if block.count is not None:  # a group may have no members
        neuron = bind(minimum(neuron, group.groups.neurons - 1))
    first = biased(decided, block.first_bias, neuron)
    firsts = shared(group.groups.size)
    flag = bind(tirx.And(is_listed, block.fires(first, neuron)))
    firing = _those(group, flag, lambda _: member, [(firsts, first)])
    if block.spec.gated:
        group.multiply(block.bundle, lambda i: block.up_row(group.neuron(firing.member(i))), firing.count, 1)
    with when(thread < firing.count):
        member = bind(firing.member(thread))
        up = biased(product(group.products, thread), block.up_bias, group.neuron(member)) if block.spec.gated else None
        group.outputs[member] = block.sent(firsts[thread], up, group.neuron(member))
    return firing.count


def _store(group: _Group, hidden: KernelTensor, computed: Expr) -> None:
    thread, size = group.place.thread, group.groups.size
    value = bind(tirx.if_then_else(thread < size, group.outputs[minimum(thread, size - 1)], 0.0))
    with when(thread < size):
        hidden[group.token, group.place.block_y * size + thread] = value
    _, fired = group.numbering.number(bind(value != 0.0), group.place)
    with when(thread == 0):
        add_counts(group.block.stats, computed, fired)


def add_counts(stats: KernelTensor, computed: Expr, fired: Expr) -> None:
    """Add to `stats` int64 [2] how many neurons were computed, and how many of them fired."""
    for index, count in enumerate((computed, fired)):
        run_extern("pi_add_int64", address(stats, index), count)
