"""TurboSparse-Mixtral: Mixtral with ReLU on the gate and on the up projection of its experts.

Names and equations are those of its authors' code for transformers (huggingface/transformers#31369), which was not
merged; the published checkpoint itself was not at hand. Their code multiplies neurons by the masks of predictors that
are in the checkpoint. Here every neuron that fires is computed, as the paper defines the model (arXiv 2406.05955).
"""

from typing import Any

from transformers import MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import WeightConverter, WeightRenaming

from picompile.frontend.relu_experts import ReluExperts, named_experts


class TurboSparseMixtralConfig(MixtralConfig):  # type: ignore[misc]
    """Mixtral's configuration under the name that the checkpoint has."""

    model_type = "turbosparsemixtral"

    def __post_init__(self, **kwargs: Any) -> None:
        if vars(self)["head_dim"] is None:
            self.head_dim: int | None = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class TurboSparseMixtralForCausalLM(MixtralForCausalLM):  # type: ignore[misc]
    """Mixtral with `ReluExperts` of two sides in every layer."""

    config_class = TurboSparseMixtralConfig

    def __init__(self, config: TurboSparseMixtralConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = ReluExperts(
                config, experts=config.num_local_experts, neurons=config.intermediate_size, two_sided=True
            )
        self.post_init()

    @staticmethod
    def published_names() -> list[WeightRenaming | WeightConverter]:
        """Return the rules that make the model's names of those in a checkpoint, which are Mixtral's own."""
        return [WeightRenaming(".block_sparse_moe.", ".mlp."), *named_experts("w1", "w3", "w2")]
