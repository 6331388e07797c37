"""The architectures of GGUF files whose models are mixtures of experts: one record each.

The facts are from llama.cpp, as those of `architectures.py`. A file says how many experts there are, how many of them a
token gets, and, for some architectures, how their scores are made, normalized and scaled; for the others llama.cpp has
that in its code, and a file that says something else is refused.
"""

from collections.abc import Mapping
from typing import Any

from picompile.frontend.gguf.architecture import GRANITE_SCALES, LATENT, ROPE_ALWAYS, Architecture
from picompile.frontend.gguf.architecture_fields import windows
from picompile.frontend.gguf.expert_fields import (
    SMALLTHINKER_WINDOW,
    deepseek,
    ernie_shared,
    full_attention,
    granite_shared,
    hunyuan_width,
    norms_of_heads,
    smallthinker,
    yarn_without_truncation,
)

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3

_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_SHARED = {"expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace"}
_WEIGHTS = {"expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob"}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
# llama.cpp's defaults where a file says nothing.
_PLAIN_WEIGHTS = {"routed_scaling_factor": 1.0, "norm_topk_prob": False}


def _mixture(
    model_class: str,
    model_type: str,
    experts: str,
    *,
    chosen: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    scores: int = SOFTMAX,
    normalized: bool | None = None,
    fields: Mapping[str, str] | None = None,
    fixed: Mapping[str, tuple[float | bool, ...]] | None = None,
    **more: Any,
) -> Architecture:
    """Return the record of a mixture whose class has its counts in the fields `experts`, `chosen` and `width`.

    `scores` is llama.cpp's number for how scores are made, 0 in files that leave it to the architecture. `normalized`
    says whether those of the chosen experts are divided by their sum, where the class has no field for that.
    """
    counts = {"expert_count": experts, "expert_used_count": chosen, "expert_feed_forward_length": width}
    own: dict[str, tuple[float | bool, ...]] = {"expert_gating_func": (0, scores)}
    if normalized is not None:
        own["expert_weights_norm"] = (normalized,)
    return Architecture(
        f"{model_class}ForCausalLM",
        model_type,
        fields={**counts, **(fields or {})},
        fixed={**own, **(fixed or {})},
        **more,
    )


def _qwen3() -> Architecture:
    return _mixture(
        "Qwen3Moe",
        "qwen3_moe",
        "num_experts",
        normalized=True,
        constants={"norm_topk_prob": True},
        names="qwen3moe",
    )


MIXTURES: Mapping[str, Architecture] = {
    # llama.cpp scales its embeddings whatever a file says.
    "afmoe": _mixture(
        "Afmoe",
        "afmoe",
        "num_experts",
        scores=SIGMOID,
        normalized=True,
        fields={
            "expert_weights_scale": "route_scale",
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "num_dense_layers",
        },
        constants={"mup_enabled": True, "route_scale": 1.0, "num_shared_experts": 0, "num_dense_layers": 0},
        add=(windows(4),),
        read=("attention.sliding_window_pattern",),
    ),
    # DeepSeek V3, R1, Kimi K2, GLM 4.7 Flash; V2 by `deepseek`.
    "deepseek2": _mixture(
        "DeepseekV3",
        "deepseek_v3",
        "n_routed_experts",
        fields={**LATENT, **_GROUPS, **_SHARED, **_WEIGHTS},
        fixed={"expert_gating_func": (0, SOFTMAX, SIGMOID)},
        constants={"q_lora_rank": None, "first_k_dense_replace": 0, **_NO_GROUPS, **_PLAIN_WEIGHTS},
        add=(deepseek,),
        read=("rope.scaling.yarn_log_multiplier", "nextn_predict_layers"),
    ),
    "dots1": _mixture(
        "Dots1",
        "dots1",
        "n_routed_experts",
        scores=SIGMOID,
        fields={**_GROUPS, **_SHARED, **_WEIGHTS},
        constants={"first_k_dense_replace": 0, **_NO_GROUPS, **_PLAIN_WEIGHTS},
        add=(full_attention,),
    ),
    "ernie4_5-moe": _mixture(
        "Ernie4_5_Moe",
        "ernie4_5_moe",
        "moe_num_experts",
        chosen="moe_k",
        normalized=True,
        fields={
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        constants={"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_interval": 1},
        add=(ernie_shared,),
        read=("expert_shared_feed_forward_length",),
    ),
    "exaone-moe": _mixture(
        "ExaoneMoe",
        "exaone_moe",
        "num_experts",
        scores=SIGMOID,
        fields={
            **_GROUPS,
            **_WEIGHTS,
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        constants={
            "sliding_window": None,
            "num_shared_experts": 0,
            "first_k_dense_replace": 0,
            **_NO_GROUPS,
            **_PLAIN_WEIGHTS,
        },
        add=(windows(4),),
        read=("attention.sliding_window_pattern", "nextn_predict_layers", "expert_shared_feed_forward_length"),
    ),
    "glm4moe": _mixture(
        "Glm4Moe",
        "glm4_moe",
        "n_routed_experts",
        scores=SIGMOID,
        fields={**_GROUPS, **_SHARED, **_WEIGHTS},
        constants={"first_k_dense_replace": 0, **_NO_GROUPS, **_PLAIN_WEIGHTS},
        add=(norms_of_heads,),
        read=("nextn_predict_layers",),
    ),
    "gpt-oss": _mixture(
        "GptOss",
        "gpt_oss",
        "num_local_experts",
        width="intermediate_size",
        scores=SOFTMAX_OF_CHOSEN,
        normalized=False,
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        add=(windows(2), yarn_without_truncation),
        read=("attention.sliding_window_pattern",),
        modules={"self_attn.sinks": "attn_sinks"},
    ),
    "granitemoe": _mixture(
        "GraniteMoe",
        "granitemoe",
        "num_local_experts",
        width="intermediate_size",
        normalized=True,
        fields=GRANITE_SCALES,
        fixed=ROPE_ALWAYS,
        add=(granite_shared,),
        read=("expert_shared_feed_forward_length",),
        interleaved=True,
    ),
    "hunyuan-moe": _mixture(
        "HunYuanMoEV1",
        "hunyuan_v1_moe",
        "num_experts",
        chosen="moe_topk",
        width="intermediate_size",
        normalized=True,
        add=(hunyuan_width,),
        read=("expert_shared_count", "expert_shared_feed_forward_length"),
    ),
    "llama": _mixture(
        "Mixtral",
        "mixtral",
        "num_local_experts",
        width="intermediate_size",
        normalized=True,
        constants={"sliding_window": None},
        names="llama",
        interleaved=True,
    ),
    "minimax-m2": _mixture(
        "MiniMaxM2", "minimax_m2", "num_local_experts", width="intermediate_size", scores=SIGMOID, normalized=True
    ),
    "olmoe": _mixture(
        "Olmoe",
        "olmoe",
        "num_experts",
        width="intermediate_size",
        normalized=False,
        constants={"norm_topk_prob": False},
    ),
    "qwen2moe": _mixture(
        "Qwen2Moe",
        "qwen2_moe",
        "num_experts",
        normalized=False,
        fields={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants={"norm_topk_prob": False},
    ),
    "qwen3moe": _qwen3(),
    "qwen3vlmoe": _qwen3(),
    # llama.cpp's window is this one, whatever a file says.
    "smallthinker": _mixture(
        "SmallThinker",
        "smallthinker",
        "moe_num_primary_experts",
        chosen="moe_num_active_primary_experts",
        width="moe_ffn_hidden_size",
        normalized=True,
        fixed={"expert_gating_func": (SOFTMAX, SIGMOID), "attention.sliding_window": (0, SMALLTHINKER_WINDOW)},
        add=(smallthinker,),
    ),
}
