"""Fields of configs that mixtures of experts in GGUF files need, computed from the metadata and the tensors.

Functions are as those of `architecture_fields.py`.
"""

from collections.abc import Mapping
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.architecture_fields import FULL, granite, youtu
from picompile.frontend.gguf.values import MetadataValues

Fields = dict[str, Any]

_SOFTMAX, _SIGMOID = 1, 2
SMALLTHINKER_WINDOW = 4096
"""The window of SmallThinker in llama.cpp, in tokens."""


def check_counts(values: MetadataValues) -> None:
    """Raise `UnsupportedModelError` for counts of experts that make no mixture."""
    experts, chosen = values.count("expert_count") or 0, values.count("expert_used_count")
    if not chosen or chosen > experts:
        raise UnsupportedModelError(
            f"{values.header.file}: {values.key('expert_used_count')} is {chosen}, of {experts} experts"
        )
    groups, chosen_groups = values.count("expert_group_count") or 1, values.count("expert_group_used_count")
    if groups > 1 and (experts % groups or not chosen_groups or chosen > experts // groups * chosen_groups):
        raise UnsupportedModelError(
            f"{values.header.file}: {chosen} of {experts} experts are chosen from {chosen_groups} of {groups} groups, "
            "which cannot be"
        )


def deepseek(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return DeepSeek V2's class where scores are a softmax, and the sizes of latent attention.

    Files of 2024 do not say how scores are made; those with a bias for the choice of experts have a sigmoid.
    """
    has_bias = any(name.partition(".")[2].partition(".")[2].startswith("exp_probs_b") for name in values.header.tensors)
    scores = values.count("expert_gating_func") or (_SIGMOID if has_bias else _SOFTMAX)
    found = youtu(values, config)
    if scores == _SIGMOID:
        return found
    if has_bias or config["norm_topk_prob"]:
        what = "with a bias" if has_bias else "divided by their sum"
        raise UnsupportedModelError(f"{values.header.file}: scores of experts by softmax, {what}, are not supported")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return found | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": method,
        "norm_topk_prob": False,
    }


def ernie_shared(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Check that the shared experts have the size that the class makes them."""
    size = values.count("expert_shared_feed_forward_length")
    shared = config["moe_num_shared_experts"] * (config.get("moe_intermediate_size") or 0)
    # The converter computes it from other sizes, and the tensors are right.
    entry = next((entry for name, entry in values.header.tensors.items() if name.endswith("ffn_up_shexp.weight")), None)
    if size and entry is not None and entry.shape[0] != shared:
        raise UnsupportedModelError(
            f"{values.header.file}: shared experts have {entry.shape[0]} neurons, not {shared} as its counts say"
        )
    return {}


def full_attention(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return that no layer has a window."""
    if values.count("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{values.header.file}: {values.key('attention.sliding_window')} without the layers that have it is not "
            "supported"
        )
    return {"sliding_window": None, "layer_types": [FULL] * config["num_hidden_layers"]}


def granite_shared(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return the scale of attention, and Granite's class with a shared expert for a file that has one."""
    shared = values.count("expert_shared_feed_forward_length")
    found = granite(values, config)
    if not shared:
        return found
    return found | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shared,
    }


def hunyuan_width(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Check that Hunyuan's shared expert is as wide as the others, as the class has it."""
    shared = values.count("expert_shared_feed_forward_length")
    if shared not in (None, 0, config["intermediate_size"]) or (values.count("expert_shared_count") or 1) != 1:
        raise UnsupportedModelError(
            f"{values.header.file}: a shared expert of {shared} neurons beside others of {config['intermediate_size']}"
        )
    return {}


def norms_of_heads(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return whether heads of queries and keys are normalized."""
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in values.header.tensors}


def smallthinker(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return how scores are made, and which layers turn queries and keys and have a window.

    Where a file has a window, it is of three layers of four, which turn as well; else all turn.
    """
    scores = values.count("expert_gating_func")
    if not scores:
        raise UnsupportedModelError(f"{values.header.file}: no {values.key('expert_gating_func')} in it")
    layers = range(config["num_hidden_layers"])
    windows = [int(layer % 4 > 0) for layer in layers] if values.count("attention.sliding_window") else None
    return {
        "moe_primary_router_apply_softmax": scores == _SOFTMAX,
        "rope_layout": windows or [1 for _ in layers],
        "sliding_window_layout": windows or [0 for _ in layers],
        "sliding_window_size": SMALLTHINKER_WINDOW,
    }


def yarn_without_truncation(values: MetadataValues, config: Mapping[str, Any]) -> Fields:
    """Return gpt-oss's rotary embeddings.

    Its yarn does not round the ends of its ramp to whole dimensions, as its config.json says. There is no key for
    that, and llama.cpp rounds them.
    """
    rope = dict(config["rope_parameters"])
    return {"rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope}
