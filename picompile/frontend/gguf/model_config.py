"""From a GGUF file's metadata to the contents of a config.json.

Which key is which field is transformers' own table, for the architectures that its GGUF reader has. Added is what that
reader leaves to defaults of one published model although the file says it: head sizes, scaled and partial rotary
embeddings, biases, Falcon's and GPT-2's sizes. PowerInfer's files have four architectures, all with ReLU.
"""

import dataclasses
import mmap
import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import get_gguf_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from picompile.errors import UnsupportedModelError
from picompile.frontend.config import check_values, one_line, resolve
from picompile.frontend.gguf.cursor import shown
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.rope import rope_scaling
from picompile.frontend.gguf.tensor_types import POWERINFER_MAGIC
from picompile.frontend.gguf.values import MetadataValues, shortest

# PowerInfer's architectures: the class and the model type that they have at Hugging Face.
_POWERINFER = {
    "llama": ("LlamaForCausalLM", "llama"),
    "bamboo": ("BambooForCausalLM", "bamboo"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "opt": ("OPTForCausalLM", "opt"),
}
# What transformers calls architectures that llama.cpp calls otherwise.
_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
_TEXT_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
# Fields of a config.json that are whole numbers wherever the table names them; others are not.
_FLOAT_KEYS = re.compile(r"epsilon$|freq_base$")
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# Llama 405B has 126. A thousand are built in two seconds.
_MOST_LAYERS = 1000
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.")
# Falcon and BLOOM share the matrices of embedding and head, and converters write both of them.
_TIED_WITH_BOTH = ("falcon", "bloom")
_COMPARED_BYTES = 1 << 20
# Keys that change what llama.cpp computes and that no config here has a field for, with the values that change nothing.
_NOT_READ: Mapping[str, tuple[float | bool, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window_pattern": (),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_count_swa": (),
    "rope.freq_base_swa": (),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Architectures whose classes have this window in all layers but every second or sixth, and these frequencies there.
_USUAL: Mapping[str, Mapping[str, tuple[float | bool, ...]]] = {
    "gemma2": {"attention.sliding_window_pattern": (2,)},
    "gemma3": {"attention.sliding_window_pattern": (6,), "rope.freq_base_swa": (10000.0,)},
}
# What transformers reads although no class has a field for it.
_READ = ("architectures", "model_type", "head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor")


def model_config(header: GgufHeader) -> dict[str, Any]:
    """Return the contents of the config.json that describes the model of `header`.

    Raises `UnsupportedModelError`, in one line, for architectures that are not read, for values that make no model,
    and for a file that is one part of several.
    """
    architecture = read_text(header, "general.architecture") or ""
    if not architecture:
        raise UnsupportedModelError(f"{header.file}: no name of an architecture in it (general.architecture)")
    if header.values.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(f"{header.file}: one part of a model in several files; merge them (gguf-split)")
    values = MetadataValues(header, architecture)
    for name, neutral in {**_NOT_READ, **_USUAL.get(architecture, {})}.items():
        if (value := header.values.get(values.key(name))) is not None and value not in neutral:
            raise UnsupportedModelError(f"{header.file}: {shown(values.key(name))} is {value!r:.40}, which is not read")
        if values.key(name) in header.arrays:
            raise UnsupportedModelError(f"{header.file}: {shown(values.key(name))} is a list, which is not read")
    config = _powerinfer(values) if header.magic == POWERINFER_MAGIC else _of_transformers(values)
    for add in (_vocabulary, _layers, _heads, _biases, _ties, *_SPECIAL.get(architecture, ())):
        config |= add(values, config)
    known = {*_fields(config), *model_classes(config)[0].attribute_map, *_READ}
    config = {key: value for key, value in config.items() if key in known and (value is not None or key in _TOKEN_IDS)}
    try:
        check_values(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{header.file}: its metadata make no config: {str(error).removeprefix('config.json: ')}"
        ) from error
    return config


def model_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the config and the model class of a `model_config`."""
    name = config["architectures"][0]
    if name == "BambooForCausalLM":
        return tuple(resolve(f"picompile.frontend.bamboo:{part}") for part in ("BambooConfig", name))
    model_class = getattr(transformers, name)
    return model_class.config_class, model_class


def _powerinfer(values: MetadataValues) -> dict[str, Any]:
    if values.architecture not in _POWERINFER:
        raise _unknown(values, _POWERINFER)
    class_name, model_type = _POWERINFER[values.architecture]
    # Its inference has ReLU for all of them: llm_build_ffn_sparse and build_falcon in llama.cpp at d3ebd7c.
    activation = {"falcon": "activation", "opt": "activation_function"}.get(model_type, "hidden_act")
    named = {"architectures": [class_name], "model_type": model_type, activation: "relu"}
    return named | (_opt(values) if model_type == "opt" else _mapped(values, "llama" if model_type != "falcon" else ""))


def _of_transformers(values: MetadataValues) -> dict[str, Any]:

    architecture = values.architecture
    name = _RENAMED.get(architecture, architecture)
    known = {_RENAMED_BACK.get(key, key) for key in GGUF_CONFIG_MAPPING if _text_type(key) in _causal(key)}
    if architecture not in known:
        raise _unknown(values, known)
    if architecture == "lfm2":
        return _lfm2(values)
    model_type = _text_type(name)
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        "model_type": model_type,
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {}),
        **_mapped(values, name),
    }


_RENAMED_BACK = {theirs: own for own, theirs in _RENAMED.items()}


def _text_type(name: str) -> str:
    return _TEXT_TYPES.get(name, name)


def _causal(name: str) -> Mapping[str, str]:
    """Return the classes of decoders, none for names in transformers' table that are no architectures."""
    # llama.cpp writes no architecture `mistral`.
    return {} if name == "mistral" else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _unknown(values: MetadataValues, known: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{values.header.file}: GGUF models of the architecture {shown(values.architecture)} are not supported; "
        f"supported are {', '.join(sorted(known))}"
    )


def _mapped(values: MetadataValues, name: str) -> dict[str, Any]:
    """Return the fields that transformers' table for `name` has keys for, and rotary embeddings."""
    config: dict[str, Any] = {}
    for key, field in GGUF_CONFIG_MAPPING[name or values.architecture].items():
        if field in (None, -1):
            continue
        found = values.above_zero(key) if _FLOAT_KEYS.search(key) else values.count(key)
        if found is not None:
            config[field] = found
    if values.architecture not in ("gpt2", "bloom", "mamba", "gemma4"):
        # llama.cpp's own default, whatever the class has.
        config["rope_theta"] = values.above_zero("rope.freq_base") or 10000.0
    return config


def _lfm2(values: MetadataValues) -> dict[str, Any]:
    """Return what the newer of transformers' two GGUF readers makes of LFM2."""
    header = values.header
    metadata: dict[str, Any] = {"general.architecture": "lfm2", **header.values}
    metadata["lfm2.attention.head_count_kv"] = values.counts("attention.head_count_kv")
    metadata["tokenizer.ggml.tokens"] = header.tensors["token_embd.weight"].shape[0] if _embedding(header) else None
    try:
        config: dict[str, Any] = get_gguf_config(metadata, tuple(header.tensors))
    except Exception as error:
        raise UnsupportedModelError(f"{header.file}: metadata of lfm2 is incomplete: {one_line(error)}") from error
    return {key: shortest(value) if isinstance(value, float) else value for key, value in config.items()}


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


def _embedding(header: GgufHeader) -> bool:
    entry = header.tensors.get("token_embd.weight")
    return entry is not None and len(entry.shape) == 2


def _vocabulary(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    header = values.header
    if not _embedding(header):
        raise UnsupportedModelError(f"{header.file}: no matrix token_embd.weight: a file without a model's weights")
    size = config.get("vocab_size") or header.tensors["token_embd.weight"].shape[0]
    tokenizer = MetadataValues(header, "tokenizer.ggml")
    ids = {field: tokenizer.header.values.get(tokenizer.key(f"{key}_token_id")) for field, key in _TOKEN_IDS.items()}
    # Some files have -1 for a token that there is not; None keeps the class from having one of its own.
    own = {field: number if type(number) is int and 0 <= number < size else None for field, number in ids.items()}
    return {"vocab_size": size, **own}


def _layers(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a count of layers that the file has no tensors for: before a million of them are built, not after."""
    layers = next((config[key] for key in ("num_hidden_layers", "n_layer") if config.get(key)), None)
    if layers is None or layers > _MOST_LAYERS:
        key = shown(values.key("block_count"))
        raise UnsupportedModelError(f"{values.header.file}: {key} is {layers}; 1 to {_MOST_LAYERS} layers are read")
    found = {int(match[1]) for name in values.header.tensors if (match := _LAYER.match(name))}
    if odd := sorted(found.symmetric_difference(range(layers))):
        raise UnsupportedModelError(
            f"{values.header.file}: says {layers} layers, but has {'no ' if odd[0] < layers else ''}tensors of "
            f"layer {odd[0]} (block_count)"
        )
    return {}


def _heads(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return head sizes and counts, and what rotary embeddings depend on them."""
    hidden = next((config[key] for key in ("hidden_size", "n_embd") if config.get(key)), None)
    heads = next((config[key] for key in ("num_attention_heads", "n_head") if config.get(key)), None)
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
    if values.architecture != "gemma4" and (values.count("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError(f"{values.header.file}: heads whose keys and values differ in size")
    if "head_dim" in fields or head_dim != hidden // heads:
        found["head_dim"] = head_dim
    if values.architecture == "gemma4":
        del found["head_dim"]
    if "rope_theta" in config:
        rotary = values.count("rope.dimension_count")
        if rotary and "rotary_dim" not in config and (rotary != head_dim or values.architecture in _PARTIAL):
            found["partial_rotary_factor"] = rotary / head_dim
        scaling = rope_scaling(values, {"hidden_size": hidden, "num_attention_heads": heads, **config, **found})
        found |= {"rope_scaling": scaling} if scaling else {}
    return found


# Their classes turn a part of each head by default.
_PARTIAL = ("stablelm", "nemotron")


def _fields(config: Mapping[str, Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(model_classes(config)[0])}


def _biases(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say where biases are, as far as the class has them."""
    ends = {name.partition(".")[2].partition(".")[2] for name in values.header.tensors if name.startswith("blk.")}
    attention = bool({"attn_q.bias", "attn_qkv.bias", "attn_output.bias"} & ends)
    has = {"attention_bias": attention, "mlp_bias": "ffn_up.bias" in ends, "use_qkv_bias": "attn_q.bias" in ends}
    has |= {"use_bias": attention, "bias": attention, "use_parallel_residual": "ffn_norm.weight" not in ends}
    fields = _fields(config) if values.architecture not in ("mamba", "lfm2", "opt") else set()
    return {name: value for name, value in has.items() if name in fields}


def _ties(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    header = values.header
    tied = "output.weight" not in header.tensors
    if not tied and values.architecture in _TIED_WITH_BOTH:
        tied = _equal_data(header, "token_embd.weight", "output.weight")
    return {"tie_word_embeddings": tied}


def _equal_data(header: GgufHeader, left: str, right: str) -> bool:
    """Return whether two tensors are of the same type and bytes."""
    one, other = header.tensors[left], header.tensors[right]
    if (one.type, one.shape) != (other.type, other.shape):
        return False
    with header.file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start in range(0, one.size_bytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, one.size_bytes - start)
            first, second = one.offset + start, other.offset + start
            if data[first : first + size] != data[second : second + size]:
                return False
    return True


# What single architectures get besides.


def _falcon(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv_heads = config["num_attention_heads"], values.count("attention.head_count_kv") or 1
    tensors = values.header.tensors
    grouped = kv_heads not in (1, heads)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1,
        "parallel_attn": True,
        "alibi": False,
        "ffn_hidden_size": values.count("feed_forward_length") or 4 * config["hidden_size"],
        "layer_norm_epsilon": values.above_zero("attention.layer_norm_epsilon") or 1e-5,
    }


def _gpt2(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"n_positions": values.count("context_length"), "n_inner": values.count("feed_forward_length")}


def _norm(field: str) -> Callable[[MetadataValues, Mapping[str, Any]], dict[str, Any]]:
    """Return a function that takes `field` from the epsilon of plain layer norms, where there is one."""

    def add(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
        epsilon = values.above_zero("attention.layer_norm_epsilon")
        return {} if epsilon is None else {field: epsilon}

    return add


def _window(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    window = values.count("attention.sliding_window")
    return {"sliding_window": window} if window else {}


def _experts(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_intermediate_size": values.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": values.count("expert_shared_feed_forward_length"),
    }


def _gemma(values: MetadataValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return soft caps, and the scale of the largest models of Gemma 2 and 3, which llama.cpp tells by their layers."""
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    found: dict[str, Any] = {key: value for key in keys if (value := values.above_zero(key)) is not None}
    if (values.architecture, config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62)):
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    return found


_SPECIAL: dict[str, tuple[Callable[[MetadataValues, Mapping[str, Any]], dict[str, Any]], ...]] = {
    "falcon": (_falcon,),
    "gpt2": (_gpt2,),
    "nemotron": (_norm("norm_eps"),),
    "phi3": (_window,),
    "qwen2moe": (_experts,),
    "qwen3moe": (_experts,),
    "gemma2": (_gemma,),
    "gemma3": (_gemma,),
}
