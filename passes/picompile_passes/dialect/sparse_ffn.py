"""`sparse_ffn`: a feed-forward block, of which the neurons of a mask are computed."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.ffn import EXPERT_DIMENSIONS, FFN_DIMENSIONS
from picompile_passes.dialect.neurons import (
    Chosen,
    chosen_experts,
    experts_fit,
    gate_is_active,
    neuron_factors,
    neuron_gains,
)
from picompile_passes.dialect.operator import Call, operator

_LIMITS = {"gate_limits": "F", "output_limits": "F"}
_OF_NEURONS = ("gate", "up", "down", "gate_bias", "up_bias", *_LIMITS)


class SparseFfnOperands(NamedTuple):
    """The operands of a `sparse_ffn`, and what its neurons give of them."""

    x: Tensor
    mask: Tensor
    neurons: Tensor | None
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    up_activation: str
    squares: bool = False
    gate_limits: Tensor | None = None
    output_limits: Tensor | None = None
    gains: Tensor | None = None
    expert_bias: Tensor | None = None

    def neuron_gains(self) -> Tensor | None:
        """Return the gain of each neuron's expert [T, F]; None for a block without experts."""
        if self.gains is None:
            return None
        gains = neuron_gains(self.gains, self.mask.shape[-1])
        return gains if self.neurons is None else gains.index_select(-1, self.neurons)

    def experts(self) -> Iterator[tuple[Chosen, "SparseFfnOperands"]]:
        """Yield each expert that some token chose, as a block of its own for these tokens, without gains and biases."""
        assert self.gains is not None and self.neurons is None
        for chosen in chosen_experts(self.gains, len(self.up)):
            own = {name: getattr(self, name) for name in _OF_NEURONS}
            rows: dict[str, Any] = {name: each[chosen.neurons] for name, each in own.items() if each is not None}
            x, mask = self.x[chosen.tokens], self.mask[chosen.tokens, chosen.neurons]
            yield chosen, self._replace(x=x, mask=mask, **rows, down_bias=None, gains=None, expert_bias=None)

    def _has_whole_experts(self) -> bool:
        """Return whether it is a block of experts that has all of their neurons, and no table of some."""
        return self.gains is not None and self.neurons is None

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Return the `neuron_factors`; those of experts that a token did not choose are 0, and are not computed."""
        if not self._has_whole_experts():
            matrices, biases = (self.x, self.gate, self.up), (self.gate_bias, self.up_bias)
            return neuron_factors(*matrices, *biases, self.activation, self.up_activation)
        activated = self.x.new_zeros(len(self.x), len(self.up))
        raised = None if self.gate is None else torch.zeros_like(activated)
        for chosen, expert in self.experts():
            activated[chosen.tokens, chosen.neurons], of_up = expert.factors()
            if raised is not None and of_up is not None:
                raised[chosen.tokens, chosen.neurons] = of_up
        return activated, raised

    def outputs(self) -> Tensor:
        """Return the factor of each neuron's down row, also of neurons that the mask leaves out: [T, F]."""
        activated, raised = self.factors()
        return activated if raised is None else activated * raised

    def kept_outputs(self) -> Tensor:
        """Return the output of each neuron, 0 for a neuron that is left out: [T, F]. Gains of experts are not in it."""
        return self.keep(*self.factors())

    def keep(self, activated: Tensor, raised: Tensor | None) -> Tensor:
        """Return the `kept_outputs`, given the `factors`."""
        hidden = activated if raised is None else activated * raised
        kept = self.mask if self.neurons is None else self.mask.index_select(-1, self.neurons)
        if (gains := self.neuron_gains()) is not None:
            kept = kept & (gains != 0)
        if self.gate_limits is not None and raised is not None:
            kept = kept & (activated.abs() > self.gate_limits)
        if self.output_limits is not None:
            kept = kept & ~(hidden.abs() <= self.output_limits)
        # `where`, not a product: a skipped neuron that overflowed to infinity must not turn into NaN.
        return torch.where(kept, hidden, torch.zeros_like(hidden))

    def result(self, kept: Tensor) -> Tensor:
        """Return y, given the `kept_outputs`."""
        if self._has_whole_experts():
            return self._sum((chosen, expert, kept[chosen.tokens, chosen.neurons]) for chosen, expert in self.experts())
        if (gains := self.neuron_gains()) is not None:
            kept = torch.where(gains != 0, kept * gains, torch.zeros_like(kept))
        y = self._with_expert_biases(F.linear(kept, self.down.transpose(0, 1), self.down_bias))
        return torch.cat([y, kept.square().sum(-1, keepdim=True)], dim=-1) if self.squares else y

    def y(self) -> Tensor:
        """Return the `result` of the `kept_outputs`; of experts, no more of these is held than one expert's."""
        if self.gains is None or not self._has_whole_experts():
            return self.result(self.kept_outputs())
        by_token = {"x": self.x, "mask": self.mask, "gains": self.gains}
        flat = self._replace(**{name: each.flatten(0, -2) for name, each in by_token.items()})  # type: ignore[arg-type]
        y = flat._sum((chosen, expert, expert.kept_outputs()) for chosen, expert in flat.experts())
        return y.reshape(*self.x.shape[:-1], -1)

    def _sum(self, experts: Iterable[tuple[Chosen, "SparseFfnOperands", Tensor]]) -> Tensor:
        """Return y, given what is kept of each expert's outputs."""
        y = self.x.new_zeros(len(self.x), self.down.shape[1])
        for chosen, expert, kept in experts:
            y.index_add_(0, chosen.tokens, expert.result(kept * chosen.gains))
        return self._with_expert_biases(y if self.down_bias is None else y + self.down_bias)

    def _with_expert_biases(self, y: Tensor) -> Tensor:
        return y if self.gains is None or self.expert_bias is None else y + self.gains @ self.expert_bias


def _limits_fit(call: Call) -> Iterator[str]:
    """Limits of neurons are float32; only a block with a gate has limits of it."""
    for name in _LIMITS:
        limits = call.values[name]
        if limits is not None and limits.meta["val"].dtype != torch.float32:
            yield f"its {name} are {call.text(name)}, not float32"
    if call.values["gate_limits"] is not None and call.values["gate"] is None:
        yield "has gate_limits, but no gate"


def _with_squares(x: Tensor, down: Tensor, squares: bool, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[1] + squares))


@operator(
    part="block",
    operands=SparseFfnOperands,
    dimensions=FFN_DIMENSIONS | {"mask": "TM", "neurons": "F"} | _LIMITS | EXPERT_DIMENSIONS,
    result=_with_squares,
    packed=("gate", "up", "down"),
    forms=("sparse",),
    checks=(gate_is_active, experts_fit, _limits_fit),
)
def sparse_ffn(block: SparseFfnOperands) -> Tensor:
    """y = Σ kept[r] · h[r] · down[r] + down_bias: `ffn` over the neurons that are kept.

    Neuron r is kept if the mask names it, and if it is above its limits, float32 [F], where these are given:

        kept[r] = mask[r] ∧ |activation(x · gate[r] + gate_bias[r])| > gate_limits[r] ∧ ¬(|h[r]| ≤ output_limits[r])

    With `gains` (see `ffn`) only neurons of experts whose gain is not 0 are kept, and y sums gain · h[r] · down[r].
    A neuron that is left out contributes nothing, whatever its h. Only a block with a gate has `gate_limits`.

    mask bool [T, F of the mask]. The rows may be a part of the block: then row r is neuron `neurons[r]` of the mask
    (int64 [F]); without a table row r is neuron r. Otherwise as `ffn` without a norm.

    With `squares` the result is [T, D + 1]: its last column is Σ h² over the neurons that are kept, by which
    `divide_by_rms` normalizes the others. Sums of parts of a block are then those of the whole block.
    """
    return block.y()
