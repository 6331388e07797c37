"""The neurons of a feed-forward block: what they give, for `ffn` and `sparse_ffn`."""

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.activations import parse_activation
from picompile_passes.dialect.operator import Call


def neuron_factors(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    up_activation: str,
) -> tuple[Tensor, Tensor | None]:
    """Return what each neuron's output is the product of, [T, F] each: the activated gate, and what comes of up.

    Without a gate, `activation` applies to up itself: the first is the output, and the second None.
    """
    raised = F.linear(x, up, up_bias)
    act = parse_activation(activation).function
    if gate is None:
        return act(raised), None
    return act(F.linear(x, gate, gate_bias)), parse_activation(up_activation).function(raised)


def neuron_outputs(*operands: Tensor | str | None) -> Tensor:
    """Return the factor of each neuron's down row, [T, F], from the operands of `neuron_factors`."""
    activated, raised = neuron_factors(*operands)  # type: ignore[arg-type]
    return activated if raised is None else activated * raised


def neuron_rms(hidden: Tensor, eps: float) -> Tensor:
    """Return sqrt(mean(h²) + eps) over the neurons of each token: hidden [T, F] → [T, 1]."""
    return (hidden.square().mean(-1, keepdim=True) + eps).sqrt()


class Chosen(NamedTuple):
    """One expert's part of a block: its tokens int64 [n], its neurons, and its gains of these tokens, [n, 1]."""

    tokens: Tensor
    neurons: slice
    gains: Tensor


def chosen_experts(gains: Tensor, neurons: int) -> Iterator[Chosen]:
    """Yield the experts that some token chose, of those whose gains are [T, G] and that have `neurons` together."""
    each = neurons // gains.shape[-1]
    for expert in gains.any(dim=0).nonzero().flatten().tolist():
        tokens = gains[:, expert].nonzero().flatten()
        yield Chosen(tokens, slice(expert * each, (expert + 1) * each), gains[tokens, expert].unsqueeze(-1))


def neuron_gains(gains: Tensor, neurons: int) -> Tensor:
    """Return the gain of the expert of each of `neurons` neurons: gains [T, G] → [T, neurons]."""
    return gains.repeat_interleave(neurons // gains.shape[-1], dim=-1)


def experts_fit(call: Call) -> Iterator[str]:
    """Experts have equally many neurons each; only a block of experts has biases of experts, and none has a norm."""
    values = call.values
    if values["gains"] is None:
        if values["expert_bias"] is not None:
            yield "has expert_bias, but no gains"
        return
    neurons, experts = int(values["up"].meta["val"].shape[0]), call.columns("gains")
    if values.get("neurons") is None and neurons % experts:
        yield f"its {neurons} neurons are of {experts} experts"
    if values.get("norm_eps") is not None or values.get("squares"):
        yield "normalizes the neurons of experts"


def gate_is_active(call: Call) -> Iterator[str]:
    """A gated block has its activation on the gate; otherwise no predictor could tell which neurons are silent."""
    values = call.values
    if values["gate"] is not None and values["activation"] == "identity" != values["up_activation"]:
        yield f"its up has the activation {values['up_activation']}, its gate none"
