"""Small models of every supported family and variant, with random weights and odd sizes, and their checkpoints.

The models are transformers' own, in float32. Their weights are rounded to float16, so that an f16 artifact holds
exactly the same numbers. What transformers does not have (dReLU, FATReLU) is patched in here, apart from picompile's
definitions.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITIONS = 384
VOCABULARY = 503


@dataclass(frozen=True)
class Variant:
    """`config` and `patch` make the eager model; `rename` is what the checkpoint's config.json says instead."""

    model_class: str
    config: Mapping[str, Any]
    patch: Callable[[nn.Module], None] = lambda model: None
    rename: Mapping[str, Any] = field(default_factory=dict)


def _drelu(model: nn.Module) -> None:
    def forward(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: mlp.down_proj(F.relu(mlp.gate_proj(x)) * F.relu(mlp.up_proj(x)))

    for layer in model.model.layers:
        layer.mlp.forward = forward(layer.mlp)


def _fatrelu(threshold: float) -> Callable[[nn.Module], None]:
    def patch(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Threshold(threshold, 0.0)

    return patch


def _around_zero(model: nn.Module) -> None:
    """Makes weights of norms that have one added what they are in checkpoints."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.sub_(1)


_SIZES = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}


def _llama(hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, **_SIZES}
    return {**sizes, "num_key_value_heads": kv_heads, "hidden_act": "relu", "tie_word_embeddings": False, **more}


def _opt(hidden: int, ffn: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "ffn_dim": ffn, "num_attention_heads": heads, **_SIZES}
    return {**sizes, "word_embed_proj_dim": hidden, "init_std": 0.1, **more}


def _falcon(hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_attention_heads": heads, "alibi": False, **_SIZES, **more}


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TIED = {"hidden_act": "silu", "tie_word_embeddings": True}
_NO_WINDOW = {"sliding_window": None}
_FATRELU = {"hidden_act": "fatrelu", "hidden_act_param": 0.05}
_BAMBOO = {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"}
_TURBOSPARSE = {"architectures": ["TurboSparseMistralForCausalLM"], "model_type": "turbosparsemistral"}
_PLAIN_NORMS = {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}
_GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 5, "ffn_hidden_size": 864, "activation": "relu"}
_SERIAL = {"multi_query": False, "parallel_attn": False, "bias": True, "activation": "relu"}

# Their classes' own are beyond this vocabulary.
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_SQUARED = {"hidden_act": "relu2", **_SPECIAL}

VARIANTS: dict[str, Variant] = {
    "llama-relu": Variant("LlamaForCausalLM", _llama(96, 200, 4, 2)),
    "llama3-silu-tied": Variant("LlamaForCausalLM", _llama(320, 864, 5, 5, rope_parameters=_LLAMA3, **_TIED)),
    "prosparse": Variant("LlamaForCausalLM", _llama(96, 200, 3, 3), _fatrelu(0.05), _FATRELU),
    "mistral-window": Variant("MistralForCausalLM", _llama(96, 864, 4, 1, sliding_window=50)),
    "bamboo": Variant("MistralForCausalLM", _llama(320, 200, 8, 4, **_NO_WINDOW), _drelu, _BAMBOO),
    "turbosparse": Variant("MistralForCausalLM", _llama(96, 200, 6, 3, **_NO_WINDOW), _drelu, _TURBOSPARSE),
    "opt-pre-norm": Variant("OPTForCausalLM", _opt(320, 864, 5)),
    "opt-post-norm": Variant("OPTForCausalLM", _opt(96, 200, 3, do_layer_norm_before=False, word_embed_proj_dim=64)),
    "opt-galactica": Variant("OPTForCausalLM", _opt(96, 200, 4, **_PLAIN_NORMS)),
    "falcon-7b": Variant("FalconForCausalLM", _falcon(96, 3, multi_query=True, parallel_attn=True, bias=False)),
    "falcon-40b": Variant("FalconForCausalLM", _falcon(320, 10, **_GROUPED)),
    "falcon-serial": Variant("FalconForCausalLM", _falcon(96, 4, **_SERIAL)),
    "qwen2": Variant("Qwen2ForCausalLM", _llama(96, 200, 4, 2, **_TIED)),
    "bitnet": Variant("BitNetForCausalLM", _llama(100, 204, 5, 1, **_SQUARED)),
    "arcee": Variant("ArceeForCausalLM", _llama(72, 203, 3, 1, head_dim=24, **_SQUARED)),
    "nemotron": Variant(
        "NemotronForCausalLM", _llama(96, 203, 4, 2, partial_rotary_factor=0.5, **_SQUARED), _around_zero
    ),
    "nanochat": Variant("NanoChatForCausalLM", _llama(100, 204, 5, 5, **_SQUARED)),
    "persimmon": Variant("PersimmonForCausalLM", _llama(80, 204, 5, 5, partial_rotary_factor=0.5, **_SQUARED)),
    "jais2": Variant("Jais2ForCausalLM", _llama(72, 203, 3, 1, head_dim=24, **_SQUARED)),
}

# Families of squared ReLU. Their shapes are lowered to be counted, rather than derived from the numbers of a config.
SQUARED = ("bitnet", "arcee", "nemotron", "nanochat", "persimmon", "jais2")


def build(name: str, seed: int = 0) -> nn.Module:
    """The eager model of a variant: float32, every weight a float16 number."""
    import transformers

    variant = VARIANTS[name]
    model_class = getattr(transformers, variant.model_class)
    torch.manual_seed(seed)
    model: nn.Module = model_class(model_class.config_class(**variant.config)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Biases and norms start as zeros and ones, which would hide that one is forgotten.
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in parameter_name:
                # Wide enough that logits are well apart, narrow enough that no family overflows.
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
            parameter.copy_(parameter.half())
    variant.patch(model)
    return model


def config_of(name: str, layers: int) -> dict[str, Any]:
    """The config.json of a small model of a family, with another number of layers."""
    import transformers

    variant = VARIANTS[name]
    config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
    config |= {"architectures": [variant.model_class], **variant.rename, "num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:1] * layers
    return dict(config)


def save(name: str, model: nn.Module, folder: Path, dtype: torch.dtype = torch.float16, **options: Any) -> None:
    """Writes `model` as a checkpoint of the variant. `options` go to `save_pretrained`: max_shard_size, for one."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder, **options)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | dict(VARIANTS[name].rename)
    path.write_text(json.dumps(config))
