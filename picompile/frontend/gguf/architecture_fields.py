"""Fields of configs that single architectures of GGUF files need, computed from the metadata and the tensors.

Each function takes the metadata and the fields so far, and returns fields to add. What llama.cpp computes decides, with
its defaults for keys that are missing: `src/models/` at 0c1e57098.
"""

from collections.abc import Callable, Mapping
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.metadata import read_array
from picompile.frontend.gguf.values import MetadataValues

Fields = dict[str, Any]
Add = Callable[[MetadataValues, Mapping[str, Any]], Fields]

FULL, SLIDING = "full_attention", "sliding_attention"
_PATTERN = "attention.sliding_window_pattern"
# bfloat16, as checkpoints have them, moves them by less than a hundredth.
_XIELU = {"xielu.beta": 0.5, "xielu.eps": -1e-6}
# Baichuan 13B, which has ALiBi instead of rotary embeddings: src/models/baichuan.cpp tells it by its layers.
_BAICHUAN_13B_LAYERS = 40
# EXAONE 4 32B, the one model with windows: src/models/exaone4.cpp tells it by its layers.
_EXAONE4_32B_LAYERS, _EXAONE4_WINDOW = 64, 4096


def layer_kinds(values: MetadataValues, layers: int, period: int) -> list[str]:
    """Return for each layer whether it has a window: from a list, or all but the last of each `period` layers.

    A number in the file replaces `period`.
    """
    flags = values.flags(_PATTERN)
    if flags is None:
        period = values.count(_PATTERN) or period
        flags = [layer % period < period - 1 for layer in range(layers)]
    if len(flags) != layers:
        raise UnsupportedModelError(
            f"{values.header.file}: {values.key(_PATTERN)} has {len(flags)} elements for {layers} layers"
        )
    return [SLIDING if flag else FULL for flag in flags]


def windows(period: int, usual: int | None = None) -> Add:
    """Return a function that adds the window and the layers that have it; no window in the file is `usual`."""

    def add(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
        layers = config["num_hidden_layers"]
        window = values.count("attention.sliding_window") or usual
        if not window:
            return {"layer_types": [FULL] * layers}
        return {"sliding_window": window, "layer_types": layer_kinds(values, layers, period)}

    return add


def gemma_scale(largest_layers: int) -> Add:
    """Return a function that adds the scale of attention, which the largest model of a generation takes otherwise.

    llama.cpp tells that model by its layers.
    """

    def add(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
        largest = config["num_hidden_layers"] == largest_layers
        per_head = config["hidden_size"] // config["num_attention_heads"]
        # llama.cpp's caps of Gemma 2 where a file says nothing are those of its class; Gemma 3 has none.
        return {"query_pre_attn_scalar": per_head if largest else config.get("head_dim", per_head)}

    return add


def gemma3(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the frequencies of layers with a window, which no scaling changes, beside those of the others."""
    local = values.above_zero("rope.freq_base_swa") or 10000.0
    by_kind = {SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: dict(config["rope_parameters"])}
    return {"rope_parameters": by_kind}


def normed_heads(field: str) -> Add:
    """Return a function that adds `field`: whether heads of queries and keys are normalized."""

    def add(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
        return {field: "blk.0.attn_q_norm.weight" in values.header.tensors}

    return add


def apertus(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Check the constants of xIELU, which the class has of its own."""
    for key, constant in _XIELU.items():
        listed = read_array(values.header, key) or []
        if any(type(number) is not float or abs(number - constant) > 0.01 * abs(constant) for number in listed):
            raise UnsupportedModelError(f"{values.header.file}: {key} is not {constant} in all layers")
    return {}


def baichuan(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Refuse Baichuan 13B."""
    if config["num_hidden_layers"] == _BAICHUAN_13B_LAYERS:
        raise UnsupportedModelError(
            f"{values.header.file}: Baichuan of {_BAICHUAN_13B_LAYERS} layers, with ALiBi, is not supported"
        )
    return {}


def bias_without_output(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return Qwen 2's class, which is Llama's with biases of queries, keys and values, where a file has only these."""
    tensors = values.header.tensors
    if config.get("attention_bias") and "blk.0.attn_output.bias" not in tensors and not config.get("mlp_bias"):
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {}


def exaone4(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the windows of EXAONE 4, whose layers turn where they have a window, or all where none has."""
    layers, window = config["num_hidden_layers"], values.count("attention.sliding_window")
    if layers == _EXAONE4_32B_LAYERS and not window:
        window = _EXAONE4_WINDOW
    if not window:
        return {"sliding_window": None, "layer_types": [FULL] * layers}
    return {"sliding_window": window, "layer_types": layer_kinds(values, layers, 4)}


def granite(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the scale of attention where a file has none."""
    if "attention_multiplier" in config:
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"attention_multiplier": head_dim**-0.5}


def granite_window(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the windows of Granite with sinks; the file lists the layers."""
    if values.flags(_PATTERN) is None:
        raise UnsupportedModelError(f"{values.header.file}: no list {values.key(_PATTERN)}, which says the windows")
    return windows(4)(values, config)


def minicpm(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the scale of attention. Without the scales in the file, llama.cpp takes those of one model."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if values.positive(key) is None:
            raise UnsupportedModelError(
                f"{values.header.file}: no {values.key(key)} in it: made by a converter of 2024; convert it anew"
            )
    return granite(values, config)


def minicpm3(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the sizes of latent attention; values of a head are as wide as the hidden state is for a head."""
    value = values.count("attention.value_length") or config["hidden_size"] // config["num_attention_heads"]
    return _latent(values, config, key=values.count("attention.key_length"), value=value)


def youtu(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the sizes of latent attention; files of 2025 and later have those of heads under other keys."""
    key = values.count("attention.key_length_mla") or values.count("attention.key_length")
    value = values.count("attention.value_length_mla") or values.count("attention.value_length")
    return _latent(values, config, key=key, value=value)


def _latent(values: MetadataValues, config: Mapping[str, Any], key: int | None, value: int | None) -> Fields:
    rotary = values.count("rope.dimension_count")
    if not rotary or not key or not value or rotary >= key:
        raise UnsupportedModelError(f"{values.header.file}: no sizes of latent attention in it (rope.dimension_count)")
    rope = {name: number for name, number in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotary,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "rope_parameters": rope,
    }


def mistral3(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return Ministral 3's class where queries are scaled by the position; Mistral Small 3 is Llama's."""
    scale = values.positive("attention.temperature_scale")
    if scale is None:
        return {}
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] != "yarn" or "original_max_position_embeddings" not in rope:
        raise UnsupportedModelError(
            f"{values.header.file}: {values.key('attention.temperature_scale')} needs rotary embeddings of type yarn"
        )
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "sliding_window": None,
        "rope_parameters": {**rope, "llama_4_scaling_beta": scale},
    }


def mpt(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return what MPT's class has in a config of its own for attention."""
    if values.positive("attention.max_alibi_bias") is None:
        raise UnsupportedModelError(f"{values.header.file}: MPT without ALiBi is not supported")
    if values.count("feed_forward_length") != 4 * config["d_model"]:
        raise UnsupportedModelError(
            f"{values.header.file}: MPT with a feed-forward block of other than 4 times d_model"
        )
    clip = values.positive("attention.clamp_kqv")
    return {"attn_config": {"alibi": True, **({"clip_qkv": clip} if clip else {})}}


def olmo2(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return OLMo 3's class where layers have windows; scaled frequencies hold for the others alone."""
    if not values.count("attention.sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    by_kind = {SLIDING: plain, FULL: dict(config["rope_parameters"])}
    named = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "rope_parameters": by_kind}
    return windows(4)(values, config) | named


def phi3(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the window of all layers; a file says 0 for none."""
    return {"sliding_window": values.count("attention.sliding_window") or None}


def qwen(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the neurons of the first Qwen, whose files say twice as many."""
    return {"intermediate_size": (values.count("feed_forward_length") or 0) // 2}


def starcoder(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return whether all heads share one key and value."""
    return {"multi_query": values.count("attention.head_count_kv") == 1 != config["n_head"]}
