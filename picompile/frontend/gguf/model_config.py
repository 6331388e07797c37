"""From a GGUF file's metadata to the contents of a config.json.

`architectures.py` and `mixtures.py` have a record for each architecture that is read by one, and transformers' tables
serve the others.
Either way head sizes, scaled and partial rotary embeddings, biases and ties are added here, from the metadata and the
tensors. PowerInfer's files have four architectures, all with ReLU.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import transformers

from picompile.errors import UnsupportedModelError
from picompile.frontend.config import check_values, resolve
from picompile.frontend.families import FAMILIES
from picompile.frontend.gguf.architecture import SHARED_KEYS, Architecture
from picompile.frontend.gguf.expert_fields import check_counts
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.mixtures import MIXTURES
from picompile.frontend.gguf.records import RECORDED, find_record, is_mixture
from picompile.frontend.gguf.rope import rope_scaling
from picompile.frontend.gguf.tensor_types import POWERINFER_MAGIC
from picompile.frontend.gguf.ties import is_tied
from picompile.frontend.gguf.transformers_tables import (
    COMPILED,
    config_of_table,
    known_architectures,
    mapped_fields,
    special_fields,
)
from picompile.frontend.gguf.unread_keys import check_kind, check_unread
from picompile.frontend.gguf.values import MetadataValues, embedding_rows
from picompile.frontend.messages import shown

# PowerInfer's architectures: the class and the model type that they have at Hugging Face.
_POWERINFER = {
    "llama": ("LlamaForCausalLM", "llama"),
    "bamboo": ("BambooForCausalLM", "bamboo"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "opt": ("OPTForCausalLM", "opt"),
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# Llama 405B has 126. A thousand are built in two seconds.
_MOST_LAYERS = 1000
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.")
_FURTHER = "nextn_predict_layers"
# Keys with numbers that are not whole, and those of them that llama.cpp leaves out where they are 0.
_FLOAT_KEYS = re.compile(r"epsilon$|freq_base|scale$|softcapping$|clamp_kqv$")
_OFF_AT_ZERO = re.compile(r"scale$|clamp_kqv$")
# What transformers reads although no class has a field for it.
_READ = ("architectures", "model_type", "head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor")


def model_config(header: GgufHeader) -> dict[str, Any]:
    """Return the contents of the config.json that describes the model of `header`.

    Raises `UnsupportedModelError`, in one line, for architectures that are not read, and for values that make no model.
    """
    architecture = read_text(header, "general.architecture") or ""
    values = MetadataValues(header, architecture)
    check_kind(values)
    if not architecture:
        raise UnsupportedModelError(f"{header.file}: no name of an architecture in it (general.architecture)")
    record = None if header.magic == POWERINFER_MAGIC else find_record(header)
    _check_experts(values, record)
    fixed = {**({} if record is None else record.fixed), **_FIXED.get(architecture, {})}
    read = () if record is None else (*record.fields, *record.read)
    check_unread(values, read, fixed, mixture=is_mixture(header))
    if header.magic == POWERINFER_MAGIC:
        config = _powerinfer(values)
    elif record is not None:
        config = _of_record(values, record)
    else:
        if architecture not in known_architectures():
            raise _unknown(values, {*COMPILED, *RECORDED})
        config = config_of_table(values)
    for add in (_vocabulary, _layers, _heads, _biases, _ties):
        config |= add(values, config)
    if record is None:
        config |= special_fields(values, config)
    else:
        config = _finished(values, record, config)
    known = {*_fields(config), *model_classes(config)[0].attribute_map, *_READ}
    nothing = {*_TOKEN_IDS, *(() if record is None else record.constants)}
    config = {key: value for key, value in config.items() if key in known and (value is not None or key in nothing)}
    try:
        check_values(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{header.file}: its metadata make no config: {str(error).removeprefix('config.json: ')}"
        ) from error
    return config


# Keys that llama.cpp reads for architectures of transformers' tables, which have no place for them.
_FIXED: Mapping[str, Mapping[str, tuple[float | bool, ...]]] = {"lfm2": {"attention.sliding_window": (0,)}}


def model_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the config and the model class of a `model_config`."""
    name = config["architectures"][0]
    family = next(iter(FAMILIES.get(name, {}).values()), None)
    if family is not None and family.is_ours:
        return resolve(family.config_class), resolve(family.model_class)
    model_class = getattr(transformers, name)
    return model_class.config_class, model_class


def shared_field(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of the field that has the metadata's `key`, whatever the class calls it; None without one."""
    return next((config[field] for field in SHARED_KEYS[key] if config.get(field)), None)


def _unknown(values: MetadataValues, known: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{values.header.file}: GGUF models of the architecture {shown(values.architecture)} are not supported; "
        f"supported are {', '.join(sorted(known))}"
    )


def _check_experts(values: MetadataValues, record: Architecture | None) -> None:
    """Refuse experts of an architecture that has no record of a mixture, and such a record without experts."""
    experts, key = values.count("expert_count"), shown(values.key("expert_count"))
    if experts and record is None:
        raise UnsupportedModelError(
            f"{values.header.file}: mixtures of experts of the architecture {shown(values.architecture)} are not "
            f"supported ({key} is {experts}); supported are {', '.join(sorted(MIXTURES))}"
        )
    if experts:
        check_counts(values)
    elif record is None and values.architecture in MIXTURES and values.header.magic != POWERINFER_MAGIC:
        raise UnsupportedModelError(f"{values.header.file}: no {key} in it, the number of experts")


def _of_record(values: MetadataValues, record: Architecture) -> dict[str, Any]:
    """Return the fields that a record has keys for, and rotary embeddings."""
    config: dict[str, Any] = {
        "architectures": [record.model_class],
        "model_type": record.model_type,
        **record.constants,
    }
    fields = _fields(config)
    keys = {key: name for key, names in SHARED_KEYS.items() for name in names if name in fields}
    for key, name in {**keys, **record.fields}.items():
        if (found := _number(values, key)) is not None:
            config[name] = found
    if _FURTHER in record.read:
        # Layers behind the last one guess further tokens.
        config["num_hidden_layers"] = max(0, (values.count("block_count") or 0) - (values.count(_FURTHER) or 0)) or None
    if record.has_rope:
        # llama.cpp's own default, whatever the class has.
        config["rope_theta"] = values.above_zero("rope.freq_base") or 10000.0
    return config


def _number(values: MetadataValues, key: str) -> float | bool | None:
    value = values.header.values.get(values.key(key))
    if isinstance(value, bool):
        return value
    if not _FLOAT_KEYS.search(key):
        return values.count(key)
    return values.positive(key) if _OFF_AT_ZERO.search(key) else values.above_zero(key)


def _finished(values: MetadataValues, record: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with its rotary embeddings in one field, and what the record adds."""
    fields = _fields(config)
    keys = [key for key in SHARED_KEYS if key.endswith("epsilon") and fields.intersection(SHARED_KEYS[key])]
    if keys and all(shared_field(config, key) is None for key in keys):
        raise UnsupportedModelError(f"{values.header.file}: no {shown(values.key(keys[0]))} in it")
    if record.has_rope:
        scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
        rope = {**scaling, "rope_theta": config.pop("rope_theta")}
        if (part := config.pop("partial_rotary_factor", None)) is not None:
            rope["partial_rotary_factor"] = part
        config["rope_parameters"] = rope
        if "original_max_position_embeddings" in rope and rope["rope_type"] == "longrope":
            config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    for add in record.add:
        config |= add(values, config)
    return config


def _powerinfer(values: MetadataValues) -> dict[str, Any]:
    if values.architecture not in _POWERINFER:
        raise _unknown(values, _POWERINFER)
    class_name, model_type = _POWERINFER[values.architecture]
    # Its inference has ReLU for all of them: llm_build_ffn_sparse and build_falcon in llama.cpp at d3ebd7c.
    activation = {"falcon": "activation", "opt": "activation_function"}.get(model_type, "hidden_act")
    named = {"architectures": [class_name], "model_type": model_type, activation: "relu"}
    if model_type == "opt":
        return named | _opt(values)
    return named | mapped_fields(values, "falcon" if model_type == "falcon" else "llama")


def _opt(values: MetadataValues) -> dict[str, Any]:
    hidden = values.count("embedding_length")
    positions = values.header.tensors.get("position_embd.weight")
    return {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": values.count("feed_forward_length"),
        "num_attention_heads": values.count("attention.head_count"),
        "num_hidden_layers": values.count("block_count"),
        # Two rows of the table stand for no position.
        "max_position_embeddings": max(1, positions.shape[0] - 2) if positions else values.count("context_length"),
    }


# What every architecture gets. Each function returns fields to add.


def _vocabulary(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    header = values.header
    rows = embedding_rows(header)
    if rows is None:
        raise UnsupportedModelError(f"{header.file}: no matrix token_embd.weight: a file without a model's weights")
    size = config.get("vocab_size") or rows
    tokenizer = MetadataValues(header, "tokenizer.ggml")
    ids = {field: tokenizer.header.values.get(tokenizer.key(f"{key}_token_id")) for field, key in _TOKEN_IDS.items()}
    # Some files have -1 for a token that there is not; None keeps the class from having one of its own.
    own = {field: number if type(number) is int and 0 <= number < size else None for field, number in ids.items()}
    return {"vocab_size": size, **own}


def _layers(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a count of layers that the file has no tensors for: before a million of them are built, not after."""
    layers = shared_field(config, "block_count")
    if layers is None or layers > _MOST_LAYERS:
        key = shown(values.key("block_count"))
        raise UnsupportedModelError(f"{values.header.file}: {key} is {layers}; 1 to {_MOST_LAYERS} layers are read")
    found = {int(match[1]) for name in values.header.tensors if (match := _LAYER.match(name))}
    found -= set(range(layers, min(_MOST_LAYERS, values.count("block_count") or 0)))
    if odd := sorted(found.symmetric_difference(range(layers))):
        raise UnsupportedModelError(
            f"{values.header.file}: says {layers} layers, but has {'no ' if odd[0] < layers else ''}tensors of "
            f"layer {odd[0]} (block_count)"
        )
    return {}


def _heads(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return head sizes and counts, and what rotary embeddings depend on them."""
    hidden, heads = shared_field(config, "embedding_length"), shared_field(config, "attention.head_count")
    if values.architecture == "mamba":
        return {}
    if not hidden or not heads:
        raise UnsupportedModelError(f"{values.header.file}: no embedding_length or attention.head_count in it")
    fields = _fields(config)
    found: dict[str, Any] = {}
    if "num_key_value_heads" in fields and not config.get("num_key_value_heads"):
        found["num_key_value_heads"] = heads
    head_dim = values.count("attention.key_length") or config.get("head_dim") or hidden // heads
    if not head_dim:
        raise UnsupportedModelError(f"{values.header.file}: {heads} heads, but only {hidden} numbers for all of them")
    if values.architecture != "deepseek2" and (values.count("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError(f"{values.header.file}: heads whose keys and values differ in size")
    if "head_dim" in fields or head_dim != hidden // heads:
        found["head_dim"] = head_dim
    if "rope_theta" in config:
        rotary = values.count("rope.dimension_count")
        if "rotary_dim" not in config and ((rotary or head_dim) != head_dim or values.architecture in _PARTIAL):
            found["partial_rotary_factor"] = (rotary or head_dim) / head_dim
        scaling = rope_scaling(values, {"hidden_size": hidden, "num_attention_heads": heads, **config, **found})
        found |= {"rope_scaling": scaling} if scaling else {}
    return found


# Their classes turn a part of each head by default.
_PARTIAL = ("chatglm", "glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "orion", "phi2", "stablelm")


def _fields(config: Mapping[str, Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(model_classes(config)[0])}


def _biases(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say where biases are, as far as the class has them."""
    ends = {name.partition(".")[2].partition(".")[2] for name in values.header.tensors if name.startswith("blk.")}
    heads = bool({"attn_q.bias", "attn_qkv.bias"} & ends)
    attention = heads or "attn_output.bias" in ends
    has = {"attention_bias": attention, "mlp_bias": "ffn_up.bias" in ends, "use_qkv_bias": heads}
    has |= {"attention_out_bias": "attn_output.bias" in ends}
    has |= {"use_bias": attention, "bias": attention, "use_parallel_residual": "ffn_norm.weight" not in ends}
    fields = _fields(config) if values.architecture not in ("mamba", "lfm2", "opt") else set()
    return {name: value for name, value in has.items() if name in fields and name not in config}


def _ties(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"tie_word_embeddings": is_tied(values.header, values.architecture)}
