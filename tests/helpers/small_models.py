"""Small random models of every causal language model that transformers has, made from its config classes alone."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# What fields of configs mean, by their names in any of the classes.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "dim_model", "d_embed"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 96),
    **dict.fromkeys(("dff", "dim_ff", "ffn_hidden_size", "d_ff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "dim_head", "kv_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 211),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    # Two groups of experts, of which one is chosen.
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("dropout", "layerdrop", "decoder_layerdrop"), 0.0),
    "sliding_window": 5,
    "original_max_position_embeddings": 64,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    "n_shared_experts": 1,
    "q_lora_rank": 24,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "mlp_only_layers": [0],
    "v_head_dim": 12,
    "is_decoder": True,
    "expand": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What some classes need instead: each is tried in turn, on top of those before.
_ATTEMPTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"pad_token_id": 0},
    {"num_key_value_heads": 4},
    {"num_experts_per_tok": 1},
    {"hidden_size_per_layer_input": 0},
    {"num_hidden_layers": None},
)
OF_TYPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.75, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    # Dense layers between mixtures.
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80},
}
# Texts and images: what these classes add to a decoder is no matter of ours.
_INNER = ("text_config", "decoder")


def causal_types() -> dict[str, str]:
    """Return the classes of transformers' causal language models by their model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {name: known if isinstance(known, str) else known[0] for name, known in NAMES.items()}


def config_class(model_type: str) -> Any:
    """Return the config class of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def small_config(model_type: str, **more: Any) -> Any:
    """Return a small config object of a model type. Raises whatever its class raises where none of ours fits it."""
    own = config_class(model_type)
    known = {field.name for field in dataclasses.fields(own)}
    values = {name: value for name, value in SIZES.items() if name in known} | dict(OF_TYPES.get(model_type, {}))
    if "kv_lora_rank" in known:
        # Latent attention has keys for each head.
        values["num_key_value_heads"] = 4
    for name, inner in (getattr(own, "sub_configs", None) or {}).items():
        if name in _INNER and dataclasses.is_dataclass(inner):
            fields = {field.name for field in dataclasses.fields(inner)}
            values[name] = {key: value for key, value in SIZES.items() if key in fields and value is not None}
    failure: Exception | None = None
    for attempt in _ATTEMPTS:
        values |= {name: value for name, value in attempt.items() if name in known}
        try:
            given = {name: value for name, value in values.items() if value is not None or name == "pad_token_id"}
            return own(**given | more)
        except Exception as error:
            failure = error
    raise ValueError(f"no small config of {model_type}") from failure


def small_model(config: Any, seed: int = 0) -> nn.Module:
    """Return the eager model of a config, float32, with random weights that are float16 numbers.

    Raises what transformers raises where its own class does not take the config.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = model_class[0] if isinstance(model_class, (tuple, list)) else model_class
    # As `AutoModelForCausalLM.from_config` does it.
    if model_class.config_class is (getattr(config, "sub_configs", None) or {}).get("text_config"):
        config = config.get_text_config()
    torch.manual_seed(seed)
    model: nn.Module = model_class._from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    return with_random_weights(model)


def with_random_weights(model: nn.Module) -> nn.Module:
    """Return `model` with random weights in place that are float16 numbers."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1:
                    # Biases and norms start as zeros and ones, which would hide that one is forgotten.
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif isinstance(module, nn.Embedding):
                    parameter.copy_(torch.randn_like(parameter) * 0.5)
                else:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
                parameter.copy_(parameter.half())
            for name in ("e_score_correction_bias", "expert_bias"):
                if name in module._buffers:
                    # Of routers, which a checkpoint has.
                    buffer = module.get_buffer(name)
                    buffer.copy_((torch.randn_like(buffer) * 0.1).half())
    return model
