"""Well-known dense models: the config.json of each, as far as it says what the model's shape is.

Their neurons are hardly ever silent, so `synth` makes none of them; `plan --shape` and `doctor` count their bytes.
Sizes are those of the models' own files on the Hugging Face hub.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _llama3(hidden: int, ffn: int, layers: int, heads: int, factor: float, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


_QWEN25 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_MISTRAL_SMALL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "vocab_size": 131072,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DENSE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-0.5b": _QWEN25,
        "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 32.0, tied=True),
        "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 32.0, tied=True),
        "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
        "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8.0),
        "qwen3-14b": _qwen3(5120, 17408, 40, 40),
        "mistral-small-24b": _MISTRAL_SMALL,
        "qwen3-32b": _qwen3(5120, 25600, 64, 64),
        "llama-3.3-70b": _llama3(8192, 28672, 80, 64, 8.0),
    }
)
"""The contents of config.json by the name of the shape."""
