"""Keys of a config.json that have no effect: what a user should know of them, in one line."""

import dataclasses
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from picompile.frontend.config import UNUSED, resolve
from picompile.frontend.families import Family, rotary_fields, text_config, text_limit
from picompile.frontend.rope_fields import ROPE_FIELDS, rope_lines

# Fields that earlier versions wrote into every config.json.
_FORMER = frozenset(
    {
        *("add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "pruned_heads"),
        *("decoder_start_token_id", "sep_token_id", "prefix", "task_specific_params", "tf_legacy_loss", "torchscript"),
        *("tie_encoder_decoder", "tokenizer_class", "use_bfloat16", "_attn_implementation_autoset"),
        # Published OPT, Falcon, Qwen2.5, Bamboo and SmolLM2 checkpoints have these; transformers' classes read none.
        *("activation_dropout", "output_projection", "apply_residual_connection_post_layernorm", "ff_factor"),
        *("pretraining_tp", "is_llama_config", "transformers.js_config"),
    }
)
# Fields without effect where they have this value.
_OFF = {"use_mrope": False, "rope_interleaved": False}
# Fields that change logits, and that a config class may declare and the code of its model forget: transformers' MPT
# has the first three, its BioGPT the last.
_FORGOTTEN = ("logit_scale", "embedding_fraction", "norm_type", "layer_norm_eps")
_PART = "partial_rotary_factor"
# Keys that are read although no field is declared for them.
_READ = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "head_dim",
        "hidden_act_param",
        "n_embed",
        _PART,
        "rope_scaling",
        "rope_theta",
    }
)

_NAMED_KEYS = 8


def config_warnings(family: Family, raw: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """Return lines on what of a config.json has no effect, or not for all texts; none where there is nothing to say.

    `config` is what `make_config` made of its contents, `raw`.
    """
    unknown, limit = unknown_keys(family, raw, config), text_limit(config)
    lines = [*filter(None, [unknown]), *rope_lines(raw, config)]
    if limit is not None and limit < (getattr(text_config(config), "max_position_embeddings", None) or 0):
        lines.append(f"config.json: attention differs in texts of more than {limit:,} tokens; the context ends there")
    return tuple(lines)


def unknown_keys(family: Family, raw: Mapping[str, Any], config: Any = None) -> str | None:
    """Return one line that names the keys of a config.json that have no effect and should be known to have none.

    `config` is what `make_config` made of its contents, for a config of several models.
    """
    unknown = list(_unknown(family, raw, config))
    parts = []
    if unknown:
        named = ", ".join(_printable(key) for key in unknown[:_NAMED_KEYS])
        more = len(unknown) - _NAMED_KEYS
        parts.append(f"neither transformers nor picompile knows {named}{f' and {more} more' if more > 0 else ''}")
    if family.fixed_activation is not None and raw.get(family.activation, "relu") != "relu":
        parts.append(f"{family.activation} has no effect on models of the family {family.name}")
    if raw.get("auto_map"):
        parts.append("auto_map names code in the checkpoint, which is never run")
    return f"config.json: {'; '.join(parts)}" if parts else None


def _unknown(family: Family, raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Yield the keys that neither transformers nor picompile reads, with those of the text in a config of several."""
    own, text = resolve(family.config_class), None if config is None else text_config(config)
    classes = (own,) if text is None or text is config else (own, type(text))
    # Keys of the text may stand in either.
    inner = raw.get("text_config")
    parts = [("", raw, classes)]
    if len(classes) > 1 and isinstance(inner, Mapping):
        parts.append(("text_config.", inner, classes[1:]))
    for name, part, known in parts:
        yield from (f"{name}{key}" for key in part if not _is_known(key, part[key], known))
        for form in ROPE_FIELDS:
            rope = part.get(form) or {}
            values = (key for key in rope if not isinstance(rope[key], dict))
            yield from (f"{name}{form}.{key}" for key in values if not _is_rope_key(key, known))
    if text is not None and _turns_whole_heads(text, classes):
        yield _PART


def _is_known(key: str, value: object, classes: tuple[type, ...]) -> bool:
    if key in _OFF and value is _OFF[key]:
        return True
    if key in _FORGOTTEN and all(_lacks(each, key) and _is_set(each, key, value) for each in classes):
        return False
    read = (f'"{key}"', f"self.{key}")[: 1 + key.startswith("_")]
    return any(key in _known_keys(each) or any(text in _source(each) for text in read) for each in classes)


def _is_set(config_class: type, key: str, value: object) -> bool:
    """Return whether a value of a field is another than the class has for it."""
    return value != next((field.default for field in dataclasses.fields(config_class) if field.name == key), None)


def _turns_whole_heads(config: Any, classes: tuple[type, ...]) -> bool:
    """Return whether a config says that a part of each head turns, and the model's own frequencies do not read it."""
    ropes = [rope for rope in rotary_fields(config) if rope.get("rope_type", "default") == "default"]
    partial = any((rope.get(_PART) or 1.0) != 1.0 for rope in ropes)
    return partial and all(_lacks(each, _PART) and _PART not in _source(each) for each in classes)


def _is_rope_key(key: str, classes: tuple[type, ...]) -> bool:
    """Return whether transformers' code of rotary embeddings, or that of a model, names a key."""
    return any(f'"{key}"' in text for each in classes for text in (_rope_code(), _source(each), _model_code(each)))


def _lacks(config_class: type, key: str) -> bool:
    """Return whether the code of a model is there, and has no word of a field."""
    code = _model_code(config_class)
    return code != "" and key not in code


@lru_cache(maxsize=64)
def _known_keys(config_class: type) -> frozenset[str]:
    from transformers import GenerationConfig

    generation = GenerationConfig._get_default_generation_params()
    fields = {field.name for field in dataclasses.fields(config_class)}
    attributes = getattr(config_class, "attribute_map", {})
    return frozenset({*fields, *attributes, *generation, *UNUSED, *_FORMER, *_READ})


@lru_cache(maxsize=64)
def _source(config_class: type) -> str:
    """Return the code of a config class, which may read keys that are no fields, such as those of older versions."""
    try:
        return inspect.getsource(config_class)
    except (OSError, TypeError):
        return ""


@lru_cache(maxsize=64)
def _model_code(config_class: type) -> str:
    """Return the code of a config class's models, which is not imported for it; "" where there is none."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    found = importlib.util.find_spec(name)
    return "" if found is None or found.origin is None else Path(found.origin).read_text()


@lru_cache(maxsize=1)
def _rope_code() -> str:
    from transformers import modeling_rope_utils

    return inspect.getsource(modeling_rope_utils)


def _printable(key: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in key[:60])
