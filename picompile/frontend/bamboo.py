"""Models that transformers does not have, written out here so that no code of a checkpoint is ever run."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

# FATReLU, the activation of ProSparse (arXiv 2402.13516): a ReLU that lets nothing through below its threshold.


class FatReLU(nn.Module):
    """y = x where x > threshold, else 0."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape → the same shape."""
        return torch.where(x > self.threshold, x, torch.zeros_like(x))

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"threshold={self.threshold}"


# Bamboo and TurboSparse-Mistral: Mistral with ReLU on the gate and on the up projection (dReLU, arXiv 2406.05955).


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
