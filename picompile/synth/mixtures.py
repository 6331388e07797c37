"""Named mixtures of experts: the config.json of each, in the words of its class in transformers.

Sizes are those of the models' own files on the Hugging Face hub. TurboSparse-Mixtral's own file was not at hand: its
sizes are those of Mixtral 8x7B, which it was made from. SmallThinker's are those of its small model's file and of its
authors' table; which layers of the large one have a window is llama.cpp's rule, its `rope_theta` is the small one's,
and a head of its own is assumed. `reglu-moe-1b-7b` and `relu2-moe-1b-5b` are not published: OLMoE's sizes with experts
whose neurons are often silent, with a gate and without.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_OLMOE = {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}

_QWEN3 = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
}

_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
_NEMOTRON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "mlp_hidden_act": "relu2",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "layers_block_type": [_KINDS[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"],
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# OLMoE's sizes in Nemotron's class, whose experts have no gate; it must have a shared expert, here a small one.
_RELU2 = _NEMOTRON | {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "moe_shared_expert_intermediate_size": 32,
    "layers_block_type": ["full_attention", "moe"] * 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}

_TURBOSPARSE = {
    "model_type": "turbosparsemixtral",
    "architectures": ["TurboSparseMixtralForCausalLM"],
    "hidden_act": "relu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_SMALLTHINKER = {
    "model_type": "smallthinker",
    "architectures": ["SmallThinkerForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 32,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "moe_num_primary_experts": 32,
    "moe_num_active_primary_experts": 4,
    "moe_ffn_hidden_size": 768,
    "moe_primary_router_apply_softmax": False,
    "rope_layout": [1] * 32,
    "sliding_window_layout": [0] * 32,
    "sliding_window_size": 4096,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": [151643, 151645],
}

_SMALLTHINKER_21B = _SMALLTHINKER | {
    "hidden_size": 2560,
    "num_hidden_layers": 52,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "moe_num_primary_experts": 64,
    "moe_num_active_primary_experts": 6,
    "rope_layout": [0, 1, 1, 1] * 13,
    "sliding_window_layout": [0, 1, 1, 1] * 13,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}

_TINY = _OLMOE | {
    "hidden_act": "relu",
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

MIXTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "olmoe-1b-7b": _OLMOE,
        "qwen3-30b-a3b": _QWEN3,
        "gpt-oss-20b": _GPT_OSS,
        "nemotron3-nano": _NEMOTRON,
        "turbosparse-mixtral": _TURBOSPARSE,
        "smallthinker-4b-a0.6b": _SMALLTHINKER,
        "smallthinker-21b-a3b": _SMALLTHINKER_21B,
        "reglu-moe-1b-7b": _OLMOE | {"hidden_act": "relu"},
        "relu2-moe-1b-5b": _RELU2,
        "tiny-mixture": _TINY,
    }
)
"""The contents of config.json by the name of the shape."""
