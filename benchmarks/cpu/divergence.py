"""The loss of a model's copy on a text: in perplexity, and as KL divergence of its predictions from the model's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.rounding.losses import divergence
from picompile.streaming import negative_log_likelihood

Windows = Sequence[Sequence[int]]
# Windows whose logits are in memory at a time.
_TOGETHER = 4


@dataclass(frozen=True)
class Loss:
    """The perplexity of a copy, its rise above the model's as a share, and the mean KL divergence in nats."""

    perplexity: float
    relative_change: float
    kl_nats: float


def measure_loss(
    windows: Windows, exact: Callable[[Windows, int], list[Tensor]], other: Callable[[Windows], list[Tensor]]
) -> Loss:
    """Read the windows, a few at a time; `exact` gives the model's logits, from the number of the first window."""
    nll, base, kl, tokens = 0.0, 0.0, 0.0, 0
    for start in range(0, len(windows), _TOGETHER):
        some = windows[start : start + _TOGETHER]
        for of_model, of_copy, ids in zip(exact(some, start), other(some), some, strict=True):
            targets = torch.tensor(list(ids)[1:])
            base += negative_log_likelihood(of_model[:-1], targets)
            nll += negative_log_likelihood(of_copy[:-1], targets)
            kl += divergence(of_model[:-1], of_copy[:-1])
            tokens += len(targets)
    return Loss(math.exp(nll / tokens), math.expm1((nll - base) / tokens), kl / tokens)
