"""From a config.json to the config object of transformers, with its values checked.

Warnings of transformers and torch are kept off stderr: what a user should know of a checkpoint, picompile says itself.
"""

import copy
import dataclasses
import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from picompile.choices import MOST_LAYERS
from picompile.errors import UnsupportedModelError
from picompile.frontend.families import EXPERT_COUNTS, Family, check_config
from picompile.frontend.json_file import token_ids
from picompile.frontend.messages import one_line
from picompile.frontend.rope_fields import ROPE_FIELDS, settled_rope
from picompile.quantities import LARGEST_FLOAT32


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep what transformers logs and torch warns of from stderr, where it would come before our one line."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


# From the fields of a config.json to the config object of transformers: what a field may say, and what is not known.
#
# transformers checks the types of most fields and hardly any value. Here are the values that it would take and that
# give a model without sense (no layers, a window of none, NaN), or a model that takes all memory before anything is
# compared.


# More than ten times what the widest models have. A few tensors, such as tables of rows, are computed at these sizes
# while a model is captured; with much more they would take all memory.
_MOST_WIDTH = 1 << 18
_MOST_NEURONS = 1 << 20
_MOST_VOCABULARY = 1 << 22
_MOST_HEADS = 1 << 14
_MOST_EXPERTS = 1 << 16
# Kernels have no wider heads.
_MOST_HEAD_DIM = 2048
_MOST = (1 << 31) - 1

# Whole numbers: the least and the most of each. None stands for a default where transformers takes it.
_COUNTS: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (1, MOST_LAYERS - 1),
    **dict.fromkeys(("hidden_size", "n_embed", "word_embed_proj_dim"), (1, _MOST_WIDTH)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "moe_ffn_hidden_size"), (1, _MOST_NEURONS)),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), (0, _MOST_NEURONS)),
    # Some classes of mixtures have models without experts.
    **dict.fromkeys(EXPERT_COUNTS, (0, _MOST_EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "num_shared_experts"), (0, _MOST_EXPERTS)),
    "moe_num_active_primary_experts": (1, _MOST_EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), (0, _MOST_EXPERTS)),
    "vocab_size": (1, _MOST_VOCABULARY),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_kv_heads"), (1, _MOST_HEADS)),
    "head_dim": (1, _MOST_HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "sliding_window", "sliding_window_size"), (1, _MOST)),
    "original_max_position_embeddings": (1, _MOST),
    "max_window_layers": (0, _MOST),
    "num_ln_in_parallel_attn": (1, 2),
}
# Finite numbers that are not negative. Those in `_POSITIVE` are not 0 either.
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "partial_rotary_factor"),
    "attn_logit_softcapping",
)
ROPE_NUMBERS = (
    *("rope_theta", "factor", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim"),
)
_POSITIVE = ("rope_theta", "factor", "partial_rotary_factor", "attn_logit_softcapping")
# Fields that say nothing of the logits, and cost memory or ends in an error where it is wrong.
UNUSED = frozenset(
    {
        *("architectures", "auto_map", "model_type", "name_or_path", "torch_dtype", "dtype", "output_attentions"),
        *("id2label", "label2id", "num_labels", "problem_type", "attn_implementation", "experts_implementation"),
        *("quantization_config", "compression_config", "_name_or_path", "_attn_implementation", "_commit_hash"),
    }
)


def make_config(family: Family, raw: Mapping[str, Any]) -> Any:
    """Return the config object of `family` for a config.json of the contents `raw`.

    `fatrelu`, which transformers does not know, is put in when the model is built. Raises `UnsupportedModelError` for
    values that make no model, or one that is not supported.
    """
    check_values(raw)
    raw = settled_rope(raw)
    config_class = resolve(family.config_class)
    kept = {key: _with_floats(value) for key, value in raw.items() if not _is_left_out(config_class, key)}
    if isinstance(raw.get("text_config"), dict) and not hasattr(config_class, "rope_parameters"):
        # transformers ends in an AttributeError of fields that only the text has.
        kept = {key: value for key, value in kept.items() if key not in ROPE_FIELDS}
    values = copy.deepcopy(kept)
    if family.fixed_activation is not None or (family.is_known and values.get(family.activation) == "fatrelu"):
        values[family.activation] = "relu"
    try:
        with quiet_transformers():
            config = config_class.from_dict(values)
    except Exception as error:
        raise UnsupportedModelError(f"config.json: {one_line(error)}") from error
    check_config(family, config)
    if family.is_known and getattr(config, "head_dim", 0) is None:
        raise UnsupportedModelError(
            f"config.json: head_dim is missing, and {config_class.__name__} has no default for it"
        )
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    if type(heads) is not int or type(hidden) is not int:
        return config
    head_dim = getattr(config, "head_dim", None) or hidden // max(1, heads)
    if type(head_dim) is not int or not 1 <= head_dim <= _MOST_HEAD_DIM or heads * head_dim > _MOST_WIDTH:
        raise UnsupportedModelError(
            f"config.json: {heads} heads of {head_dim} numbers each; there must be 1 to {_MOST_HEAD_DIM} in a head, "
            f"and {_MOST_WIDTH} in all at most"
        )
    return config


def _with_floats(value: Any) -> Any:
    """Return a value of a config.json with the numbers that JSON does not have, as transformers writes them."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def default_activation(family: Family) -> str:
    """Return the activation of a config of `family` that names none."""
    return str(field_defaults(family)[family.activation])


def resolve(path: str) -> Any:
    """Return what `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def field_defaults(family: Family) -> dict[str, Any]:
    """Return the fields of the config class of `family`, and what each is where a config.json says nothing of it."""
    return {field.name: field.default for field in dataclasses.fields(resolve(family.config_class))}


def _is_left_out(config_class: type, key: str) -> bool:
    """Return whether transformers shall not see a key: it has no effect, or would take the place of a method."""
    if key in UNUSED:
        return True
    declared = {field.name for field in dataclasses.fields(config_class)}
    return key not in declared and (key.startswith("_") or callable(getattr(config_class, key, None)))


def check_values(raw: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for values of a config.json that make no model, whatever its family."""
    for key, (least, most) in _COUNTS.items():
        # Qwen2-MoE writes 0 where it uses none.
        is_unused = key == "sliding_window" and raw.get("use_sliding_window") is False
        _check_count("", key, value=raw.get(key), least=0 if is_unused else least, most=most)
    for key in _NUMBERS:
        _check_number("", key, raw.get(key))
    for key in ("bos_token_id", "eos_token_id"):
        token_ids(raw, key, "config.json")
    for name, rope in _rope_parameters(raw):
        _check_rope(name, rope)
    if isinstance(raw.get("text_config"), dict):
        try:
            check_values(raw["text_config"])
        except UnsupportedModelError as error:
            reason = str(error).removeprefix("config.json: ")
            raise UnsupportedModelError(f"config.json: text_config: {reason}") from error
    # Attention that sees what comes after a token; a model with it predicts nothing.
    if raw.get("is_causal", True) is not True:
        raise UnsupportedModelError("config.json: is_causal is not true; only causal attention is supported")
    if raw.get("per_layer_config") is not None:
        raise UnsupportedModelError("config.json: per_layer_config, layers of several shapes, is not supported")
    if "configuration_files" in raw:
        raise UnsupportedModelError(
            "config.json: configuration_files names other files for other versions of transformers; "
            "take the one that is meant for config.json"
        )


def _rope_parameters(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the objects that describe rotary embeddings; one may hold others, by kinds of layers."""
    for name in ROPE_FIELDS:
        value = raw.get(name)
        if isinstance(value, dict):
            yield f"{name}.", value
            yield from ((f"{name}.{kind}.", part) for kind, part in value.items() if isinstance(part, dict))
        elif value is not None:
            raise UnsupportedModelError(f"config.json: {name} must be an object, not {repr(value)[:60]}")


def _check_rope(name: str, rope: Mapping[str, Any]) -> None:
    for key in ("rope_type", "type"):
        if not isinstance(rope.get(key, ""), str):
            raise UnsupportedModelError(f"config.json: {name}{key} must be a name, not {repr(rope[key])[:60]}")
    for key in ROPE_NUMBERS:
        _check_number(name, key, rope.get(key))
    _check_count(
        name,
        key="original_max_position_embeddings",
        value=rope.get("original_max_position_embeddings"),
        least=1,
        most=_MOST,
    )


def _check_count(name: str, key: str, value: object, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise UnsupportedModelError(
            f"config.json: {name}{key} must be a whole number from {least} to {most}, not {repr(value)[:60]}"
        )


def _check_number(name: str, key: str, value: object) -> None:
    if value is None:
        return
    positive, most = key in _POSITIVE, 1.0 if key == "partial_rotary_factor" else LARGEST_FLOAT32
    if type(value) not in (int, float) or not 0 <= _as_float(value) <= most or (positive and value == 0):
        needed = ("above 0" if positive else "from 0") + (" to 1" if most == 1 else "")
        raise UnsupportedModelError(f"config.json: {name}{key} must be a number {needed}, not {repr(value)[:60]}")


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
