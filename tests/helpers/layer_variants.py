"""Variants of a class's small model that show every kind of layer its code has, and every option of its config."""

import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helpers.small_models import config_class

# What transformers calls `layer_types`, as far as decoders have them.
_LAYER_TYPES = (
    *("full_attention", "sliding_attention", "chunked_attention", "conv", "linear_attention", "hybrid"),
    *("hybrid_sliding", "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
    "minimax_m3_sparse",
)
# Flags that change nothing of a decoder's logits for a text, or that make it another thing than a causal decoder.
_NO_OPTIONS = re.compile(
    r"output_|summary_|use_cache|return_dict|is_encoder_decoder|is_decoder|add_cross_attention|use_task_id|use_prompt|"
    r"classifier_bias|share_encoder_decoder_embeddings|use_weighted_layer_sum|apply_spec_augment|use_bidirectional|"
    r"norm_topk_prob|use_mamba_kernels|tie_encoder_decoder|use_sliding_window|is_causal|.*router.*|.*(vision|audio).*"
)


@dataclass(frozen=True)
class Variant:
    """A config of a class: the kinds of layers that it has, and the fields that give them."""

    kinds: tuple[str, ...]
    options: Mapping[str, Any]


def whole_variants(model_type: str) -> list[Variant]:
    """Return configs that together have all kinds of layers that the code of a class has: mostly one."""
    fields = _fields(model_type)
    if "layer_types" in fields:
        return [Variant(kinds, _layers(fields, kinds))] if (kinds := _kinds(model_type)) else [Variant((), {})]
    if "no_rope_layers" in fields:
        return [Variant(("full_attention", "no_rope"), {"no_rope_layers": [1, 0]})]
    if "sliding_window" in fields:
        full, sliding = ("full_attention",), ("sliding_attention",)
        return [Variant(sliding, {"sliding_window": 5}), Variant(full, {"sliding_window": None})]
    if "attention_types" in fields:
        return [Variant(("full_attention", "sliding_attention"), {})]
    return [Variant((), {})]


def parts(model_type: str, variant: Variant) -> list[Variant]:
    """Return a config for each kind of layer of `variant`, which has that kind alone."""
    fields = _fields(model_type)
    if "layer_types" not in fields or len(variant.kinds) < 2:
        return []
    alone = [kind for kind in variant.kinds if kind != "no_rope"]
    # Granite 4's small models have a class of mixtures, and no experts.
    dense = {"num_local_experts": 0} if "num_local_experts" in fields and "shared_intermediate_size" in fields else {}
    return [Variant((kind,), {**_layers(fields, (kind,)), **dense}) for kind in alone]


def option_variants(model_type: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the flags of a class's config, each with the value that is not its default, and a scaling of rotary."""
    flags = [
        (field.name, {field.name: not field.default})
        for field in dataclasses.fields(config_class(model_type))
        if type(field.default) is bool and not _NO_OPTIONS.match(field.name)
    ]
    return flags + ([("yarn", {})] if "rope_parameters" in _fields(model_type) else [])


def yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of a config with YaRN, for each kind of layers where it has several."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {kind: yarn(value) for kind, value in rope.items()}
    return {**rope, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def _fields(model_type: str) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class(model_type))}


def _layers(fields: set[str], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that give layers of `kinds`, one after the other, and then once more: a first may differ."""
    types = list(kinds) * 2
    options: dict[str, Any] = {"layer_types": types, "num_hidden_layers": len(types)}
    if "use_sliding_window" in fields:
        options["use_sliding_window"] = "sliding_attention" in kinds
    if "no_rope_layers" in fields:
        # The last layer has none.
        options["no_rope_layers"] = [1] * (len(types) - 1) + [0]
    return options


def _kinds(model_type: str) -> tuple[str, ...]:
    """Return the kinds of layers that a class's code names, those of its default config first and in their order."""
    module = inspect.getmodule(config_class(model_type))
    assert module is not None
    text = inspect.getsource(module)
    # A config may be of a model that has another file's code.
    with contextlib.suppress(ImportError):
        text += inspect.getsource(importlib.import_module(module.__name__.replace(".configuration_", ".modeling_")))
    try:
        default = list(getattr(config_class(model_type)(), "layer_types", None) or ())
    except Exception:
        default = []
    named = [kind for kind in _LAYER_TYPES if f'"{kind}"' in text]
    return tuple(dict.fromkeys([*default, *named]))
