"""Small mixtures of experts of each architecture that has a record, written as llama.cpp's converter writes them.

The rules are those of `conversion/` in llama.cpp, forwards, as in `gguf_architectures.py`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from helpers.gguf_architectures import GRANITE, SCALES
from helpers.gguf_blocks import blocks_of_size
from helpers.gguf_files import Array, permuted, write_file

Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Mixture:
    """A small mixture: its architecture, its class and config, and how its file is written.

    `keys` are keys of the metadata by fields of the config, `more` others. `interleaved` says that rows of queries and
    keys are written for neighbours. `table` is the architecture whose table of names in `gguf` holds.
    """

    architecture: str
    model_class: str
    config: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Any], Values] = lambda config: {}
    interleaved: bool = False
    table: str = ""


def _model_class(name: str) -> Any:
    import transformers

    from picompile.frontend.smallthinker import SmallThinkerForCausalLM

    return SmallThinkerForCausalLM if name == "SmallThinkerForCausalLM" else getattr(transformers, name)


def build_mixture(mixture: Mixture, seed: int = 0) -> nn.Module:
    """The model with random weights, of which none is 0 or 1; biases for the choice of experts are among them."""
    model_class = _model_class(mixture.model_class)
    torch.manual_seed(seed)
    model: nn.Module = model_class(model_class.config_class(**mixture.config)).eval()
    with torch.no_grad():
        for name, values in model.state_dict().items():
            # Experts are made empty, and scores should be far apart.
            if ".experts." in name or values.abs().sum() == 0:
                values.copy_(0.1 * torch.randn_like(values))
            values.add_((0.5 if name.endswith(_ROUTERS) else 0.05) * torch.randn_like(values))
    return model


_ROUTERS = ("gate.weight", "router.weight", "wg.weight")


def save_mixture(folder: Path, name: str, **more: Any) -> Path:
    """Write an example with its random weights to model.gguf in a folder; see `write_mixture`."""
    write_mixture(folder / "model.gguf", MIXTURES[name], build_mixture(MIXTURES[name]), **more)
    return folder / "model.gguf"


def write_mixture(
    file: Path,
    mixture: Mixture,
    model: nn.Module,
    type_name: str = "F32",
    fused: bool = False,
    without: Collection[str] = (),
    types: Mapping[str, str] | None = None,
    **more: Any,
) -> None:
    """Write `model` as a GGUF file whose matrices are of `type_name`, but for those in `types`.

    `fused` makes one tensor of gate and up.

    `more` are values of the metadata under full keys, or `tensors`: others by name. None takes a key out.
    """
    tensors = dict(_tensors(mixture, model, fused)) | dict(more.pop("tensors", {}))
    tensors = {name: values for name, values in tensors.items() if name not in without}
    metadata = {f"{mixture.architecture}.{key}": value for key, value in _metadata(mixture, model.config).items()}
    metadata = {key: value for key, value in {**metadata, **more}.items() if value is not None}
    write_file(file, mixture.architecture, metadata, tensors, type_name, types=types)


def save_mixture_of_blocks(file: Path, name: str, types: Mapping[str, str], **changes: Any) -> None:
    """Write an example whose matrices are random blocks of `types`, by names as `ffn_gate_exps`; others are plain.

    `changes` are of its config.
    """
    mixture = replace(MIXTURES[name], config={**MIXTURES[name].config, **changes})
    model, rng, blocks = build_mixture(mixture), np.random.default_rng(0), {}
    tensors = dict(_tensors(mixture, model, fused=False))
    for tensor, values in tensors.items():
        type_name = types.get(tensor.split(".")[-2])
        if type_name is not None and tensor.endswith(".weight"):
            size = 1.0 if "embd" in tensor else values.shape[-1] ** -0.5
            rows = blocks_of_size(rng, type_name, math.prod(values.shape[:-1]), values.shape[-1], size)
            tensors[tensor], blocks[tensor] = rows.reshape(*values.shape[:-1], -1), type_name
    metadata = {f"{mixture.architecture}.{key}": value for key, value in _metadata(mixture, model.config).items()}
    write_file(file, mixture.architecture, metadata, tensors, blocks=blocks)


def _tensors(mixture: Mixture, model: nn.Module, fused: bool) -> Iterator[tuple[str, Array]]:
    config, tied = model.config, model.config.tie_word_embeddings
    for name, stored in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values: Array = stored.detach().numpy()
        layer = re.match(r"model\.layers\.([0-9]+)\.", name)
        prefix = f"blk.{layer[1]}." if layer else ""
        if match := re.search(r"\.experts\.(gate_up|down)_proj(_bias)?$", name):
            if config.model_type == "gpt_oss" and not match[2]:
                values = values.swapaxes(1, 2)
            ending = "bias" if match[2] else "weight"
            parts = {"down": values} if match[1] == "down" else _halves(config, values, axis=1, fused=fused)
            yield from ((f"{prefix}ffn_{part}_exps.{ending}", matrix) for part, matrix in parts.items())
        elif name.endswith("shared_mlp.input_linear.weight"):
            yield from ((f"{prefix}ffn_{part}_shexp.weight", half) for part, half in _halves(config, values, 0).items())
        elif "kv_b_proj" in name:
            yield from _latent(config, prefix, values)
        else:
            found = f"{prefix}{own}" if (own := _own_name(name)) else _table_name(mixture, name)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            part = found.split(".")[2] if layer else ""
            yield found, permuted(values, heads[part]) if mixture.interleaved and part in heads else values.squeeze()


def _halves(config: Any, values: Array, axis: int, fused: bool = False) -> dict[str, Array]:
    """Return gate and up: the halves of a matrix, or every other row of it in gpt-oss."""
    if fused:
        return {"gate_up": values}
    if config.model_type == "gpt_oss":
        return {"gate": values[:, ::2], "up": values[:, 1::2]}
    gate, up = np.split(values, 2, axis=axis)
    return {"gate": gate, "up": up}


def _latent(config: Any, prefix: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Split what makes keys and values of a latent vector; the part for keys is transposed for each head."""
    heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    key, value = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    yield f"{prefix}attn_k_b.weight", key.swapaxes(1, 2)
    yield f"{prefix}attn_v_b.weight", value


_OWN_NAMES = {
    r"\.(?:gate|router|router\.gate|gate\.wg)\.(weight|bias)$": r"ffn_gate_inp.\1",
    r"(?:e_score_correction|expert)_bias$": "exp_probs_b.bias",
    r"\.sinks$": "attn_sinks.weight",
    r"\.shared_expert_gate\.weight$": "ffn_gate_inp_shexp.weight",
    r"\.(?:shared_experts?|shared_mlp)\.(gate|up|down)_proj\.weight$": r"ffn_\1_shexp.weight",
    r"\.shared_mlp\.output_linear\.weight$": "ffn_down_shexp.weight",
}


def _own_name(name: str) -> str | None:
    for pattern, theirs in _OWN_NAMES.items():
        if match := re.search(pattern, name):
            return match.expand(theirs)
    return None


def _table_name(mixture: Mixture, name: str) -> str:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    table = mixture.table or mixture.architecture
    number = next(number for number, known in MODEL_ARCH_NAMES.items() if known == table)
    found = get_tensor_name_map(number, 8).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _metadata(mixture: Mixture, config: Any) -> Values:
    rope = config.rope_parameters or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: Values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.vocab_size,
    }
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow", 1.0)),
        }
    found |= {key: getattr(config, name) for key, name in mixture.keys.items()} | mixture.more(config)
    # whole numbers are no floats in a file
    return {key: float(value) if key.endswith("scale") and value is not None else value for key, value in found.items()}


def _mla(config: Any) -> Values:
    """Sizes of latent attention, as the converter has them since it writes two parts."""
    found = {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.head_count_kv": 1,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if (all_dim := (config.rope_parameters or {}).get("mscale_all_dim")) is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * all_dim
    return found


def _scores(number: int, more: Values | None = None) -> Callable[[Any], Values]:
    return lambda config: {"expert_gating_func": number, **(more or {})}


_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL = {**_COUNTS, "expert_count": "num_local_experts"}
_ROUTED = {**_COUNTS, "expert_count": "n_routed_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {"expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace"}
_WEIGHTS = {"expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob"}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
# Panels have 16 rows.
_BASE = {"vocab_size": 304, "num_hidden_layers": 3, "max_position_embeddings": 256, "pad_token_id": 0}
_BASE |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_BASE |= {"tie_word_embeddings": False, "num_experts_per_tok": 3}
_EIGHT = {**_BASE, "num_experts": 8, "moe_intermediate_size": 32}
_DEEP = {**_BASE, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1}
_DEEP |= {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_MLA |= {"qk_nope_head_dim": 8, "v_head_dim": 16}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_LATENT_YARN = {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
_OSS_YARN = {"rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}

_PRIMARY = {"expert_count": "moe_num_primary_experts", "expert_used_count": "moe_num_active_primary_experts"}
_PRIMARY |= {"expert_feed_forward_length": "moe_ffn_hidden_size"}
_SMALLTHINKER = {key: value for key, value in _BASE.items() if key not in ("intermediate_size", "num_experts_per_tok")}
_SMALLTHINKER |= {"num_hidden_layers": 5, "head_dim": 32, "moe_num_primary_experts": 8, "moe_ffn_hidden_size": 32}
_SMALLTHINKER |= {"moe_num_active_primary_experts": 3}

_NAMED_SHARED = {"expert_shared_count": "num_shared_experts"}

MIXTURES: Mapping[str, Mixture] = {
    "afmoe": Mixture(
        "afmoe",
        "AfmoeForCausalLM",
        {**_EIGHT, "num_hidden_layers": 4, "head_dim": 32, "num_shared_experts": 2, "num_dense_layers": 1}
        | {"route_scale": 2.5, "sliding_window": 8, "mup_enabled": True},
        {
            **_COUNTS,
            **_NAMED_SHARED,
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_scale": "route_scale",
            "attention.sliding_window": "sliding_window",
        },
        _scores(2, {"expert_weights_norm": True}),
    ),
    "deepseek2": Mixture(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        {**_DEEP, **_MLA, **_LATENT_YARN, "norm_topk_prob": True},
        {**_ROUTED, **_SHARED, **_WEIGHTS, **_GROUPS},
        lambda config: {**_mla(config), "expert_gating_func": 2},
    ),
    "deepseek2 with softmax": Mixture(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        {**_DEEP, **_MLA, **_LATENT_YARN, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        {**_ROUTED, **_SHARED, **_GROUPS, "expert_weights_scale": "routed_scaling_factor"},
        _mla,
    ),
    "dots1": Mixture(
        "dots1",
        "Dots1ForCausalLM",
        {**_DEEP, "norm_topk_prob": True, "sliding_window": None, "n_group": 1, "topk_group": 1},
        {**_ROUTED, **_SHARED, **_WEIGHTS},
        _scores(2),
    ),
    "ernie4_5-moe": Mixture(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **{key: value for key, value in _EIGHT.items() if key not in ("num_experts", "num_experts_per_tok")},
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        lambda config: {"expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads},
    ),
    "exaone-moe": Mixture(
        "exaone-moe",
        "ExaoneMoeForCausalLM",
        {**_EIGHT, "num_hidden_layers": 4, "num_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 8}
        | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {
            **_COUNTS,
            **_WEIGHTS,
            **_NAMED_SHARED,
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "first_k_dense_replace",
            "attention.sliding_window": "sliding_window",
        },
        lambda config: {
            "expert_gating_func": 2,
            "nextn_predict_layers": 0,
            "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        },
    ),
    "glm4moe": Mixture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        {**_DEEP, **_HALF, "head_dim": 32, "norm_topk_prob": True, "use_qk_norm": True, "attention_bias": True},
        {**_ROUTED, **_SHARED, **_WEIGHTS, **_GROUPS},
        _scores(2),
    ),
    "gpt-oss": Mixture(
        "gpt-oss",
        "GptOssForCausalLM",
        {**_BASE, **_OSS_YARN, "head_dim": 32, "num_local_experts": 8, "sliding_window": 8},
        {**_LOCAL, "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
    ),
    "granitemoe": Mixture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        {**_BASE, **SCALES, "num_local_experts": 8},
        {**_LOCAL, **GRANITE},
        interleaved=True,
    ),
    "granitemoe with a shared expert": Mixture(
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        {**_BASE, **SCALES, "num_local_experts": 8, "shared_intermediate_size": 48},
        {**_LOCAL, **GRANITE, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        interleaved=True,
    ),
    "hunyuan-moe": Mixture(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        {**{key: value for key, value in _BASE.items() if key != "num_experts_per_tok"}, **_HALF}
        | {"num_experts": 8, "moe_topk": 3, "head_dim": 16, "rope_parameters": None},
        {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        lambda config: {
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 1,
        },
    ),
    "llama": Mixture("llama", "MixtralForCausalLM", {**_BASE, "num_local_experts": 8}, _LOCAL, interleaved=True),
    "minimax-m2": Mixture(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        {**_BASE, **_HALF, "head_dim": 32, "num_local_experts": 8},
        {**_LOCAL, "expert_feed_forward_length": "intermediate_size"},
        _scores(2),
    ),
    "olmoe": Mixture("olmoe", "OlmoeForCausalLM", {**_BASE, "num_experts": 8}, _COUNTS),
    "qwen2moe": Mixture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        {**_EIGHT, "shared_expert_intermediate_size": 48},
        {
            **_COUNTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "smallthinker": Mixture(
        "smallthinker",
        "SmallThinkerForCausalLM",
        {**_SMALLTHINKER, "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0]},
        _PRIMARY,
        _scores(2, {"attention.sliding_window": 4096}),
    ),
    "smallthinker without windows": Mixture(
        "smallthinker",
        "SmallThinkerForCausalLM",
        {**_SMALLTHINKER, "moe_primary_router_apply_softmax": True},
        _PRIMARY,
        _scores(1),
    ),
    "qwen3moe": Mixture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {**_EIGHT, "head_dim": 32, "norm_topk_prob": True},
        {**_COUNTS, "expert_feed_forward_length": "moe_intermediate_size"},
    ),
}
