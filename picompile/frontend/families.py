"""The families of models that are supported: how each is recognized, and where its config has which number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

# The largest float32, in which activations are computed.
_LARGEST_THRESHOLD = 3.4028234663852886e38

# Rotary embeddings whose frequencies do not depend on how long the text is.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """One family. `config_class` and `model_class` are `module:name`; `activation` and `ffn` are fields of the config.

    `activations` are those that the field may name, where not all do; `fixed_activation` is the gate's, as the dialect
    has it, where the class computes it whatever the field says.

    `kv_heads` and `check` work on the config; `check` gives the reason why a model of the family is not supported, or
    None.
    """

    name: str
    config_class: str
    model_class: str
    activation: str = "hidden_act"
    ffn: str = "intermediate_size"
    attention: str = "picompile"
    activations: tuple[str, ...] = ()
    fixed_activation: str | None = None
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
_BAMBOO = Family(
    "bamboo",
    "picompile.frontend.bamboo:BambooConfig",
    "picompile.frontend.bamboo:BambooForCausalLM",
    fixed_activation="relu",
)
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

# ProSparse's code computes the activation that its config names.
_PROSPARSE = replace(_LLAMA, activations=("relu", "fatrelu"))
# SparseLM's code computes ReLU, and its published configs say silu, which is left over.
_SPARSE_LM = replace(_LLAMA, activations=("relu",))
# What transformers' auto classes make of a Mistral config that says which layers have a window. Its Mistral would give
# all layers the same.
_MINISTRAL = replace(
    _MISTRAL, config_class="transformers:MinistralConfig", model_class="transformers:MinistralForCausalLM"
)

# By the class that config.json names, and by the model type beside it. The first type stands for a config without one.
# transformers' auto classes go by the type alone, so a type that they know must be of the class that they take.
FAMILIES: dict[str, dict[str, Family]] = {
    "LlamaForCausalLM": {"llama": _LLAMA},
    "SparseLlamaForCausalLM": {"sparsellama": _PROSPARSE, "llama_sparse_relu": _SPARSE_LM, "llama": _PROSPARSE},
    "MistralForCausalLM": {"mistral": _MISTRAL},
    "MinistralForCausalLM": {"ministral": _MINISTRAL},
    "BambooForCausalLM": {"bamboo": _BAMBOO},
    "TurboSparseMistralForCausalLM": {"turbosparsemistral": _BAMBOO},
    "OPTForCausalLM": {"opt": _OPT},
    "FalconForCausalLM": {"falcon": _FALCON},
    "Qwen2ForCausalLM": {"qwen2": _QWEN2},
}


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    Raises `UnsupportedModelError`, naming what it is, for one that is not supported, and for one whose class and model
    type say different things.
    """
    architecture, model_type = _named(config)
    if architecture is None:
        architecture = next((name for name, types in FAMILIES.items() if model_type in types), None)
    if architecture not in FAMILIES:
        found = architecture or model_type or "unnamed"
        raise UnsupportedModelError(f"models of the kind {found} are not supported; supported are {_known()}")
    types = FAMILIES[str(architecture)]
    if model_type is not None and model_type not in types:
        raise UnsupportedModelError(
            f"config.json: the class {architecture} and the model_type {model_type} are different models; "
            f"{architecture} has the type {next(iter(types))}"
        )
    family = types[model_type or next(iter(types))]
    return _MINISTRAL if family is _MISTRAL and "layer_types" in config else family


def _named(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the class and the model type that a config.json names."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise UnsupportedModelError(
            f"config.json: architectures must be a list of names, not {repr(architectures)[:60]}"
        )
    if model_type is not None and (not isinstance(model_type, str) or not model_type):
        raise UnsupportedModelError(f"config.json: model_type must be a name, not {repr(model_type)[:60]}")
    names = sorted(set(architectures or ()))
    if len(names) > 1:
        raise UnsupportedModelError(f"config.json: architectures names {', '.join(names)[:200]}, which are different")
    return names[0] if names else None, model_type


def _known() -> str:
    return ", ".join(sorted(FAMILIES))


def activation_text(config: Mapping[str, Any], family: Family, default: str) -> str:
    """Return the dialect's text for the activation of a config of `family`; `default` is transformers' own.

    Raises `UnsupportedModelError` for others. `fatrelu` is ProSparse's; its threshold is the config's
    `hidden_act_param`.
    """
    if family.fixed_activation is not None:
        return family.fixed_activation
    name = config.get(family.activation, default)
    if not isinstance(name, str) or name not in ("fatrelu", *ACTIVATIONS):
        raise UnsupportedModelError(
            f"config.json: the activation {repr(name)[:60]} is not supported; "
            f"supported are fatrelu, {', '.join(ACTIVATIONS)}"
        )
    if family.activations and name not in family.activations:
        architecture, model_type = _named(config)
        raise UnsupportedModelError(
            f"config.json: {family.activation} is {name}, but {architecture or model_type} has its activation in its "
            f"own code; where that is ReLU, say relu in config.json"
        )
    return f"fatrelu({_fatrelu_threshold(config)!r})" if name == "fatrelu" else ACTIVATIONS[name]


def _fatrelu_threshold(config: Mapping[str, Any]) -> float:
    threshold = config.get("hidden_act_param")
    if threshold is None:
        raise UnsupportedModelError(
            "config.json: hidden_act is fatrelu, but its threshold, hidden_act_param, is missing"
        )
    if type(threshold) not in (int, float) or not 0 <= threshold <= _LARGEST_THRESHOLD:
        raise UnsupportedModelError(
            "config.json: hidden_act_param, the threshold of fatrelu, must be a number from 0 to "
            f"{_LARGEST_THRESHOLD:.4g}, not {repr(threshold)[:60]}"
        )
    return float(threshold)


def check_config(family: Family, config: Any) -> None:
    """Raise `UnsupportedModelError` for what a config of a supported family can ask for and is not supported."""
    reason = family.check(config)
    if reason is not None:
        raise UnsupportedModelError(f"{family.name} models with {reason} are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"rotary embeddings of type {kind} are not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
    _check_layer_types(config)


def _check_layer_types(config: Any) -> None:
    """Refuse what transformers finds only when the model runs: a kind of layer, or a window, that it has not."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := sorted(str(kind) for kind in kinds - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"config.json: layer_types names {', '.join(others)}, which is not supported")
    if "sliding_attention" in kinds and config.sliding_window is None:
        raise UnsupportedModelError(
            "config.json: layer_types has layers with a sliding window, but sliding_window says none, or "
            "use_sliding_window is off"
        )
