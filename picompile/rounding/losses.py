"""Losses of matrices in a format: the divergence of the model's predictions if only that matrix is rounded.

Windows of text run through the layers once for the model as it is, and once more for each unit of matrices, from the
layer on in which the unit is rounded. Behind the head, the mean of KL(model ‖ model with the unit rounded) over all
tokens is the unit's loss, in nats. Small losses of several units add up, since their errors are independent.

Only one format is tried. The loss grows with the square of the rounding error, whose size in other formats is known
from the weights alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.choices import BUDGET_FORMATS
from picompile.predictors.profile.files import read_notes, write_json
from picompile.progress import Progress
from picompile.rounding.budget import MatrixUnit
from picompile.rounding.matrices import parameter_of
from picompile.streaming import Segment, State, new_states, run_window, segment_constants, split_layers
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import is_call
from picompile_passes.graph.operands import LINEAR, SPARSE_FFN, makes_choices, matrix_operands

# The format that is tried.
_TRIED = BUDGET_FORMATS[0]


def measure_losses(
    graph_module: GraphModule, weights: WeightSource, windows: Sequence[Sequence[int]], progress: Progress
) -> list[MatrixUnit]:
    """Return the matrices of a predicted graph as units, with the loss of each in each format.

    The matrices of a feed-forward block are one unit, since they are read together, and so are those that are made of
    one parameter: fused projections, or a head with the table of embeddings. Matrices that are computed from several
    parameters are left out, and routers, whose format does not change.

    Args:
        graph_module: the graph, not quantized.
        weights: the values of its parameters.
        windows: token ids of some text. Each unit takes as much memory as the hidden states of these.
        progress: is told of the step.
    """
    segments = split_layers(graph_module)
    sites = _sites(segments)
    begins = [min(n for n, segment in enumerate(segments) if site.matrices_in(segment)) for site in sites]
    logits: Node = graph_module.graph.output_node().all_input_nodes[0]
    tokens, states = sum(map(len, windows)), new_states(graph_module, windows)
    variants: list[_Variant] = []
    with progress.step("bits", tokens * sum(1 + sum(b <= n for b in begins) for n in range(len(segments)))) as advance:
        for number, segment in enumerate(segments):
            constants = segment_constants(segment, weights)
            variants += [
                _Variant(site, states, _errors(site, graph_module, weights))
                for site, begin in zip(sites, begins, strict=True)
                if begin == number
            ]
            states = [run_window(segment, constants, state) for state in states]
            advance(tokens)
            for variant in variants:
                variant.run(segment, constants)
                if logits in states[0]:
                    variant.compare([state[logits] for state in states], logits)
                advance(tokens)
    return [variant.unit() for variant in variants]


@dataclass
class _Site:
    """Matrices that are rounded together, and their parameters."""

    name: str
    parameters: list[str]
    matrices: list[Node]

    def matrices_in(self, segment: Segment) -> list[Node]:
        """Return the constants of a segment that are made of these parameters; an embedding's table may be one."""
        sources = ((node, parameter_of(node)) for node in segment.constants)
        return [node for node, source in sources if source is not None and source.target in self.parameters]


def _sites(segments: Sequence[Segment]) -> list[_Site]:
    """Return the units of a graph."""
    found: dict[str, _Site] = {}
    for node in (node for segment in segments for node in segment.nodes if is_call(node, LINEAR, SPARSE_FFN)):
        matrices, is_block = matrix_operands(node), is_call(node, SPARSE_FFN)
        if makes_choices(node):
            continue
        sources = [parameter_of(matrix) for matrix in matrices]
        if not all(sources):
            continue
        parameters = [str(source.target) for source in sources if source is not None]
        known = next((found[name] for name in parameters if name in found), None)
        name = f"feed-forward block {node.meta['layer']}" if is_block else parameters[0]
        site = known or _Site(name, [], [])
        site.parameters += [each for each in dict.fromkeys(parameters) if each not in site.parameters]
        site.matrices += [matrix for matrix in matrices if matrix not in site.matrices]
        found |= dict.fromkeys(parameters, site)
    return list({id(site): site for site in found.values()}.values())


@dataclass(frozen=True)
class _Errors:
    """The weights of a unit, and the squared error of rounding them, by format."""

    weights: int
    squares: Mapping[str, float]


def _errors(site: _Site, graph_module: GraphModule, weights: WeightSource) -> _Errors:
    squares, count = dict.fromkeys(BUDGET_FORMATS, 0.0), 0
    for matrix in site.matrices:
        value = evaluate_constant(graph_module, matrix, weights)
        count += value.numel()
        for form in BUDGET_FORMATS:
            squares[form] += float((_nearest(value, form) - value).square().sum())
    return _Errors(count, squares)


def _nearest(value: Tensor, form: str) -> Tensor:
    return dequantize_rows(quantize_rows(value, form), form, value.shape[1])


@dataclass
class _Variant:
    """The model with one unit rounded: the live values of each window, until its loss is known."""

    site: _Site
    states: list[State]
    errors: _Errors
    loss: float = 0.0

    def run(self, segment: Segment, constants: Mapping[Node, Tensor]) -> None:
        """Run the windows through a segment, with the unit's constants rounded."""
        rounded = {node: _nearest(constants[node], _TRIED) for node in self.site.matrices_in(segment)}
        self.states = [run_window(segment, {**constants, **rounded}, state) for state in self.states]

    def compare(self, exact: Sequence[Tensor], logits: Node) -> None:
        """Take the loss against the `exact` logits of each window, and drop the states."""
        pairs = zip(exact, self.states, strict=True)
        self.loss = sum(divergence(a, b[logits]) for a, b in pairs) / sum(map(len, exact))
        self.states = []

    def unit(self) -> MatrixUnit:
        """Return the unit with its loss in every format."""
        squares = self.errors.squares
        losses = {form: self.loss * squares[form] / (squares[_TRIED] or 1.0) for form in BUDGET_FORMATS}
        return MatrixUnit(self.site.name, tuple(self.site.parameters), self.errors.weights, losses)


def divergence(exact: Tensor, other: Tensor) -> float:
    """Return Σ KL(softmax(exact) ‖ softmax(other)) over the rows of logits [tokens, vocabulary], in nats."""
    p, q = exact.double().log_softmax(dim=-1), other.double().log_softmax(dim=-1)
    return max(float(F.kl_div(q, p, reduction="sum", log_target=True)), 0.0)


def write_losses(path: Path, inputs: str, units: Sequence[MatrixUnit]) -> None:
    """Keep the losses of units, measured for a hash `inputs` of all that they depend on."""
    write_json(path, {"inputs": inputs, "units": [asdict(unit) for unit in units]})


def read_losses(path: Path, inputs: str) -> list[MatrixUnit] | None:
    """Return the units in a file that `write_losses` wrote for the same inputs, or None."""
    notes = read_notes(path)
    if notes.get("inputs") != inputs:
        return None
    return [
        MatrixUnit(each["name"], tuple(each["parameters"]), each["weights"], each["losses"]) for each in notes["units"]
    ]
