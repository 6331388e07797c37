"""`ffn`: a feed-forward block, of which every neuron is computed."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.neurons import experts_fit, gained, gate_is_active, neuron_outputs, neuron_rms
from picompile_passes.dialect.operator import operator

FFN_DIMENSIONS = {
    "x": "TD",
    "gate": "FD",
    "up": "FD",
    "down": "FE",
    "gate_bias": "F",
    "up_bias": "F",
    "down_bias": "E",
}

EXPERT_DIMENSIONS = {"gains": "TG", "expert_bias": "GE"}
"""The dimensions of the operands that only a block of experts has."""


class FfnOperands(NamedTuple):
    """The operands of an `ffn`, and what its neurons give of them."""

    x: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    up_activation: str
    norm_eps: float | None = None
    gains: Tensor | None = None
    expert_bias: Tensor | None = None

    def outputs(self) -> Tensor:
        """Return each neuron's output before a norm across the neurons, times its expert's gain: [T, F]."""
        weights = (self.gate, self.up, self.gate_bias, self.up_bias)
        hidden = neuron_outputs(self.x, *weights, self.activation, self.up_activation)
        return hidden if self.gains is None else gained(hidden, self.gains)

    def result(self, hidden: Tensor) -> Tensor:
        """Return y, given what is multiplied with down: [T, F] → [T, D]."""
        y = F.linear(hidden, self.down.transpose(0, 1), self.down_bias)
        return y if self.gains is None or self.expert_bias is None else y + self.gains @ self.expert_bias


@operator(
    part="block",
    operands=FfnOperands,
    dimensions=FFN_DIMENSIONS | EXPERT_DIMENSIONS,
    result="TE",
    forms=("dense",),
    checks=(gate_is_active, experts_fit),
)
def ffn(block: FfnOperands) -> Tensor:
    """y = h · down + down_bias, h = activation(x · gateᵀ) ∘ up_activation(x · upᵀ): one feed-forward block.

    Without a gate, h = activation(x · upᵀ). `up_activation` is `identity` but for dReLU models (arXiv 2406.05955),
    where it is `relu`. With `norm_eps`, h is divided by sqrt(mean(h²) + norm_eps) before down, the mean being that of
    a token's neurons (BitNet b1.58, arXiv 2504.12285). x [T, D]; gate, up, down [F, D]; gate_bias, up_bias [F];
    down_bias [D] → [T, D].

    A mixture of G experts is one block, whose neurons are those of all experts: expert e is the F / G neurons from
    e · F / G on. `gains` [T, G] comes from `route`: h of a neuron is multiplied by the gain of its expert, and
    `expert_bias` [G, D], each row times its gain, is added to y. An expert whose gain is 0 adds nothing.
    """
    hidden = block.outputs()
    return block.result(hidden if block.norm_eps is None else hidden / neuron_rms(hidden, block.norm_eps))
