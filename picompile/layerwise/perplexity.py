"""Perplexity of a graph, layer by layer."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.errors import UsageError
from picompile.layerwise.run import run_layerwise
from picompile.progress import Progress
from picompile_passes.materialize import WeightSource
from picompile_runtime.perplexity import Perplexity

# Rows of logits that are worked on at a time: in float64 a large vocabulary takes 1 MB each.
_ROWS = 64


def layerwise_perplexity(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> float:
    """exp of the mean negative log-likelihood, in nats, of every token of every window but each window's first.

    Each window is read with nothing before it. Raises `UsageError` where no window has two tokens.
    """
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise UsageError("perplexity needs a window of at least 2 tokens; give a longer text")
    total = WindowLoss(windows)
    run_layerwise(graph_module, weights, windows, total, progress)
    return total.perplexity


class WindowLoss:
    """Sums up the loss of logits that come window after window, as `Observe` has it."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        self._windows: Iterator[Sequence[int]] = iter(windows)
        self._nll, self._tokens = 0.0, 0

    def __call__(self, node: Node, logits: Tensor) -> None:
        """logits [tokens, vocabulary] of the next window."""
        targets = torch.tensor(list(next(self._windows))[1:])
        self._nll += negative_log_likelihood(logits[:-1], targets)
        self._tokens += len(targets)

    @property
    def perplexity(self) -> float:
        """Of all windows so far."""
        return Perplexity(self._nll, self._tokens).perplexity


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Sum over the rows of -log softmax(logits)[target], in float64; logits [n, vocabulary], targets [n]."""
    parts = zip(torch.split(logits, _ROWS), torch.split(targets, _ROWS), strict=True)
    return sum(float(F.cross_entropy(rows.double(), ids, reduction="sum")) for rows, ids in parts)
