"""Which of transformers' classes a config.json is, and the few families that need more than that.

Any class that `AutoModelForCausalLM` takes for a config is captured. A family is written down here where the class is
not transformers' own, where a checkpoint's code computes something else than its config says, or where `plan --shape`
reads the numbers of a config without starting transformers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeGuard, cast

from picompile.errors import UnsupportedModelError
from picompile.quantities import LARGEST_FLOAT32

EXPERT_COUNTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "moe_num_primary_experts",
)
"""The fields of configs that have the number of routed experts of a layer."""

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
_ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")
# And those whose frequencies are others for longer texts than a model was first trained on. It is captured as it is for
# texts up to that length.
GROWING_ROPE_TYPES = ("dynamic", "longrope")

# Kinds of layers that keep another state between tokens than keys and values, as transformers calls them.
_OTHER_MIXERS = {
    "conv": "short convolution",
    "linear_attention": "recurrence (linear attention or a state space)",
    "hybrid": "recurrence beside attention",
    "hybrid_sliding": "recurrence beside attention",
}


@dataclass(frozen=True)
class Family:
    """One family. `config_class` and `model_class` are `module:name`; `activation` is a field of the config.

    `activations` are those that the field may name, where not all do; `fixed_activation` is the gate's, as the dialect
    has it, where the class computes it whatever the field says. Where `is_known` is False nothing is known of the
    config's fields: the captured graph shows what the model computes.
    """

    name: str
    config_class: str
    model_class: str
    activation: str = "hidden_act"
    activations: tuple[str, ...] = ()
    fixed_activation: str | None = None
    is_known: bool = True

    @property
    def is_ours(self) -> bool:
        """Return whether transformers has no class for it."""
        return self.model_class.startswith("picompile.")


_LLAMA = Family("llama", "transformers:LlamaConfig", "transformers:LlamaForCausalLM")
_MISTRAL = Family("mistral", "transformers:MistralConfig", "transformers:MistralForCausalLM")
_BAMBOO = Family(
    "bamboo",
    "picompile.frontend.bamboo:BambooConfig",
    "picompile.frontend.bamboo:BambooForCausalLM",
    fixed_activation="relu",
)
# Its authors' code has the config's activation on both sides of the gate.
_TURBOSPARSE_MIXTRAL = Family(
    "turbosparse-mixtral",
    "picompile.frontend.turbosparse_mixtral:TurboSparseMixtralConfig",
    "picompile.frontend.turbosparse_mixtral:TurboSparseMixtralForCausalLM",
    activations=("relu",),
)
_SMALLTHINKER = Family(
    "smallthinker",
    "picompile.frontend.smallthinker:SmallThinkerConfig",
    "picompile.frontend.smallthinker:SmallThinkerForCausalLM",
    fixed_activation="relu",
)
_QWEN2 = Family("qwen2", "transformers:Qwen2Config", "transformers:Qwen2ForCausalLM")
_OPT = Family(
    "opt",
    "transformers:OPTConfig",
    "transformers:OPTForCausalLM",
    activation="activation_function",
)
_FALCON = Family("falcon", "transformers:FalconConfig", "transformers:FalconForCausalLM", activation="activation")

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
    "TurboSparseMixtralForCausalLM": {"turbosparsemixtral": _TURBOSPARSE_MIXTRAL},
    "SmallThinkerForCausalLM": {"smallthinker": _SMALLTHINKER},
    "OPTForCausalLM": {"opt": _OPT},
    "FalconForCausalLM": {"falcon": _FALCON},
    "Qwen2ForCausalLM": {"qwen2": _QWEN2},
}


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json: one of `FAMILIES`, or a class that transformers has for its model type.

    Raises `UnsupportedModelError`, naming what it is, for a model that transformers does not have, and for one whose
    class and model type say different things.
    """
    architecture, model_type = _named(config)
    if architecture is None:
        architecture = next((name for name, types in FAMILIES.items() if model_type in types), None)
    if architecture not in FAMILIES:
        return _transformers_family(config, architecture, model_type)
    types = FAMILIES[str(architecture)]
    if model_type is not None and model_type not in types:
        if (family := _of_transformers(architecture, model_type)) is not None:
            return family
        raise UnsupportedModelError(
            f"config.json: the class {architecture} and the model_type {model_type} are different models; "
            f"{architecture} has the type {next(iter(types))}"
        )
    family = types[model_type or next(iter(types))]
    return _MINISTRAL if family is _MISTRAL and "layer_types" in config else family


def _transformers_family(config: Mapping[str, Any], architecture: str | None, model_type: str | None) -> Family:
    """Return the family of a class that is not in `FAMILIES`. Raises as `find_family` does."""
    family = _of_transformers(architecture, model_type)
    if family is not None:
        return family
    found = architecture or model_type or "unnamed"
    if config.get("auto_map"):
        raise UnsupportedModelError(
            f"config.json: {found} is code in the checkpoint (auto_map), which is never run; transformers has no such "
            "causal language model of its own"
        )
    raise UnsupportedModelError(
        f"models of the kind {found}{f' with the model_type {model_type}' if model_type and architecture else ''} are "
        "not supported: transformers has no causal language model of that class and type"
    )


def _of_transformers(architecture: str | None, model_type: str | None) -> Family | None:
    """Return the family of what transformers' auto classes make of a model type, None where they know no such class.

    A config without a type is of the first type that has the class.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    # The last ones have a decoder that text alone may ask.
    mappings = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    for known_type, known in chain.from_iterable(mapping.items() for mapping in mappings):
        classes = known if isinstance(known, tuple) else (known,)
        is_type = model_type == known_type if model_type is not None else architecture in classes
        if is_type and (architecture is None or architecture in classes):
            name = architecture or classes[0]
            config_class = f"transformers:{CONFIG_MAPPING_NAMES[known_type]}"
            return Family(known_type, config_class, f"transformers:{name}", is_known=False)
    return None


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
            "own code; where that is ReLU, give --activation relu, or say relu in config.json"
        )
    return f"fatrelu({_fatrelu_threshold(config)!r})" if name == "fatrelu" else ACTIVATIONS[name]


def _fatrelu_threshold(config: Mapping[str, Any]) -> float:
    threshold = config.get("hidden_act_param")
    if threshold is None:
        raise UnsupportedModelError(
            "config.json: hidden_act is fatrelu, but its threshold, hidden_act_param, is missing"
        )
    if not is_threshold(threshold):
        raise UnsupportedModelError(
            "config.json: hidden_act_param, the threshold of fatrelu, must be a number from 0 to "
            f"{LARGEST_FLOAT32:.4g}, not {repr(threshold)[:60]}"
        )
    return float(threshold)


def is_threshold(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number that FATReLU can have for its threshold."""
    return type(value) in (int, float) and 0 <= cast(float, value) <= LARGEST_FLOAT32


def check_config(family: Family, config: Any) -> None:
    """Raise `UnsupportedModelError` for what a config can ask for and is not supported."""
    for part in _with_text(config):
        _check_rope(part)
        _check_mixers(part)
    if family.is_known:
        _check_layer_types(config)
    limits = [limit for part in _with_text(config) for limit in _attention_limits(part)]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise UnsupportedModelError(
            "config.json: attention_chunk_size must be a whole number from 1, and floor_scale one from 2"
        )


def _check_mixers(config: Any) -> None:
    """Refuse layers that are no attention by their name: what a graph shows of them is harder to read."""
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    if other := next((kind for kind in kinds if kind in _OTHER_MIXERS), None):
        raise UnsupportedModelError(
            f"config.json: layer_types has {other}, layers of {_OTHER_MIXERS[other]}, which are not supported"
        )


def text_config(config: Any) -> Any:
    """Return the config of the decoder in a config of several models, such as one that reads images; else `config`."""
    try:
        return config.get_text_config(decoder=True)
    except (AttributeError, ValueError):
        return config


def _with_text(config: Any) -> tuple[Any, ...]:
    text = text_config(config)
    return (config,) if text is config else (config, text)


def _check_rope(config: Any) -> None:
    known = (*_ROPE_TYPES, *GROWING_ROPE_TYPES)
    for rope in rotary_fields(config):
        kind = rope.get("rope_type", "default")
        if kind not in known:
            raise UnsupportedModelError(
                f"rotary embeddings of type {kind} are not supported; supported are {', '.join(known)}"
            )
        if kind in GROWING_ROPE_TYPES and _limit(config, rope) is None:
            raise UnsupportedModelError(
                f"config.json: rotary embeddings of type {kind} need the length up to which they are the same"
            )


def rotary_fields(config: Any) -> list[Mapping[str, Any]]:
    """Return the descriptions of a config's rotary embeddings: one for all layers, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, Mapping)] or [rope]


def text_limit(config: Any) -> int | None:
    """Return the longest text for which attention is the same whatever the length; None for any length.

    Rotary embeddings of type `dynamic` have other frequencies beyond `max_position_embeddings`, `longrope` beyond
    `original_max_position_embeddings`, and from there on `llama_4_scaling_beta` scales queries (Ministral 3). In Llama
    4, tokens of one chunk do not see those before it, and layers without positions scale queries from `floor_scale` on.
    """
    parts = _with_text(config)
    limits = [_limit(part, rope) for part in parts for rope in rotary_fields(part)]
    limits += [limit for part in parts for limit in _attention_limits(part)]
    return min((limit for limit in limits if limit is not None), default=None)


def _attention_limits(config: Any) -> Iterator[int | None]:
    """Yield the lengths of texts beyond which layers attend in another way."""
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        yield getattr(config, "attention_chunk_size", None)
    if getattr(config, "attn_temperature_tuning", False):
        # The token at position floor_scale - 1 is the first one that is scaled.
        yield config.floor_scale - 1


def rope_reach(config: Any) -> int | None:
    """Return the longest text that YaRN extends a model to, None where no config says.

    Published recipes (Qwen2.5's) add `rope_scaling` alone and leave `max_position_embeddings` as it is.
    """
    reaches = []
    for rope in (rope for part in _with_text(config) for rope in rotary_fields(part)):
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if rope.get("rope_type") == "yarn" and isinstance(original, int) and isinstance(factor, int | float):
            reaches.append(int(original * factor))
    return min(reaches, default=None)


def _limit(config: Any, rope: Mapping[str, Any]) -> int | None:
    names = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    name = names.get(rope.get("rope_type", "default"))
    if rope.get("llama_4_scaling_beta"):
        name = "original_max_position_embeddings"
    limit = None if name is None else rope.get(name, getattr(config, name, None))
    return limit if type(limit) is int else None


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
