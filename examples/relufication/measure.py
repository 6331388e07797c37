"""How far the copy is from the original on held-out text, and how often its neurons fire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from relufication.pair import Pair, feed_forward_blocks, seen_neurons


def divergence(original: Tensor, copy: Tensor) -> Tensor:
    """The mean KL divergence of next-token distributions, in nats a token. Logits `[..., vocab]` twice → `[]`"""
    exact, other = original.flatten(0, -2).log_softmax(-1), copy.flatten(0, -2).log_softmax(-1)
    return functional.kl_div(other, exact, log_target=True, reduction="batchmean")


@torch.no_grad()
def count_firings(model: nn.Module, windows: Tensor) -> Tensor:
    """For how many tokens each neuron fires: its output is not zero. `[windows, window] → [layers, neurons]`"""
    counts: dict[int, Tensor] = {}

    def see(layer: int, neurons: Tensor, _: Tensor) -> None:
        counts[layer] = counts.get(layer, 0) + (neurons != 0).flatten(0, -2).sum(0)

    with seen_neurons(model, see):
        for window in windows:
            model(window[None], use_cache=False)
    return torch.stack([counts[layer] for layer in range(len(counts))])


@torch.no_grad()
def measure(pair: Pair, windows: Tensor) -> dict[str, Any]:
    """Losses of both models in nats a token, the divergence, and the share of neurons that fire, layer by layer."""
    losses = {"original_loss": 0.0, "loss": 0.0, "kl": 0.0}
    fired = [0.0] * len(feed_forward_blocks(pair.copy))

    def see(layer: int, neurons: Tensor, _: Tensor) -> None:
        fired[layer] += float((neurons != 0).float().mean()) / len(windows)

    with seen_neurons(pair.copy, see):
        for window in windows:
            exact, other = (model(window[None], use_cache=False).logits[0] for model in (pair.original, pair.copy))
            for name, logits in (("original_loss", exact), ("loss", other)):
                losses[name] += float(functional.cross_entropy(logits[:-1], window[1:])) / len(windows)
            losses["kl"] += float(divergence(exact, other)) / len(windows)
    return {"tokens": windows.numel(), **losses, "firing": [round(share, 5) for share in fired]}
