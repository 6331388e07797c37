"""Running windows of tokens through segments."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from picompile.layerwise.segments import Segment, split_layers
from picompile.progress import Advance, NoProgress, Progress
from picompile_passes.materialize import WeightSource, evaluate_constant

State = dict[Node, Tensor]
"""What is alive of one window: the graph's inputs, and what earlier segments computed and later ones read."""

Observe = Callable[[Node, Tensor], None]
"""Receives a node and its value, window after window in order."""


def run_layerwise(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    observe: Observe | None = None,
    progress: Progress | None = None,
    nodes: Collection[Node] | None = None,
) -> None:
    """Runs a canonical or predicted graph over `windows` of token ids, each by itself from position 0, in float32.

    `observe` receives the values of `nodes`, any calls that depend on the tokens; without `nodes` those of the logits
    [tokens, vocabulary]. The segments behind the last of them are not run.
    Memory holds the weights of one segment and what is alive of each window.
    """
    if nodes is None:
        nodes = graph_module.graph.output_node().all_input_nodes
    segments = _needed(split_layers(graph_module), nodes)
    states = new_states(graph_module, windows)
    total = sum(map(len, windows)) * len(segments)
    with (progress or NoProgress()).step("layers", total) as advance:
        for segment in segments:
            run_segment(segment, weights, states, observe, nodes, advance)


def new_states(graph_module: GraphModule, windows: Sequence[Sequence[int]]) -> list[State]:
    """The states before the first segment: each window's tokens and positions."""
    tokens, positions = (node for node in graph_module.graph.nodes if node.op == "placeholder")
    return [{tokens: torch.tensor(list(ids)), positions: torch.arange(len(ids))} for ids in windows]


def run_segment(
    segment: Segment,
    weights: WeightSource,
    states: list[State],
    observe: Observe | None = None,
    nodes: Collection[Node] = (),
    advance: Advance = lambda count: None,
    replace: Mapping[Node, Callable[..., Tensor]] | None = None,
) -> None:
    """Runs one segment and leaves in `states` what is alive behind it. `advance` receives tokens.

    Each window's state is replaced as soon as the window is through, so that no two of them are held whole.
    `replace` computes a call in another way: it receives the arguments and gives the value.
    """
    constants = {node: evaluate_constant(segment.graph_module, node, weights) for node in segment.constants}
    wanted, other = frozenset(nodes), replace or {}
    with torch.no_grad():
        for index, state in enumerate(states):
            # Emptied rather than copied: a value that was read for the last time is gone at once.
            values: dict[Node, Any] = constants | state
            state.clear()
            states[index] = _run_window(segment, values, observe, wanted, other)
            advance(_tokens(states[index]))


def _run_window(
    segment: Segment,
    values: dict[Node, Any],
    observe: Observe | None,
    wanted: frozenset[Node],
    replace: Mapping[Node, Callable[..., Tensor]],
) -> State:
    for node in segment.nodes:
        function: Any = replace.get(node, node.target)
        values[node] = function(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))
        if observe is not None and node in wanted:
            observe(node, values[node])
        for dead in segment.last_uses.get(node, ()):
            del values[dead]
    placeholders = [node for node in values if node.op == "placeholder"]
    return {node: values[node] for node in placeholders} | {node: _own(values[node]) for node in segment.outputs}


def _own(value: Tensor) -> Tensor:
    """`value` without the rest of a larger one that it is a view of."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _tokens(state: State) -> int:
    return next(len(value) for node, value in state.items() if node.op == "placeholder")


def _needed(segments: Sequence[Segment], nodes: Collection[Node]) -> Sequence[Segment]:
    """The segments up to the last that computes one of `nodes`."""
    wanted = frozenset(nodes)
    known = [i for i, segment in enumerate(segments) if not wanted.isdisjoint(segment.nodes)]
    return segments[: max(known, default=-1) + 1]
