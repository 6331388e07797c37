"""Configs of GGUF files by transformers' own tables, for architectures that are read by these.

Which key is which field is the table of transformers' GGUF reader. Added is what that reader leaves to defaults of one
published model although the file says it: the sizes of Falcon and GPT-2.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import get_gguf_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.values import MetadataValues, embedding_rows, shortest
from picompile.frontend.messages import one_line

# Transformers' names of architectures that llama.cpp names otherwise.
_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
# The architectures whose models compile.
COMPILED = ("bloom", "falcon", "gpt2", "lfm2")
# Fields of a config.json that are whole numbers wherever the table names them; others are not.
_FLOAT_KEYS = re.compile(r"epsilon$|freq_base$")


def known_architectures() -> set[str]:
    """Return the architectures of decoders that transformers' table has."""
    return {_RENAMED_BACK.get(key, key) for key in GGUF_CONFIG_MAPPING if key in _causal(key)}


def config_of_table(values: MetadataValues) -> dict[str, Any]:
    """Return the fields that transformers' table makes of the metadata of an architecture that it has."""
    architecture = values.architecture
    if architecture == "lfm2":
        return _lfm2(values)
    name = _RENAMED.get(architecture, architecture)
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]],
        "model_type": name,
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {}),
        **mapped_fields(values, name),
    }


def special_fields(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that single architectures need besides."""
    add = _SPECIAL.get(values.architecture)
    return {} if add is None else add(values, config)


_RENAMED_BACK = {theirs: own for own, theirs in _RENAMED.items()}


def _causal(name: str) -> Mapping[str, str]:
    """Return the classes of decoders, none for names in transformers' table that are no architectures."""
    # llama.cpp writes no architecture `mistral`. The table for Gemma 4 leaves out most of what its files say.
    return {} if name in ("mistral", "gemma4") else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def mapped_fields(values: MetadataValues, name: str) -> dict[str, Any]:
    """Return the fields that transformers' table for `name` has keys for, and rotary embeddings."""
    config: dict[str, Any] = {}
    for key, field in GGUF_CONFIG_MAPPING[name].items():
        if field in (None, -1):
            continue
        found = values.above_zero(key) if _FLOAT_KEYS.search(key) else values.count(key)
        if found is not None:
            config[field] = found
    if values.architecture not in ("gpt2", "bloom", "mamba"):
        # llama.cpp's own default, whatever the class has.
        config["rope_theta"] = values.above_zero("rope.freq_base") or 10000.0
    return config


def _lfm2(values: MetadataValues) -> dict[str, Any]:
    """Return what the newer of transformers' two GGUF readers makes of LFM2."""
    header = values.header
    metadata: dict[str, Any] = {"general.architecture": "lfm2", **header.values}
    metadata["lfm2.attention.head_count_kv"] = values.counts("attention.head_count_kv")
    metadata["tokenizer.ggml.tokens"] = embedding_rows(header)
    try:
        config: dict[str, Any] = get_gguf_config(metadata, tuple(header.tensors))
    except Exception as error:
        raise UnsupportedModelError(f"{header.file}: metadata of lfm2 is incomplete: {one_line(error)}") from error
    return {key: shortest(value) if isinstance(value, float) else value for key, value in config.items()}


def _falcon(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv_heads = config["num_attention_heads"], values.count("attention.head_count_kv") or 1
    tensors = values.header.tensors
    grouped = kv_heads not in (1, heads)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1,
        "parallel_attn": True,
        "alibi": False,
        "ffn_hidden_size": values.count("feed_forward_length") or 4 * config["hidden_size"],
        "layer_norm_epsilon": values.above_zero("attention.layer_norm_epsilon") or 1e-5,
    }


def _gpt2(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"n_positions": values.count("context_length"), "n_inner": values.count("feed_forward_length")}


_SPECIAL: Mapping[str, Callable[[MetadataValues, Mapping[str, Any]], dict[str, Any]]] = {
    "falcon": _falcon,
    "gpt2": _gpt2,
}
