"""Options of a config.json that change what a model computes: each gives the logits of eager PyTorch, or is refused.

None of them may be passed over in silence.
"""

from typing import Any

import pytest

from helpers.greedy import config_json, graph_error
from picompile import UnsupportedModelError
from picompile.frontend.hf import capture_config
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize import canonicalize

_TRAINED = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
_LONG = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8, **_TRAINED}
_LONG |= {"original_max_position_embeddings": 64}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

# What is computed as eager PyTorch does.
_EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24, "tie_word_embeddings": True}),
    *(("llama", {"hidden_act": name}) for name in ("relu", "relu2", "gelu_pytorch_tanh", "quick_gelu", "swish")),
    ("llama", {"rms_norm_eps": 0.1}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": None}),
    *((name, _WINDOWS) for name in ("ministral", "gemma3_text", "cohere2")),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 5}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 5.0}),
    ("granite", {"attention_multiplier": 0.05}),
    ("olmo", {"clip_qkv": 0.5}),
    ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "use_parallel_residual": True}),
    ("phi", {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gptj", {"rotary_dim": 4}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"activation_function": "relu"}),
    ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    ("smollm3", {"no_rope_layers": [0, 1]}),
    ("nemotron", {"partial_rotary_factor": 0.5, "mlp_bias": True}),
    ("persimmon", {"qk_layernorm": False}),
    ("opt", {"do_layer_norm_before": False, "enable_bias": False}),
    ("bart", {"scale_embedding": True}),
    ("starcoder2", {"use_bias": False, "sliding_window": 4}),
    ("arcee", {"hidden_act": "relu2"}),
    # Up to the length from which it turns in another way; scaling of other kinds has test_capture_rope.py.
    ("phi3", {"rope_parameters": _LONG}),
    ("gemma3_text", {"rope_parameters": {"full_attention": _LONG, "sliding_attention": _PLAIN}, **_WINDOWS}),
    # A class of mixtures, without experts: Granite 4's dense models. Its forward takes no `use_cache`.
    ("granitemoehybrid", {"layer_types": ["full_attention"] * 2, "num_local_experts": 0}),
    ("minicpm3", {"attention_bias": True}),
    ("youtu", {"rope_interleave": False, "q_lora_rank": None}),
    ("youtu", {"rope_interleave": True}),
]  # fmt: skip
_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"is_decoder": False}),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ("llama", {"is_causal": False}),
    # A norm of its own for each head.
    ("stablelm", {"qk_layernorm": True}),
]


def _named(case: tuple[str, dict[str, Any]]) -> str:
    return f"{case[0]} {', '.join(f'{key}={str(value)[:24]}' for key, value in case[1].items())}"


@pytest.mark.slow(
    "exports a model per option; several of attention and of scales are fast",
    but=("gemma2 attn_logit_softcapping=2.0",),
)
@pytest.mark.parametrize("case", _EQUAL, ids=_named)
def test_options_change_the_graph_as_they_change_eager_pytorch(case: tuple[str, dict[str, Any]]) -> None:
    assert graph_error(*case, counts=(2, 23)) < 1e-4


@pytest.mark.slow("exports models; one is fast", but=("lfm2", "llama", "bert"))
@pytest.mark.parametrize("case", _REFUSED, ids=_named)
def test_options_that_cannot_be_expressed_are_refused(case: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises((UnsupportedModelError, UnsupportedGraphError)):
        canonicalize(capture_config(config_json(*case)))


@pytest.mark.slow("exports a model of many heads; two options are fast")
def test_as_many_slopes_as_large_models_have() -> None:
    """A square of positions for each head would take a gigabyte; a row for each is enough."""
    graph = canonicalize(capture_config(config_json("bloom", {"n_head": 16, "hidden_size": 64, "n_layer": 1})))
    (attention,) = calls(graph.graph, ATTENTION)
    slopes = arguments(attention)["slopes"]
    assert slopes.meta["val"].shape == (16,)


@pytest.mark.parametrize(
    ("model_type", "kind"), [("lfm2", "short convolution"), ("granitemoehybrid", "recurrence"), ("mamba", "recurrence")]
)
def test_layers_that_are_no_attention_are_named(model_type: str, kind: str) -> None:
    options = {"layer_types": ["conv", "full_attention"]} if model_type == "lfm2" else {}
    with pytest.raises(UnsupportedModelError, match=rf"layer_types has \w+, layers of {kind}"):
        capture_config(config_json(model_type, options))
