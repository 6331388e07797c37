"""Bamboo and TurboSparse-Mistral: Mistral with ReLU on the gate and on the up projection (dReLU, arXiv 2406.05955)."""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM


class BambooConfig(MistralConfig):  # type: ignore[misc]
    """Mistral's configuration under the name that the published checkpoints have."""

    model_type = "bamboo"


class BambooMLP(nn.Module):
    """y = down(relu(gate(x)) · relu(up(x))). Tensor names are those of Mistral."""

    def __init__(self, config: BambooConfig) -> None:
        super().__init__()
        hidden, neurons = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, neurons, bias=False)
        self.up_proj = nn.Linear(hidden, neurons, bias=False)
        self.down_proj = nn.Linear(neurons, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] → [..., hidden]."""
        down: Tensor = self.down_proj(F.relu(self.gate_proj(x)) * F.relu(self.up_proj(x)))
        return down


class BambooForCausalLM(MistralForCausalLM):  # type: ignore[misc]
    """Mistral with `BambooMLP` in every layer. Also what TurboSparse-Mistral is published as."""

    config_class = BambooConfig

    def __init__(self, config: BambooConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = BambooMLP(config)
        self.post_init()
