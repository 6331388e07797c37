"""The families of models that are supported: how each is recognized, and where its config has which number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from picompile.errors import UnsupportedModelError

# How transformers calls the activations that the dialect has.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "relu6": "relu6",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# Rotary embeddings whose frequencies do not depend on how long the text is.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """One family. `config_class` and `model_class` are `module:name`; `activation` and `ffn` are fields of the config.

    `kv_heads` and `check` work on the config; `check` gives the reason why a model of the family is not supported, or
    None.
    """

    name: str
    config_class: str
    model_class: str
    activation: str = "hidden_act"
    ffn: str = "intermediate_size"
    attention: str = "picompile"
    kv_heads: Callable[[Any], int] = lambda config: int(config.num_key_value_heads)
    check: Callable[[Any], str | None] = lambda config: None


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _check_falcon(config: Any) -> str | None:
    return "alibi attention biases" if config.alibi else None


_LLAMA = Family("llama", "transformers:LlamaConfig", "transformers:LlamaForCausalLM")
_MISTRAL = Family("mistral", "transformers:MistralConfig", "transformers:MistralForCausalLM")
_BAMBOO = Family("bamboo", "picompile.models:BambooConfig", "picompile.models:BambooForCausalLM")
_QWEN2 = Family("qwen2", "transformers:Qwen2Config", "transformers:Qwen2ForCausalLM")
_OPT = Family(
    "opt",
    "transformers:OPTConfig",
    "transformers:OPTForCausalLM",
    activation="activation_function",
    ffn="ffn_dim",
    kv_heads=lambda config: int(config.num_attention_heads),
)
_FALCON = Family(
    "falcon",
    "transformers:FalconConfig",
    "transformers:FalconForCausalLM",
    activation="activation",
    ffn="ffn_hidden_size",
    # Falcon's attention asks no registry: its own way through torch's operator is raised by a pass.
    attention="sdpa",
    kv_heads=_falcon_kv_heads,
    check=_check_falcon,
)

# By the class that config.json names, or else by its model type.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "SparseLlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "BambooForCausalLM": _BAMBOO,
    "TurboSparseMistralForCausalLM": _BAMBOO,
    "OPTForCausalLM": _OPT,
    "FalconForCausalLM": _FALCON,
    "Qwen2ForCausalLM": _QWEN2,
    "llama": _LLAMA,
    "sparsellama": _LLAMA,
    "mistral": _MISTRAL,
    "bamboo": _BAMBOO,
    "turbosparsemistral": _BAMBOO,
    "opt": _OPT,
    "falcon": _FALCON,
    "qwen2": _QWEN2,
}


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises `UnsupportedModelError`, naming what it is, where it is none of ours."""
    architectures = config.get("architectures") or ()
    named = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
    key = config.get("model_type") if named is None else named
    if key in FAMILIES:
        return FAMILIES[str(key)]
    known = ", ".join(sorted({name for name in FAMILIES if name.endswith("ForCausalLM")}))
    raise UnsupportedModelError(f"models of the kind {key or 'unnamed'} are not supported; supported are {known}")


def activation_text(config: Mapping[str, Any], name: object) -> str:
    """The dialect's text for the activation that a config calls `name`. Raises `UnsupportedModelError` for others.

    `fatrelu` is ProSparse's; its threshold is the config's `hidden_act_param`.
    """
    if name == "fatrelu":
        threshold = config.get("hidden_act_param")
        if not isinstance(threshold, (int, float)):
            raise UnsupportedModelError(
                "config.json: hidden_act is fatrelu, but its threshold, hidden_act_param, is missing"
            )
        return f"fatrelu({float(threshold)!r})"
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: the activation {name!r} is not supported; supported are fatrelu, {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[str(name)]


def check_config(family: Family, config: Any) -> None:
    """Raises `UnsupportedModelError` for what a config of a supported family can ask for and is not supported."""
    reason = family.check(config)
    if reason is not None:
        raise UnsupportedModelError(f"{family.name} models with {reason} are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"rotary embeddings of type {kind} are not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
