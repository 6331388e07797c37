"""What each matrix loses in a format: the divergence of the model's predictions when it alone is rounded.

Windows of text run through the layers once for the model as it is, and once more for each unit of matrices, from the
layer on in which the unit is rounded. Behind the head, the mean of KL(model ‖ model with the unit rounded) over all
tokens is the unit's loss, in nats. Small losses of several units add up, since their errors are independent.

Only one format is tried. The loss grows with the square of the rounding error, whose size in other formats is known
from the weights alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.predictors.profile.files import read_notes, write_json
from picompile.progress import Progress
from picompile.rounding.budget import CHOICES, Unit
from picompile.streaming import Segment, State, new_states, run_window, segment_constants, split_layers
from picompile_passes.dialect.formats import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import LINEAR, SPARSE_FFN, TRANSPOSE

# The format that is tried.
_TRIED = "q4"


def measure_losses(
    graph_module: GraphModule, weights: WeightSource, windows: Sequence[Sequence[int]], progress: Progress
) -> list[Unit]:
    """Return the matrices of a predicted graph as units, with what each loses in each format.

    A feed-forward block is one unit, since its matrices are read together; every other matrix is one of its own.
    Matrices that are computed from several parameters are left out.

    Args:
        graph_module: the graph, not quantized.
        weights: the values of its parameters.
        windows: token ids of some text. Each unit takes as much memory as the hidden states of these.
        progress: is told of the step.
    """
    segments = split_layers(graph_module)
    sites = [_sites(segment) for segment in segments]
    logits: Node = graph_module.graph.output_node().all_input_nodes[0]
    tokens, states = sum(map(len, windows)), new_states(graph_module, windows)
    variants: list[_Variant] = []
    with progress.step("bits", tokens * sum(1 + sum(map(len, sites[: n + 1])) for n in range(len(sites)))) as advance:
        for segment, own in zip(segments, sites, strict=True):
            constants = segment_constants(segment, weights)
            rounded = [_rounded(site, constants) for site in own]
            variants += [_Variant(site, states, found) for site, found in zip(own, rounded, strict=True)]
            states = [run_window(segment, constants, state) for state in states]
            advance(tokens)
            for variant in variants:
                variant.run(segment, constants)
                if logits in states[0]:
                    variant.compare([state[logits] for state in states], logits)
                advance(tokens)
    return [variant.unit() for variant in variants]


@dataclass(frozen=True)
class _Site:
    """A call, and the matrices that it multiplies with in one format: they are rounded together."""

    call: Node
    matrices: tuple[Node, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that the matrices are made of."""
        return tuple(str(_parameter(matrix).target) for matrix in self.matrices)

    @property
    def name(self) -> str:
        """The unit's name: its parameter's, or its layer's where it is a feed-forward block."""
        if is_call(self.call, SPARSE_FFN):
            return f"feed-forward block {self.call.meta['layer']}"
        return self.parameters[0]


def _sites(segment: Segment) -> list[_Site]:
    """Return the units of a segment; a matrix that an earlier call has already is left out."""
    found, taken = [], set[str]()
    for node in segment.nodes:
        values = arguments(node) if is_call(node, LINEAR, SPARSE_FFN) else {}
        names = ("weight",) if is_call(node, LINEAR) else ("gate", "up", "down")
        matrices = tuple(values[name] for name in names if isinstance(values.get(name), Node))
        if not matrices or any(_parameter(matrix).op != "get_attr" for matrix in matrices):
            continue
        site = _Site(node, matrices)
        if taken.isdisjoint(site.parameters):
            taken.update(site.parameters)
            found.append(site)
    return found


def _parameter(matrix: Node) -> Node:
    """Return the node that a matrix or its transpose is made of."""
    return matrix.all_input_nodes[0] if is_call(matrix, TRANSPOSE) else matrix


@dataclass(frozen=True)
class _Rounded:
    """A unit's matrices in the format that is tried, its weights, and the squared error of each format."""

    matrices: Mapping[Node, Tensor]
    weights: int
    squares: Mapping[str, float]


def _rounded(site: _Site, constants: Mapping[Node, Tensor]) -> _Rounded:
    squares, rounded = dict.fromkeys(CHOICES, 0.0), {}
    for matrix in site.matrices:
        value = constants[matrix]
        for form in CHOICES:
            near = dequantize_rows(quantize_rows(value, form), form, value.shape[1])
            squares[form] += float((near - value).square().sum())
            if form == _TRIED:
                rounded[matrix] = near
    return _Rounded(rounded, sum(constants[matrix].numel() for matrix in site.matrices), squares)


@dataclass
class _Variant:
    """The model with one unit rounded: the live values of each window, until its loss is known."""

    site: _Site
    states: list[State]
    rounded: _Rounded
    loss: float = 0.0
    _is_rounded: bool = field(default=False)

    def run(self, segment: Segment, constants: Mapping[Node, Tensor]) -> None:
        """Run the windows through a segment: the first has the unit in it."""
        if not self._is_rounded:
            constants = {**constants, **self.rounded.matrices}
            # Needed no more.
            self.rounded, self._is_rounded = _Rounded({}, self.rounded.weights, self.rounded.squares), True
        self.states = [run_window(segment, constants, state) for state in self.states]

    def compare(self, exact: Sequence[Tensor], logits: Node) -> None:
        """Take the loss against the `exact` logits of each window, and drop the states."""
        pairs = zip(exact, self.states, strict=True)
        self.loss = sum(divergence(a, b[logits]) for a, b in pairs) / sum(map(len, exact))
        self.states = []

    def unit(self) -> Unit:
        """Return the unit with its loss in every format."""
        squares = self.rounded.squares
        losses = {form: self.loss * squares[form] / (squares[_TRIED] or 1.0) for form in CHOICES}
        return Unit(self.site.name, self.site.parameters, self.rounded.weights, losses)


def divergence(exact: Tensor, other: Tensor) -> float:
    """Return Σ KL(softmax(exact) ‖ softmax(other)) over the rows of logits [tokens, vocabulary], in nats."""
    p, q = exact.double().log_softmax(dim=-1), other.double().log_softmax(dim=-1)
    return max(float(F.kl_div(q, p, reduction="sum", log_target=True)), 0.0)


def write_losses(path: Path, inputs: str, units: Sequence[Unit]) -> None:
    """Keep the losses of units, measured for a hash `inputs` of all that they depend on."""
    write_json(path, {"inputs": inputs, "units": [asdict(unit) for unit in units]})


def read_losses(path: Path, inputs: str) -> list[Unit] | None:
    """Return the units in a file that `write_losses` wrote for the same inputs, or None."""
    notes = read_notes(path)
    if notes.get("inputs") != inputs:
        return None
    return [Unit(each["name"], tuple(each["parameters"]), each["weights"], each["losses"]) for each in notes["units"]]
