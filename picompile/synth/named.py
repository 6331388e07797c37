"""The named shapes: each is a configuration like any other, so that one reader serves these and files."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.json_file import read_json_object
from picompile.synth.shapes import ModelShape, shape_from_config


def _llama(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "relu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _opt(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "activation_function": "relu",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        **more,
    }


def _falcon(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon",
        "activation": "relu",
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
        **more,
    }


# Bamboo and TurboSparse (arXiv 2406.05955): Mistral's shape with ReLU on gate and on up.
_DRELU = {"model_type": "bamboo", "sliding_window": None, "max_position_embeddings": 4096}

# Falcon-40B's form of the block: grouped key heads, and a norm for each half.
_FALCON_NEW = {"new_decoder_architecture": True, "num_kv_heads": 8}

SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        name: shape_from_config(name, config)
        for name, config in {
            "reglu-1.3b": _llama(2048, 5632, 24, 32),
            "opt-1.3b": _opt(2048, 8192, 24, 32),
            "llama-7b": _llama(4096, 11008, 32, 32),
            "bamboo-7b": _llama(4096, 14336, 32, 32, num_key_value_heads=8, **_DRELU),
            "falcon-7b": _falcon(4544, 32, 71),
            "llama-13b": _llama(5120, 13824, 40, 40),
            "llama-70b": _llama(8192, 28672, 80, 64, num_key_value_heads=8),
            "opt-6.7b": _opt(4096, 16384, 32, 32),
            "opt-13b": _opt(5120, 20480, 40, 40),
            "opt-30b": _opt(7168, 28672, 48, 56),
            "opt-66b": _opt(9216, 36864, 64, 72),
            "opt-175b": _opt(12288, 49152, 96, 96),
            "falcon-40b": _falcon(8192, 60, 128, **_FALCON_NEW),
            "tiny-reglu": _llama(96, 200, 2, 4, num_key_value_heads=2, vocab_size=512),
            "tiny-opt": _opt(96, 208, 2, 4, vocab_size=512),
            "tiny-drelu": _llama(128, 200, 3, 4, num_key_value_heads=1, vocab_size=512, **_DRELU),
            "tiny-falcon": _falcon(96, 2, 4, ffn_hidden_size=216, vocab_size=512),
        }.items()
    }
)


def find_shape(text: str) -> ModelShape:
    """Return the shape that `text` names: an entry of `SHAPES`, or a JSON file with the fields of a `config.json`.

    Raises `UsageError` when there is neither, or the file cannot be read.
    """
    return SHAPES[text] if text in SHAPES else shape_from_config(*find_config(text))


def find_config(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the fields of the `config.json` that `text` names, as `find_shape` does.

    What synth cannot make is found as well. Raises as `find_shape` does.
    """
    if text in SHAPES:
        return text, SHAPES[text].config
    path = Path(text)
    if not path.is_file():
        known = ", ".join(SHAPES)
        raise UsageError(f"unknown shape {text!r}; name a JSON file with the fields of a config.json, or {known}")
    try:
        return path.stem, read_json_object(path)
    except UnsupportedModelError as error:
        raise UsageError(f"{error}; it must have the fields of a config.json") from error
