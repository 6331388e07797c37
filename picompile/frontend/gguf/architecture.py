"""The record of an architecture of GGUF files, and keys that many architectures share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from picompile.frontend.gguf.values import MetadataValues

Add = Callable[[MetadataValues, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF files.

    `fields` are keys and their fields beyond those that nearly all architectures share (`SHARED_KEYS`); `constants` are
    fields that have no key, or their values where it is missing. `fixed` are keys with the only values that the class
    computes. Each function of `add` returns further fields, for which it reads the keys `read`. `names` is the
    architecture whose table of names in `gguf` holds, if not its own, and `modules` are names of a layer's modules that
    this table lacks. Rows of queries and keys are `interleaved` where llama.cpp turns neighbours and the class turns
    halves; `plus_one` says that 1 was added to the weights of norms, and `rows_by_part` that a fused projection has all
    queries first. `has_rope` is False for other kinds of positions.
    """

    model_class: str
    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[float | bool, ...]] = field(default_factory=dict)
    add: tuple[Add, ...] = ()
    read: tuple[str, ...] = ()
    names: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    plus_one: bool = False
    rows_by_part: bool = False
    has_rope: bool = True


# Key → the names that fields for it have, of which a class has one.
SHARED_KEYS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "vocab_size": ("vocab_size",),
}

# Keys and fields that architectures of several kinds have.
GRANITE_SCALES: Mapping[str, str] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
LATENT: Mapping[str, str] = {f"attention.{name}": name for name in ("q_lora_rank", "kv_lora_rank")}
ROPE_ALWAYS: Mapping[str, tuple[float | bool, ...]] = {"rope.scaling.finetuned": (True,)}
