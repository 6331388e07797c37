"""Sensitivities: how much the model's predictions depend on each neuron that may be skipped.

Skipping the value v at a place changes the predictions by about ½ (v · g)² nats in Kullback-Leibler divergence,
where g is the gradient, with respect to that value, of the log-probability of a token drawn from the model's own
prediction: the mean of g² is the diagonal of the Fisher information. The sensitivity of a place is the root of that
mean, in nats for a unit of the value. WINA (arXiv 2505.19427) uses the norm of the weights that a value is multiplied
with instead, which ignores the layers behind.

Windows run forward layer by layer, then backward layer by layer, each layer being computed again for its gradients. So
memory holds the weights of one layer, and the values between layers of a few windows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.progress import Advance, Progress
from picompile.skipping.limits import no_limits
from picompile.streaming import Segment, new_states, run_segment, segment_constants, split_layers, trace_window
from picompile_passes.dialect import operator_of
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import NEURON_LIMITS, SPARSE_FFN

# The most bytes that values between layers may take.
_MOST_BYTES = 1 << 30


def measure_sensitivities(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    seed: int,
    progress: Progress,
) -> dict[str, Tensor]:
    """Return the sensitivity of every value that a limit applies to: float32 [values] by the limits' parameter.

    Args:
        graph_module: a predicted graph with limits, whose values play no part here.
        weights: the values of its parameters; those of the limits are not read.
        windows: token ids of some text, each window read by itself.
        seed: of the tokens that are drawn.
        progress: is told of the step.
    """
    segments, weights = split_layers(graph_module), no_limits(graph_module).weights(weights)
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    tokens = sum(map(len, windows))
    with progress.step("sensitivities", 2 * tokens * len(segments)) as advance:
        size = _windows_together(segments, max(map(len, windows)))
        for start in range(0, len(windows), size):
            together = windows[start : start + size]
            for gradients in _gradients(
                graph_module, segments, weights, windows=together, generator=generator, advance=advance
            ):
                for name, gradient in gradients.items():
                    square = gradient.double().square().sum(0)
                    sums[name] = sums[name] + square if name in sums else square
    return {name: (total / tokens).sqrt().float() for name, total in sorted(sums.items())}


def _windows_together(segments: Sequence[Segment], length: int) -> int:
    """Return how many windows' values between layers fit into the memory for these."""
    widths = [math.prod(node.meta["val"].shape[1:]) for segment in segments for node in segment.outputs]
    return max(1, _MOST_BYTES // (4 * length * int(sum(widths))))


def _gradients(
    graph_module: GraphModule,
    segments: Sequence[Segment],
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    generator: torch.Generator,
    advance: Advance,
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients [tokens, values] of a segment and a window, by the limits' parameter, one after another."""
    (logits,) = graph_module.graph.output_node().all_input_nodes
    states, before = new_states(graph_module, windows), []
    for segment in segments:
        before.append([dict(state) for state in states])
        run_segment(segment, weights, states, advance=advance)
    behind: list[dict[Node, Tensor]] = [{} for _ in windows]
    while before:
        segment, states = segments[len(before) - 1], before.pop()
        constants = segment_constants(segment, weights)
        for place, state in enumerate(states):
            probe = _Probe(segment)
            leaves = {node: _leaf(value) for node, value in state.items()}
            after = trace_window(segment, constants, leaves, probe.functions)
            if logits in after:
                _draw(after[logits], generator).backward()  # type: ignore[no-untyped-call]
            else:
                outputs = [(after[n], gradient) for n, gradient in behind[place].items() if after[n].requires_grad]
                # Tokens have no gradient, nor have their embeddings.
                if outputs:
                    torch.autograd.backward([value for value, _ in outputs], [gradient for _, gradient in outputs])
            behind[place] = {node: value.grad for node, value in leaves.items() if value.grad is not None}
            yield probe.gradients()
            advance(len(next(iter(state.values()))))


def _leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_() if value.is_floating_point() else value


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return -Σ log p of one token drawn from each row of logits [tokens, vocabulary]."""
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(-1)
    return F.cross_entropy(logits, drawn, reduction="sum")


@dataclass
class _Probe:
    """Computes a segment so that gradients flow, and keeps the values that limits apply to.

    `kept` has pairs of a limits' parameter and functions that return the gradient [tokens, values], once there is one.
    """

    segment: Segment
    kept: list[tuple[str, Callable[[], Tensor]]] = field(default_factory=list)

    @property
    def functions(self) -> Mapping[Node, Callable[..., Tensor]]:
        """The functions to call instead of the segment's own."""
        found: dict[Node, Callable[..., Tensor]] = {}
        for node in self.segment.nodes:
            if (operator := operator_of(node.target)) is not None:
                found[node] = operator.eager
            if is_call(node, SPARSE_FFN):
                found[node] = self._block(node)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients; those of values that share their limits are added up."""
        found: dict[str, Tensor] = {}
        for name, gradient in self.kept:
            found[name] = found[name] + gradient() if name in found else gradient()
        return found

    def _block(self, node: Node) -> Callable[..., Tensor]:
        limits = [arguments(node)[name] for name in NEURON_LIMITS]
        gate_limits, output_limits = (None if each is None else str(each.target) for each in limits)

        def block(*operands: Any, **named: Any) -> Tensor:
            values = SparseFfnOperands(*operands, **named)
            activated, raised = values.factors()
            hidden = activated if raised is None else activated * raised
            columns = values.mask if values.neurons is None else values.mask.index_select(-1, values.neurons)
            hidden = torch.where(columns, hidden, torch.zeros_like(hidden))
            if hidden.requires_grad:
                hidden.retain_grad()
                self._keep(output_limits, lambda: _grad(hidden))
                if raised is not None:
                    # The gate's gradient is its neuron's, times what multiplies it.
                    self._keep(gate_limits, lambda: _grad(hidden) * raised.detach())
            return values.result(hidden)

        return block

    def _keep(self, name: str | None, gradient: Callable[[], Tensor]) -> None:
        if name is not None:
            self.kept.append((name, gradient))


def _grad(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad
