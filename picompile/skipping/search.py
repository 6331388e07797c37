"""The search for the largest limits with which the perplexity of a text stays within a bound.

`limits_at` makes the limits of all layers from one number, the price; the search bisects its logarithm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.errors import UnsupportedModelError
from picompile.progress import Progress
from picompile.skipping.limits import Limits, limits_at, no_limits, saved_weights
from picompile.streaming import new_states, run_segment, split_layers
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import NEURON_LIMITS, SPARSE_FFN

# Prices are powers of two, with steps of an eighth between these exponents.
_LOWEST, _HIGHEST, _STEPS = -26, -4, 8


@dataclass(frozen=True)
class Rise:
    """The rise of a text's mean loss by limits, in nats, and its standard error.

    The text is a sample, and the losses of single tokens go up and down by far more than their mean.
    """

    nats: float
    error: float

    def within(self, bound: float) -> bool:
        """Return whether the rise, and its standard error on top, keep perplexity within a share `bound`."""
        return self.nats + self.error <= math.log1p(bound)


@dataclass
class SkippingSearch:
    """Searches for the limits of a predicted graph.

    Attributes:
        graph_module: the graph, with limits.
        weights: the values of its parameters but for the limits.
        sensitivities: by the limits' parameter, as `measure_sensitivities` returns them.
        windows: token ids of the text that perplexity is measured on.
        bound: the share by which it may rise.
        progress: is told of each step.
        tried: the rise at each step that was tried.
        save: receives `tried` whenever there is more.
    """

    graph_module: GraphModule
    weights: WeightSource
    sensitivities: Mapping[str, Tensor]
    windows: Sequence[Sequence[int]]
    bound: float
    progress: Progress
    tried: dict[int, Rise] = field(default_factory=dict)
    save: Callable[[Mapping[int, Rise]], None] = lambda tried: None

    def run(self) -> "FoundLimits":
        """Return the limits found.

        Raises:
            UnsupportedModelError: the model's logits are not finite numbers.
        """
        whole = self._losses(no_limits(self.graph_module), "whole")
        if not np.isfinite(whole).all():
            raise UnsupportedModelError("the model's logits are not finite numbers: its weights are damaged")
        low, high = 0, (_HIGHEST - _LOWEST) * _STEPS
        while high - low > 1:
            middle = (low + high) // 2
            if middle not in self.tried:
                self.tried[middle] = self._rise(whole, self._losses(self._limits(middle), _title(middle)))
                self.save(self.tried)
            low, high = (middle, high) if self.tried[middle].within(self.bound) else (low, middle)
        limits, left_out = self._limits(low), dict[str, float]()
        # Once more: what is left out is counted, and the limits that are found need not be those that were tried last.
        losses = self._losses(limits, _title(low), left_out)
        return FoundLimits(
            limits=limits,
            price=price_of(low),
            rise=self._rise(whole, losses),
            perplexity=float(np.exp(losses.mean())),
            tokens=len(losses),
            left_out=left_out,
        )

    def _limits(self, step: int) -> Limits:
        return limits_at(self.sensitivities, saved_weights(self.graph_module), price_of(step))

    def _rise(self, whole: NDArray[np.float64], losses: NDArray[np.float64]) -> Rise:
        """Return the mean rise of tokens' losses; the windows are as many samples of it."""
        rises = losses - whole
        if not np.isfinite(rises).all():
            return Rise(math.inf, 0.0)
        ends = np.cumsum([len(window) - 1 for window in self.windows])[:-1]
        windows = np.array([part.mean() for part in np.split(rises, ends) if len(part)])
        error = windows.std(ddof=1) / math.sqrt(len(windows)) if len(windows) > 1 else 0.0
        return Rise(float(rises.mean()), float(error))

    def _losses(self, limits: Limits, name: str, left_out: dict[str, float] | None = None) -> NDArray[np.float64]:
        """Return each token's loss with these limits, in nats; put the share that each leaves out into `left_out`."""
        segments, states = split_layers(self.graph_module), new_states(self.graph_module, self.windows)
        logits = self.graph_module.graph.output_node().all_input_nodes
        weights, found = limits.weights(self.weights), list[Tensor]()
        targets = (torch.tensor(list(window)[1:]) for window in self.windows)
        tokens, counts = sum(map(len, self.windows)), dict[str, int]()
        replace = {} if left_out is None else count_left_out(self.graph_module, counts)

        def score(node: Node, rows: Tensor) -> None:
            found.append(F.cross_entropy(rows[:-1].double(), next(targets), reduction="none"))

        with self.progress.step(name, tokens * len(segments)) as advance:
            for segment in segments:
                run_segment(segment, weights, states, observe=score, nodes=logits, advance=advance, replace=replace)
        if left_out is not None:
            left_out |= {key: counts[key] / tokens / len(limits.tensors[key]) for key in sorted(counts)}
        return torch.cat(found).numpy()


@dataclass(frozen=True)
class FoundLimits:
    """Limits, and their effect on the text that they were searched on.

    `left_out` has the share of neurons left out by each limits' parameter: by their gate, or by their gate or output.
    """

    limits: Limits
    price: float
    rise: Rise
    perplexity: float
    tokens: int
    left_out: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the report's `skipping`."""
        return {
            "price": self.price,
            "perplexity": self.perplexity,
            "relative_change": math.expm1(self.rise.nats),
            "error_nats": self.rise.error,
            "tokens": self.tokens,
            "left_out": dict(self.left_out),
        }


def _title(step: int) -> str:
    return f"skipping at {price_of(step):.2g}"


def price_of(step: int) -> float:
    """Return the price of a step of the search, as `limits_at` takes it."""
    return float(2.0 ** (_LOWEST + step / _STEPS))


def count_left_out(graph_module: GraphModule, counts: dict[str, int]) -> dict[Node, Callable[..., Tensor]]:
    """Return functions for the calls with limits; they count in `counts` what the limits skip."""
    return {node: _counted(node, counts) for node in calls(graph_module.graph, SPARSE_FFN)}


def _counted(node: Node, counts: dict[str, int]) -> Callable[..., Tensor]:
    compute: Any = node.target
    names = [arguments(node)[name] for name in NEURON_LIMITS]

    def block(*operands: Any, **named: Any) -> Tensor:
        whole = SparseFfnOperands(*operands, **named)
        for name, limited in zip(names, (whole._replace(output_limits=None), whole), strict=True):
            if name is not None:
                left_out = int((limited.kept_outputs() == 0).sum())
                counts[str(name.target)] = counts.get(str(name.target), 0) + left_out
        y: Tensor = compute(*whole)
        return y

    return block
