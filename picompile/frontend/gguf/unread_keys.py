"""Keys of the metadata that change what llama.cpp computes, and that must be read, or have a value without effect.

The list is llama.cpp's own table of keys (`LLM_KV_NAMES` of `src/llama-arch.cpp` at 0c1e57098) without those that are
sizes, which the shapes of tensors check, and without those of architectures that are not read.
"""

from collections.abc import Collection, Mapping

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.values import MetadataValues, shortest
from picompile.frontend.messages import shown

Neutral = Mapping[str, tuple[float | bool, ...]]

# Key → the values that change nothing.
_NOT_READ: Neutral = {
    "activation.situ_beta": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.indexer.top_k": (0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.recurrent_layers": (),
    "attention.rope_pattern": (),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.value_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "full_attention_interval": (),
    "hidden_activation": (),
    "hyper_connection.count": (0, 1),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "num_loops": (0, 1),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
}
# Keys of mixtures of experts. In files of other models they have no effect.
_OF_EXPERTS: Neutral = {
    "expert_chunk_feed_forward_length": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0, 1),
    "expert_group_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (),
    "expert_weights_scale": (0.0, 1.0),
    "experts_per_group": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": (0,),
}
# Keys of layers with a window, which change nothing where they say the same as those of all layers.
_OF_WINDOWS: Mapping[str, tuple[str, ...]] = {
    "attention.key_length_swa": ("attention.key_length",),
    "attention.value_length_swa": ("attention.value_length", "attention.key_length"),
    "rope.dimension_count_swa": ("rope.dimension_count", "attention.key_length"),
    "rope.freq_base_swa": ("rope.freq_base",),
}
# Values of `general.type` for files that hold no language model.
_KINDS = {
    "adapter": "an adapter (LoRA), which changes another model",
    "mmproj": "a projector of images or sound, and no language model",
    "imatrix": "an importance matrix, and no model",
}
_CONTROL_VECTOR = "controlvector"


def check_kind(values: MetadataValues) -> None:
    """Raise `UnsupportedModelError` for a file that holds no language model."""
    kind = read_text(values.header, "general.type")
    if values.architecture == _CONTROL_VECTOR:
        raise UnsupportedModelError(f"{values.header.file}: a control vector, which changes another model")
    if values.architecture in ("clip", "imatrix"):
        kind = {"clip": "mmproj"}.get(values.architecture, values.architecture)
    if kind not in (None, "", "model"):
        what = _KINDS.get(kind, f"of the type {shown(kind)}, and no model")
        raise UnsupportedModelError(f"{values.header.file}: {what} (general.type)")


def check_unread(values: MetadataValues, read: Collection[str], fixed: Neutral, *, mixture: bool = False) -> None:
    """Raise `UnsupportedModelError` for a key that changes the model and is not read.

    `read` are keys that are read; `fixed` has the only values that the model's class computes. A `mixture` has more
    keys.
    """
    for name, neutral in {**_NOT_READ, **(_OF_EXPERTS if mixture else {}), **fixed}.items():
        if name not in read or name in fixed:
            _check(values, name, neutral)
    for name, others in _OF_WINDOWS.items():
        if name not in read:
            same = next(
                (values.header.values[key] for other in others if (key := values.key(other)) in _all(values)), 0
            )
            _check(values, name, (same or _DEFAULTS.get(name, 0),))


# llama.cpp's own default.
_DEFAULTS = {"rope.freq_base_swa": 10000.0}


def _all(values: MetadataValues) -> Mapping[str, float]:
    return values.header.values


def _check(values: MetadataValues, name: str, neutral: tuple[float | bool, ...]) -> None:
    header, key = values.header, values.key(name)
    value = header.values.get(key)
    if value is not None and value not in neutral and shortest(value) not in neutral:
        raise UnsupportedModelError(f"{header.file}: {shown(key)} is {value!r:.40}, which is not read")
    if key in header.arrays:
        raise UnsupportedModelError(f"{header.file}: {shown(key)} is a list, which is not read")
    if key in header.texts:
        raise UnsupportedModelError(f"{header.file}: {shown(key)} is a text, which is not read")
