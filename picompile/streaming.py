"""Layer streaming: a graph is cut after each layer, and windows of tokens run through one segment at a time.

Memory holds the weights of one segment and the live values of each window.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from picompile.errors import UsageError
from picompile.progress import Advance, NoProgress, Progress
from picompile_passes.graph.layers import layer_of, token_calls
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import constant_nodes, is_call
from picompile_passes.graph.operands import FFN, SPARSE_FFN
from picompile_runtime.bench.perplexity import Perplexity


@dataclass(frozen=True)
class Segment:
    """A run of consecutive calls of a graph.

    `nodes` are the calls that depend on the tokens, in order; `inputs` the values of earlier segments that they read,
    without placeholders; `outputs` the live values after this segment, which later segments or the graph's result read;
    `constants` the values that depend on weights alone. `last_uses` lists, for each node, the values that nothing reads
    after it. `blocks` are the segment's feed-forward blocks.
    """

    graph_module: GraphModule
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    constants: tuple[Node, ...]
    last_uses: dict[Node, tuple[Node, ...]]

    @property
    def blocks(self) -> tuple[Node, ...]:
        """The calls of `ffn` and `sparse_ffn`."""
        return tuple(node for node in self.nodes if is_call(node, FFN, SPARSE_FFN))

    @property
    def title(self) -> str:
        """A short name of the segment: `layer 3`, `embedding` or `head`."""
        first = self.nodes[0]
        return f"layer {first.meta['layer']}" if "layer" in first.meta else str(first.meta["part"])


def split_layers(graph_module: GraphModule) -> tuple[Segment, ...]:
    """Return the segments of a canonical or later graph: the part before the layers, each layer, and the part after.

    A layer without a block is a segment, too.
    """
    constant = constant_nodes(graph_module.graph)
    # Passes may have put a call of one layer among those of another, but none reads a value of a later layer.
    order = sorted(token_calls(graph_module.graph), key=layer_of)
    segments, live = list[Segment](), tuple[Node, ...]()
    for layer, calls in itertools.groupby(order, layer_of):
        nodes = tuple(calls)
        after = tuple(value for value in (*live, *nodes) if any(_reads_behind(user, layer) for user in value.users))
        segments.append(_segment(graph_module, nodes, before=live, after=after, constant=constant))
        live = after
    return tuple(segments)


def _reads_behind(user: Node, layer: float) -> bool:
    return user.op == "output" or layer_of(user) > layer


def _segment(
    graph_module: GraphModule,
    nodes: Sequence[Node],
    before: Sequence[Node],
    after: Sequence[Node],
    constant: frozenset[Node],
) -> Segment:
    own = set(nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    last_uses: dict[Node, tuple[Node, ...]] = {}
    for value in (*before, *nodes):
        user = last_use.get(value, value)
        if value not in after and user in own:
            last_uses[user] = (*last_uses.get(user, ()), value)
    read = {argument for node in nodes for argument in node.all_input_nodes}
    return Segment(
        graph_module=graph_module,
        nodes=tuple(nodes),
        inputs=tuple(node for node in before if node in read),
        outputs=tuple(after),
        constants=tuple(node for node in graph_module.graph.nodes if node in constant and node in read),
        last_uses=last_uses,
    )


State = dict[Node, Tensor]
"""The live values of one window: the graph's inputs, and values of earlier segments that later ones read."""

Observe = Callable[[Node, Tensor], None]
"""Receives a node and its value, window after window in order."""


def stream_windows(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    observe: Observe | None = None,
    progress: Progress | None = None,
    nodes: Collection[Node] | None = None,
    replace: Mapping[Node, Callable[..., Tensor]] | None = None,
) -> None:
    """Run a canonical or predicted graph over `windows` of token ids, each by itself from position 0, in float32.

    `observe` receives the values of `nodes`, which may be any calls that depend on the tokens; the default is the
    logits [tokens, vocabulary]. Segments after the last of these nodes are not run. `replace` is as in `run_segment`.
    """
    if nodes is None:
        nodes = graph_module.graph.output_node().all_input_nodes
    segments = _needed(split_layers(graph_module), nodes)
    states = new_states(graph_module, windows)
    total = sum(map(len, windows)) * len(segments)
    with (progress or NoProgress()).step("layers", total) as advance:
        for segment in segments:
            run_segment(segment, weights, states, observe, nodes, advance, replace)


def new_states(graph_module: GraphModule, windows: Sequence[Sequence[int]]) -> list[State]:
    """Return the states before the first segment: each window's tokens and positions."""
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
    """Run one segment, and leave in `states` the live values after it. `advance` receives token counts.

    Each window's state is replaced as soon as the window has run, so that old and new are never both held for all
    windows. `replace` maps calls to functions that compute them in another way, from the same arguments.
    """
    constants = segment_constants(segment, weights)
    wanted, other = frozenset(nodes), replace or {}
    with torch.no_grad():
        for index, state in enumerate(states):
            # The state is emptied, not copied, so that a value is freed right after its last use.
            values: dict[Node, Any] = constants | state
            state.clear()
            states[index] = _run_window(segment, values, observe, wanted, replace=other)
            advance(_tokens(states[index]))


def segment_constants(segment: Segment, weights: WeightSource) -> dict[Node, Tensor]:
    """Return the constants that a segment reads, float32."""
    return {node: evaluate_constant(segment.graph_module, node, weights) for node in segment.constants}


def run_window(segment: Segment, constants: Mapping[Node, Tensor], state: State) -> State:
    """Return the live values of one window after a segment; `state` has those before it, and stays as it is."""
    with torch.no_grad():
        return _run_window(segment, values={**constants, **state}, observe=None, wanted=frozenset(), replace={})


def trace_window(
    segment: Segment,
    constants: Mapping[Node, Tensor],
    state: State,
    replace: Mapping[Node, Callable[..., Tensor]],
) -> State:
    """Return what `run_window` does, so that gradients flow back to `state`.

    `replace` has a function with gradients for each call that has none.
    """
    with torch.enable_grad():
        return _run_window(segment, values={**constants, **state}, observe=None, wanted=frozenset(), replace=replace)


def observe_segment(
    segment: Segment,
    weights: WeightSource,
    states: Sequence[State],
    nodes: Collection[Node],
    observe: Observe | None,
    replace: Mapping[Node, Callable[..., Tensor]] | None = None,
    unread: Collection[Node] = (),
) -> None:
    """Compute no more of a segment than `nodes` need, and leave `states`, the live values before it, as they are.

    `observe` receives the values of `nodes`, window after window, and `replace` is as in `run_segment`. The constants
    `unread`, which only replaced calls have for arguments, are not computed: they get None.
    """
    part = _part(segment, nodes)
    constants: dict[Node, Any] = {
        node: None if node in unread else evaluate_constant(segment.graph_module, node, weights)
        for node in part.constants
    }
    computed, live = frozenset(nodes).intersection(part.nodes), [node for node in nodes if node not in part.nodes]
    with torch.no_grad():
        for state in states:
            if observe is not None:
                for node in live:
                    observe(node, state[node])
            _run_window(part, values=constants | state, observe=observe, wanted=computed, replace=replace or {})


def window_values(
    segment: Segment,
    weights: WeightSource,
    states: Sequence[State],
    node: Node,
    replace: Mapping[Node, Callable[..., Tensor]] | None = None,
) -> Iterator[Tensor]:
    """Yield the value of `node`, a call of the segment, for one window after another; `states` stay as they are.

    So two graphs can be read side by side, with one window's values in memory. `replace` is as in `run_segment`.
    """
    part, wanted = _part(segment, (node,)), frozenset((node,))
    constants: dict[Node, Any] = {
        each: evaluate_constant(segment.graph_module, each, weights) for each in part.constants
    }
    found: list[Tensor] = []
    for state in states:
        with torch.no_grad():
            _run_window(
                part,
                values=constants | state,
                observe=lambda _, value: found.append(value),
                wanted=wanted,
                replace=replace or {},
            )
        yield found.pop()


def _part(segment: Segment, nodes: Collection[Node]) -> Segment:
    """Return the calls of a segment that `nodes` depend on, these included, as a segment without outputs."""
    own, needed = set(segment.nodes), set[Node]()
    waiting = [node for node in nodes if node in own]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [argument for argument in node.all_input_nodes if argument in own]
    chosen = [node for node in segment.nodes if node in needed]
    return _segment(
        segment.graph_module, nodes=chosen, before=segment.inputs, after=(), constant=frozenset(segment.constants)
    )


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
    """Return `value`, copied if it is a view of a larger tensor, so that the rest can be freed."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _tokens(state: State) -> int:
    return next(len(value) for node, value in state.items() if node.op == "placeholder")


def _needed(segments: Sequence[Segment], nodes: Collection[Node]) -> Sequence[Segment]:
    """Return the segments up to the last one that computes one of `nodes`."""
    wanted = frozenset(nodes)
    known = [i for i, segment in enumerate(segments) if not wanted.isdisjoint(segment.nodes)]
    return segments[: max(known, default=-1) + 1]


# Rows of logits processed at a time: in float64 a row takes 1 MB with a large vocabulary.
_ROWS = 64


def streamed_perplexity(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> float:
    """Return the perplexity: exp of the mean negative log-likelihood, in nats, of every token but each window's first.

    Each window is read without context before it. Raise `UsageError` if no window has two tokens.
    """
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise UsageError("perplexity needs a window of at least 2 tokens; give a longer text")
    total = WindowLoss(windows)
    # Nothing is computed for a window's last token: a window may have one more than the model has positions.
    stream_windows(graph_module, weights, windows=[window[:-1] for window in windows], observe=total, progress=progress)
    return total.perplexity


class WindowLoss:
    """Sums the loss of logits that arrive window after window; an `Observe` function."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        self._windows: Iterator[Sequence[int]] = iter(windows)
        self._tokens = 0
        self.losses: list[float] = []  # of each window so far, in nats

    def __call__(self, node: Node, logits: Tensor) -> None:
        """Add the loss of the next window; logits [tokens, vocabulary]."""
        targets = torch.tensor(list(next(self._windows))[1:])
        self.losses.append(negative_log_likelihood(logits[: len(targets)], targets))
        self._tokens += len(targets)

    @property
    def perplexity(self) -> float:
        """The perplexity of all windows so far."""
        return Perplexity(sum(self.losses), self._tokens).perplexity


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Return the sum over rows of -log softmax(logits)[target], in float64; logits [n, vocabulary], targets [n]."""
    parts = zip(torch.split(logits, _ROWS), torch.split(targets, _ROWS), strict=True)
    return sum(float(F.cross_entropy(rows.double(), ids, reduction="sum")) for rows, ids in parts)
