"""The model families that synth makes: the configuration and the tensor names of each.

Names are those of transformers' own checkpoints. A role is a tensor's function (`q`, `gate`, `attention_norm`); a
family's `names` give each role its place in the checkpoint, `{}` being the layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class SynthFamily:
    """One family.

    `norm` is `rms` or `layer`. `attention` is `split` (q, k and v apart) or `fused` (Falcon: one matrix, grouped by key
    head). `gated` says that there is a gate matrix, `two_sided` that up goes through the activation as well. `parallel`
    says that attention and FFN read the same residual stream. `tied` is what a configuration that doesn't say means.
    `required` are the fields that must have one value, or be absent.
    """

    architecture: str
    fields: Mapping[str, str]
    names: Mapping[str, str]
    norm: str = "rms"
    attention: str = "split"
    gated: bool = True
    two_sided: bool = False
    parallel: bool = False
    tied: bool = False
    required: Mapping[str, Any] = field(default_factory=dict)
    query_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias", False))
    output_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias", False))
    ffn_bias: Callable[[Config], bool] = lambda config: bool(config.get("mlp_bias", False))


_FIELDS = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "activation": "hidden_act",
    "eps": "rms_norm_eps",
}

_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "o": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}

_OPT_NAMES = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "attention_norm": "model.decoder.layers.{}.self_attn_layer_norm",
    "q": "model.decoder.layers.{}.self_attn.q_proj",
    "k": "model.decoder.layers.{}.self_attn.k_proj",
    "v": "model.decoder.layers.{}.self_attn.v_proj",
    "o": "model.decoder.layers.{}.self_attn.out_proj",
    "ffn_norm": "model.decoder.layers.{}.final_layer_norm",
    "up": "model.decoder.layers.{}.fc1",
    "down": "model.decoder.layers.{}.fc2",
}

_FALCON_NAMES = {
    "embedding": "transformer.word_embeddings",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "transformer.h.{}.input_layernorm",
    "qkv": "transformer.h.{}.self_attention.query_key_value",
    "o": "transformer.h.{}.self_attention.dense",
    "up": "transformer.h.{}.mlp.dense_h_to_4h",
    "down": "transformer.h.{}.mlp.dense_4h_to_h",
}

FAMILIES: dict[str, SynthFamily] = {
    "llama": SynthFamily("LlamaForCausalLM", _FIELDS, _LLAMA_NAMES),
    "mistral": SynthFamily("MistralForCausalLM", _FIELDS, _LLAMA_NAMES),
    "qwen2": SynthFamily(
        "Qwen2ForCausalLM", _FIELDS, _LLAMA_NAMES, query_bias=lambda config: True, output_bias=lambda config: False
    ),
    "bamboo": SynthFamily("BambooForCausalLM", _FIELDS, _LLAMA_NAMES, two_sided=True, required={"hidden_act": "relu"}),
    "opt": SynthFamily(
        "OPTForCausalLM",
        {**_FIELDS, "ffn": "ffn_dim", "kv_heads": "", "activation": "activation_function", "eps": ""},
        _OPT_NAMES,
        norm="layer",
        gated=False,
        tied=True,
        required={"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True},
        query_bias=lambda config: True,
        output_bias=lambda config: True,
        ffn_bias=lambda config: True,
    ),
    "falcon": SynthFamily(
        "FalconForCausalLM",
        {**_FIELDS, "ffn": "ffn_hidden_size", "kv_heads": "num_kv_heads", "activation": "activation"}
        | {"eps": "layer_norm_epsilon"},
        _FALCON_NAMES,
        norm="layer",
        attention="fused",
        gated=False,
        parallel=True,
        tied=True,
        required={"alibi": False, "parallel_attn": True, "bias": False},
    ),
}
# Falcon-40B and its kin: grouped key heads, and a norm of its own for each half of the block.
FAMILIES["falcon-new"] = replace(
    FAMILIES["falcon"],
    names={
        **{role: name for role, name in _FALCON_NAMES.items() if role != "attention_norm"},
        "attention_norm": "transformer.h.{}.ln_attn",
        "ffn_norm": "transformer.h.{}.ln_mlp",
    },
    required={**FAMILIES["falcon"].required, "num_ln_in_parallel_attn": None},
)


def find_family(config: Config) -> SynthFamily | None:
    """Return the family of a `config.json`, or None when synth does not make it."""
    variant = "-new" if config.get("new_decoder_architecture") else ""
    return FAMILIES.get(f"{config.get('model_type')}{variant}")
