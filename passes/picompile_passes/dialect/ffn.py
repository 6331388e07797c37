"""`ffn`: a feed-forward block, of which every neuron is computed."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.neurons import (
    Chosen,
    chosen_experts,
    experts_fit,
    gate_is_active,
    neuron_outputs,
    neuron_rms,
)
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

    def experts(self) -> Iterator[tuple[Chosen, "FfnOperands"]]:
        """Yield each expert that some token chose, as a block of its own for these tokens, without gains and biases."""
        assert self.gains is not None
        for chosen in chosen_experts(self.gains, len(self.up)):
            own = {name: getattr(self, name) for name in ("gate", "up", "down", "gate_bias", "up_bias")}
            rows: dict[str, Any] = {name: each[chosen.neurons] for name, each in own.items() if each is not None}
            x = self.x[chosen.tokens]
            yield chosen, self._replace(x=x, **rows, down_bias=None, gains=None, expert_bias=None)

    def outputs(self) -> Tensor:
        """Return each neuron's output before a norm across the neurons, times its expert's gain: [T, F].

        Those of experts that a token did not choose are 0, and are not computed.
        """
        if self.gains is None:
            weights = (self.gate, self.up, self.gate_bias, self.up_bias)
            return neuron_outputs(self.x, *weights, self.activation, self.up_activation)
        hidden = self.x.new_zeros(len(self.x), len(self.up))
        for chosen, expert in self.experts():
            hidden[chosen.tokens, chosen.neurons] = expert.outputs() * chosen.gains
        return hidden

    def result(self, hidden: Tensor) -> Tensor:
        """Return y, given what is multiplied with down: [T, F] → [T, D]."""
        if self.gains is None:
            return F.linear(hidden, self.down.transpose(0, 1), self.down_bias)
        return self._sum((chosen, expert, hidden[chosen.tokens, chosen.neurons]) for chosen, expert in self.experts())

    def y(self) -> Tensor:
        """Return y of a block; of experts, no more outputs are held than one expert's."""
        if self.gains is not None:
            flat = self._replace(x=self.x.flatten(0, -2), gains=self.gains.flatten(0, -2))
            y = flat._sum((chosen, expert, expert.outputs() * chosen.gains) for chosen, expert in flat.experts())
            return y.reshape(*self.x.shape[:-1], -1)
        hidden = self.outputs()
        return self.result(hidden if self.norm_eps is None else hidden / neuron_rms(hidden, self.norm_eps))

    def _sum(self, experts: Iterable[tuple[Chosen, "FfnOperands", Tensor]]) -> Tensor:
        """Return y, given each expert's outputs times its gains."""
        y = self.x.new_zeros(len(self.x), self.down.shape[1])
        for chosen, expert, hidden in experts:
            y.index_add_(0, chosen.tokens, expert.result(hidden))
        y = y if self.down_bias is None else y + self.down_bias
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
    return block.y()
