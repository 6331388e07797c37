"""Experts with ReLU, for the mixtures that transformers does not have; and the names that checkpoints have for them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.integrations.moe import use_experts_implementation


@use_experts_implementation
class ReluExperts(nn.Module):
    """y = Σ weight · down(relu(gate(x)) · up(x)) over the experts that a token has chosen.

    With `two_sided`, up(x) goes through ReLU as well (dReLU, arXiv 2406.05955). Parameters are the stacks of
    transformers: `gate_up_proj` [experts, 2 · neurons, hidden], the rows of an expert's gate before those of its up,
    and `down_proj` [experts, hidden, neurons].
    """

    def __init__(self, config: Any, *, experts: int, neurons: int, two_sided: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.two_sided = two_sided
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * neurons, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, neurons))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2 · neurons] → [..., neurons]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.relu(gate) * (F.relu(up) if self.two_sided else up)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Hidden states [T, D], chosen experts int64 and their weights [T, k] → [T, D], one expert after the other."""
        result = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, place = torch.where(top_k_index == expert)
            hidden = self._apply_gate(F.linear(hidden_states[token], gate_up))
            weights = top_k_weights[token, place].unsqueeze(-1).to(hidden.dtype)
            result.index_add_(0, token, F.linear(hidden, down) * weights)
        return result


def named_experts(gate: str, up: str, down: str) -> list[WeightConverter]:
    """Return transformers' rules by which tensors of one expert each make the stacks of `ReluExperts`.

    The arguments are what a checkpoint calls the three matrices: `experts.0.GATE.weight`.
    """
    return [
        WeightConverter(
            source_patterns=[f".experts.*.{name}.weight" for name in (gate, up)],
            target_patterns=".experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=[f".experts.*.{down}.weight"],
            target_patterns=".experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
