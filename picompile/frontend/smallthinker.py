"""SmallThinker: a mixture of experts with ReLU whose router reads what a layer begins with, before its attention.

Names and equations are those of the code and the config.json that PowerInfer/SmallThinker-4BA0.6B-Instruct is published
with; llama.cpp, vLLM and SGLang read the same names. Attention is SmolLM3's: a part of the layers does not turn queries
and keys, and a part has a window.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from transformers.core_model_loading import WeightConverter
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer

from picompile.frontend.relu_experts import ReluExperts, named_experts


class SmallThinkerConfig(SmolLM3Config):  # type: ignore[misc]
    """The published configuration, from which the fields of SmolLM3's follow.

    `rope_layout` and `sliding_window_layout` have a 0 or 1 for each layer: whether queries and keys are turned, and
    whether there is a window, of `sliding_window_size` tokens. Raises `ValueError` for what is not implemented.
    """

    model_type = "smallthinker"
    default_theta = 1000000.0

    vocab_size: int = 151936
    hidden_size: int = 1536
    num_hidden_layers: int = 32
    num_attention_heads: int = 12
    num_key_value_heads: int | None = 2
    head_dim: int = 128
    hidden_act: str = "relu"
    max_position_embeddings: int = 131072
    pad_token_id: int | None = None
    bos_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151645
    rope_layout: list[int] | None = None
    sliding_window_layout: list[int] | None = None
    sliding_window_size: int | None = 4096
    moe_num_primary_experts: int = 32
    moe_num_active_primary_experts: int = 4
    moe_ffn_hidden_size: int = 768
    moe_primary_router_apply_softmax: bool = False

    # Fields of its authors' earlier code, with the values that change nothing. The last has no effect on their code.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_qk_norm": (False,),
        "moe_enable_early_router": (True,),
        "moe_enable_secondary_experts": (False,),
        "moe_shared_primary_experts": (0,),
        "norm_topk_prob": (True,),
    }
    # Published fields that say nothing of the logits.
    without_effect: ClassVar[tuple[str, ...]] = ("model_name", "output_router_logits", "sliding_window_pattern")

    def __post_init__(self, **kwargs: Any) -> None:
        for name, values in self.neutral.items():
            if (value := kwargs.get(name)) is not None and value not in values:
                raise ValueError(f"{name} is {value!r:.40}, which is not supported")
        layers = kwargs.get("moe_layer_layout") or []
        if not isinstance(layers, list) or not all(layers):
            raise ValueError("moe_layer_layout has layers without experts, which are not supported")
        experts, chosen = self.moe_num_primary_experts, self.moe_num_active_primary_experts
        if not 1 <= chosen <= experts:
            raise ValueError(f"moe_num_active_primary_experts is {chosen}, of {experts} experts")
        windows = self._layout("sliding_window_layout", usual=0)
        if any(windows) and self.sliding_window_size is None:
            raise ValueError("sliding_window_layout has layers with a window, but sliding_window_size says none")
        self.layer_types: list[str] = ["sliding_attention" if has else "full_attention" for has in windows]
        self.use_sliding_window = any(windows)
        self.sliding_window = self.sliding_window_size if any(windows) else None
        self.no_rope_layers = self._layout("rope_layout", usual=1)
        self.intermediate_size = self.moe_ffn_hidden_size
        super().__post_init__(**kwargs)

    def _layout(self, name: str, usual: int) -> list[int]:
        """Return the number of each layer in a field, `usual` where it says nothing."""
        given, layers = getattr(self, name), self.num_hidden_layers
        if given is None:
            return [usual] * layers
        if not isinstance(given, list) or len(given) != layers or not all(number in (0, 1) for number in given):
            raise ValueError(f"{name} must have a 0 or 1 for each of the {layers} layers")
        return [int(number) for number in given]


class SmallThinkerMoeBlock(nn.Module):
    """Experts, and their router, which reads another value than they do."""

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        self.chosen = config.moe_num_active_primary_experts
        self.applies_softmax = config.moe_primary_router_apply_softmax
        self.primary_router = nn.Linear(config.hidden_size, config.moe_num_primary_experts, bias=False)
        self.experts = ReluExperts(
            config, experts=config.moe_num_primary_experts, neurons=config.moe_ffn_hidden_size, two_sided=False
        )

    def choose(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [..., hidden] → chosen experts int64 and their weights, both [tokens, chosen]."""
        logits, index = self.primary_router(hidden_states.flatten(0, -2)).topk(self.chosen, dim=-1)
        if self.applies_softmax:
            return index, F.softmax(logits, dim=-1, dtype=torch.float)
        scores = F.sigmoid(logits)
        return index, scores / scores.sum(dim=-1, keepdim=True)

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Hidden states [..., hidden] and what `choose` returned → [..., hidden]."""
        mixed: Tensor = self.experts(hidden_states.flatten(0, -2), index, weights)
        return mixed.reshape(hidden_states.shape)


class SmallThinkerDecoderLayer(SmolLM3DecoderLayer):  # type: ignore[misc]
    """SmolLM3's layer with experts for its block, whose router reads the residual stream that the layer begins with."""

    def __init__(self, config: SmallThinkerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.mlp
        self.block_sparse_moe = SmallThinkerMoeBlock(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, T, hidden] → [1, T, hidden]."""
        index, weights = self.block_sparse_moe.choose(hidden_states)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        mixed: Tensor = self.block_sparse_moe(self.post_attention_layernorm(hidden_states), index, weights)
        return hidden_states + mixed


class SmallThinkerForCausalLM(SmolLM3ForCausalLM):  # type: ignore[misc]
    """SmolLM3 with `SmallThinkerDecoderLayer`."""

    config_class = SmallThinkerConfig

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(
            SmallThinkerDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.post_init()

    @staticmethod
    def published_names() -> list[WeightConverter]:
        """Return the rules that make the stacks of experts of the tensors in a checkpoint."""
        return named_experts("gate", "up", "down")
