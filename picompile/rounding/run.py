"""Rounding a model layer by layer, each layer for the inputs that it gets from the rounded layers before it.

A layer's matrices are rounded group by group, in the order in which they are used: once the queries, keys and values of
a layer are rounded, the windows run up to its attention output, and so on. So every matrix sees the inputs that it will
get, and memory holds one layer with the moments of one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.progress import Progress
from picompile.rounding.compensate import round_neurons, round_rows
from picompile.rounding.matrices import InputGroup, Matrix, MatrixKey, Moments, input_groups
from picompile.rounding.store import RoundedWeights, RoundingDirectory
from picompile.streaming import Segment, State, observe_segment, run_segment, split_layers
from picompile_passes.formats import FORMATS
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments

_PASS = "rounding"


def round_model(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    directory: RoundingDirectory,
    progress: Progress,
) -> RoundedWeights:
    """Round the matrices of a quantized graph that is not partitioned; return a source that has them.

    Args:
        graph_module: the graph. The matrices of a part of a block are rows of the whole block's, so that the result
            serves every partition.
        weights: what its matrices are made of. What it has in the bytes of their formats already stays as it is.
        windows: token ids of the calibration text.
        directory: where the result is kept; what an unfinished run has left there is gone on with.
        progress: is told of each step.

    Raises:
        UnsupportedModelError: the model's values are not finite numbers.
    """
    segments = split_layers(graph_module)
    rounded = RoundedWeights(weights)
    plan = [_Segment(segment, _to_round(segment, weights)) for segment in segments]
    first, states = len(plan), list[State]()
    if not directory.complete:
        if directory.open():
            progress.say(f"{directory.folder}: was begun, and goes on")
        first, states, _ = directory.state.load(_PASS, graph_module, segments, windows)
    for number, part in enumerate(plan[:first]):
        directory.add_to(rounded, number, part.forms)
    if first == len(plan):
        return rounded
    total = sum(map(len, windows)) * sum(len(part.groups) + 1 for part in plan[first:])
    with progress.step("rounding", total) as advance:
        for number, part in enumerate(plan[first:], start=first):
            run = _SegmentRun(graph_module, part, rounded, directory, number, states)
            for group in part.groups:
                run.round(group)
                advance(sum(map(len, windows)))
            if number + 1 < len(plan):
                run_segment(part.segment, rounded, states, advance=advance)
                directory.state.save(_PASS, number + 1, states, {})
    directory.finish()
    return rounded


@dataclass(frozen=True)
class _Segment:
    """A segment, and the groups of its matrices that are to be rounded."""

    segment: Segment
    groups: Sequence[InputGroup]

    @property
    def forms(self) -> dict[MatrixKey, str]:
        """The format of each of these matrices."""
        return {matrix.key: matrix.form for group in self.groups for matrix in group.matrices}


def _to_round(segment: Segment, weights: WeightSource) -> list[InputGroup]:
    """Return the groups of a segment without the matrices that `weights` has in their formats already."""
    source = RoundedWeights(weights)
    groups = []
    for group in input_groups(segment):
        matrices = [each for each in group.matrices if source.packed(each.key[0], each.form, each.key[1]) is None]
        if matrices:
            groups.append(InputGroup(group.node, group.of_neurons, matrices))
    return groups


@dataclass
class _SegmentRun:
    """The rounding of one segment; `states` are the live values of each window before it."""

    graph_module: GraphModule
    part: _Segment
    rounded: RoundedWeights
    directory: RoundingDirectory
    number: int
    states: list[State]

    def __post_init__(self) -> None:
        """Begin with no matrix."""
        self._done: dict[MatrixKey, Tensor] = {}

    def round(self, group: InputGroup) -> None:
        """Round the matrices of one group, and let all that comes after see them."""
        moments = self._moments(group)
        for matrix in group.matrices:
            self._done[matrix.key] = self._rounded(matrix, moments)
        forms = {key: self.part.forms[key] for key in self._done}
        self.directory.write(self.number, self._done, forms)
        self.directory.add_to(self.rounded, self.number, forms)

    def _moments(self, group: InputGroup) -> Tensor:
        moments = Moments(group.matrices[0].inputs)
        if not group.of_neurons:
            nodes = (group.node,)
            observe_segment(
                self.part.segment,
                weights=self.rounded,
                states=self.states,
                nodes=nodes,
                observe=lambda _, value: moments.add(value),
            )
            return moments.sum
        # The product with down is left out, and so is its matrix, which is not rounded yet.
        down: Node = arguments(group.node)["down"]
        replace = {group.node: moments.add_neurons}
        observe_segment(
            self.part.segment,
            weights=self.rounded,
            states=self.states,
            nodes=(group.node,),
            observe=None,
            replace=replace,
            unread=(down,),
        )
        return moments.sum

    def _rounded(self, matrix: Matrix, moments: Tensor) -> Tensor:
        value = evaluate_constant(self.graph_module, matrix.value, self.rounded.base)
        rounding = round_neurons if matrix.rows_are_inputs else round_rows
        return rounding(value, moments, FORMATS[matrix.form])
