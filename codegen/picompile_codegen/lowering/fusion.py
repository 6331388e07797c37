"""Fusions: calls of several nodes that are one launch of a GPU.

A launch costs about a microsecond before it begins, and a step has hundreds of small ones. So on a GPU

1. projections of the same input are one, where a step has one token: q, k and v of a layer. Their matrices lie one
   behind the other, and functions with more rows read parts of them;
2. the projection in front of an addition does it, where a step has one token, and the norm behind it as well;
3. other additions are one with those that only they read and with the norm behind them; what they add from the host is
   received there.

Calls of the CPU cost next to nothing, and so it has none of these.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.linear import is_returned, linear_call, norm_call
from picompile_codegen.lowering.packing import name_and_format
from picompile_codegen.lowering.program import Arg, Device
from picompile_codegen.lowering.transfer import pending_receive
from picompile_codegen.specs import LinearAddSpec, SumNormSpec
from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import ADD, LAYER_NORM, LINEAR, RMS_NORM

# The most values that are added in one launch.
_MOST_TERMS = 4
# Results of projections begin at multiples of 64 bytes.
_ALIGNED_OUTPUTS = 16


@dataclass(frozen=True)
class Sum:
    """A sum that the addition `last` ends: `terms` that are added from the left, and the norm of their sum, if any.

    With a `linear` the last term is its result. A term that is `received` is the last one as well.
    """

    last: Node
    terms: tuple[Node, ...]
    linear: Node | None = None
    received: Node | None = None
    norm: Node | None = None
    additions: tuple[Node, ...] = ()

    @property
    def others(self) -> Iterator[Node]:
        """The nodes that are computed with the last addition."""
        yield from self.additions
        yield from (node for node in (self.linear, self.norm) if node is not None)


@dataclass(frozen=True)
class Fusions:
    """Nodes of a function that are lowered together, by the one that is lowered for all of them: the last addition of a
    sum, and the first of projections that are joined. `inside` has all others.
    """

    sums: Mapping[Node, Sum] = field(default_factory=dict)
    joined: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    inside: frozenset[Node] = frozenset()

    def lower(self, node: Node, function: Function) -> Sequence[Node] | None:
        """Append the call of what is lowered together with `node`; return those that got values, or None."""
        if node in self.joined:
            _lower_joined(self.joined[node], function)
            return self.joined[node]
        if node in self.sums:
            found = self.sums[node]
            _lower_sum(found, function)
            return [node] if found.norm is None else [node, found.norm]
        return None


def joined_linears(nodes: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """Return projections that have the same input and format, by the first of them."""
    groups: dict[tuple[Node, str, bool], list[Node]] = {}
    linears = [node for node in nodes if is_call(node, LINEAR)]
    matrices = [name_and_format(arguments(node)["weight"]) for node in linears]
    biases = [arguments(node)["bias"] for node in linears]
    for node, matrix, bias in zip(linears, matrices, biases, strict=True):
        # A matrix or a bias that several projections share has one place.
        is_alone = matrices.count(matrix) == 1 and (bias is None or biases.count(bias) == 1)
        if is_alone and not is_returned(node):
            values = arguments(node)
            if dimension(node) % _ALIGNED_OUTPUTS == 0:
                groups.setdefault((values["x"], matrix[1], values["bias"] is not None), []).append(node)
    return {group[0]: tuple(group) for group in groups.values() if len(group) > 1}


def find_fusions(
    nodes: Sequence[Node],
    devices: Mapping[Node, Device],
    joined: Mapping[Node, tuple[Node, ...]],
    *,
    rows: int,
    lent: Set[Node] = frozenset(),
) -> Fusions:
    """Return what the accelerator computes together of `nodes`, which are in the order in which they are lowered.

    Projections among `lent` are not among it: their weights are the host's, and come in slices.
    """
    finder = _Finder({node: place for place, node in enumerate(nodes)}, devices, rows, set(lent))
    here = {first: group for first, group in joined.items() if rows == 1 and finder.has(group)}
    inside = {node for group in here.values() for node in group[1:]}
    finder.taken |= inside | set(here)
    sums: dict[Node, Sum] = {}
    for node in reversed(nodes):  # an addition comes before those that only it reads
        if node not in inside and (found := finder.sum_at(node)) is not None:
            sums[node] = found
            inside.update(found.others)
    return Fusions(sums, here, frozenset(inside))


@dataclass
class _Finder:
    """Finds sums among nodes with these `places` in their order; projections in `taken` add nothing."""

    places: Mapping[Node, int]
    devices: Mapping[Node, Device]
    rows: int
    taken: set[Node] = field(default_factory=set)

    def has(self, group: Sequence[Node]) -> bool:
        """Return whether the accelerator computes all of a group, with weights that it has."""
        return all(self._is_here(node) and node not in self.taken for node in group)

    def sum_at(self, node: Node) -> Sum | None:
        """Return the sum that `node` ends on the accelerator, None where an ordinary addition does."""
        if not self._is_addition(node):
            return None
        norm = self._norm_of(node)
        if (pair := self._added_to_linear(node)) is not None:
            return Sum(node, pair, linear=pair[1], norm=norm)
        terms, additions = list(_operands(node)), list[Node]()
        while (number := self._inner_addition(terms)) is not None:
            additions.append(terms[number])
            terms[number : number + 1] = _operands(terms[number])
        received = next((term for term in reversed(terms) if self._is_received(term)), None)
        if received is not None:
            terms = [*(term for term in terms if term is not received), received]
        if len(terms) == 2 and received is None and norm is None:
            return None
        return Sum(node, tuple(terms), received=received, norm=norm, additions=tuple(additions))

    def _is_addition(self, node: Node) -> bool:
        if not (is_call(node, ADD) and self._is_here(node)):
            return False
        first, second = _operands(node)
        return first is not second and dimension(first) == dimension(second) == dimension(node)

    def _norm_of(self, node: Node) -> Node | None:
        """Return the norm of whole rows that reads `node` on the accelerator."""
        for user in node.users:
            if self._is_here(user) and is_call(user, RMS_NORM, LAYER_NORM) and arguments(user)["groups"] == 1:
                return user
        return None

    def _added_to_linear(self, node: Node) -> tuple[Node, Node] | None:
        """Return what an addition adds to a projection that only it reads, and the projection."""
        if self.rows > 1:
            return None
        first, second = _operands(node)
        for added, linear in ((first, second), (second, first)):
            is_linear = self._is_here(linear) and is_call(linear, LINEAR) and list(linear.users) == [node]
            if is_linear and linear not in self.taken and self._is_there(added, self.places[linear]):
                return added, linear
        return None

    def _is_there(self, node: Node, place: int) -> bool:
        """Return whether the accelerator has the value of `node` before `place`: nothing waits for it there."""
        if node not in self.places:
            return True
        makers = [node] if self._is_here(node) else [user for user in node.users if self._is_here(user)]
        return any(self.places[each] < place for each in makers)

    def _is_here(self, node: Node) -> bool:
        """Return whether the accelerator computes one of these nodes."""
        return node in self.places and self.devices[node] == "accelerator"

    def _inner_addition(self, terms: Sequence[Node]) -> int | None:
        """Return the place of a term that is an addition which only one node reads, while there is room for its
        terms."""
        for number, term in enumerate(terms if len(terms) < _MOST_TERMS else ()):
            # A projection does its addition itself.
            if self._is_addition(term) and len(term.users) == 1 and self._added_to_linear(term) is None:
                return number
        return None

    def _is_received(self, term: Node) -> bool:
        """Return whether the host makes a term, and the accelerator needs it only here."""
        is_of_host = term in self.places and self.devices[term] == "host"
        return is_of_host and sum(map(self._is_here, term.users)) == 1


def _operands(node: Node) -> tuple[Node, Node]:
    values = arguments(node)
    return values["self"], values["other"]


def _lower_joined(nodes: Sequence[Node], function: Function) -> None:
    """Append the call of projections of the same input; their results are parts of one buffer."""
    spec, bindings = linear_call(nodes[0], function)
    weights, outputs = function.shared.weights, sum(dimension(node) for node in nodes)
    values = [arguments(node) for node in nodes]
    y = function.buffer("joined", "float32", (1, outputs))
    bindings |= {"w": weights.joined_matrix(values[0]["weight"]), "y": y}
    if spec.bias:
        bindings["bias"] = weights.joined_vector(values[0]["bias"])
    function.call(replace(spec, n=outputs), bindings)
    start = 0
    for node in nodes:
        place = Arg("buffer", y.name, dtype="float32", shape=(1, dimension(node)), offset=start * ITEM_BYTES["float32"])
        function.values[node, function.device] = place
        start += dimension(node)


def _lower_sum(found: Sum, function: Function) -> None:
    """Append the call of a sum."""
    norm, of_norm = (None, Bindings()) if found.norm is None else norm_call(found.norm, function)
    vectors = {f"norm_{name}": vector for name, vector in of_norm.items()}
    if found.linear is not None:
        spec, bindings = linear_call(found.linear, function)
        bindings |= {"added": function.value(found.terms[0]), **vectors, **_results(found, function)}
        function.call(LinearAddSpec(spec, norm), bindings)
        return
    pending = None if found.received is None else pending_receive(found.received, function)
    here = found.terms if pending is None else found.terms[:-1]
    bindings = {f"x{number}": function.value(term) for number, term in enumerate(here)}
    bindings |= vectors | ({} if pending is None else pending.bindings)
    bindings |= _results(found, function)
    counted = pending is not None and pending.count is not None
    dim, terms = dimension(found.last), len(found.terms)
    summed = SumNormSpec(dim, function.rows, terms, norm, received=pending is not None, counted=counted)
    function.call(summed, bindings, op="add" if pending is None else "receive")


def _results(found: Sum, function: Function) -> Bindings:
    results: Bindings = {"y": function.result(found.last)}
    return results if found.norm is None else {**results, "normed": function.result(found.norm)}
