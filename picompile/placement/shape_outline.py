"""The numbers of a model that its bytes and launches follow from, read from a config.json without transformers.

Every field that a number depends on must be written in the config, or have a default here that is transformers' own.
Where a config has something else that may matter, there is no outline, and the model is captured instead: capturing
knows all of transformers' defaults, and refuses what makes no model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from picompile.frontend.config import check_values
from picompile.frontend.families import activation_text, find_family

Config = Mapping[str, Any]

# Kernels for wider heads may not exist; capturing and lowering tells.
_MOST_HEAD_DIM = 256
# OPT's table of positions starts two rows late.
_OPT_POSITION_ROWS = 2
# Other names that transformers has for fields, and fields that change a model in ways that are not modelled here.
_UNKNOWN = ("n_embed", "n_head", "n_layer", "partial_rotary_factor", "use_sliding_window", "rope_scaling")
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class LayerForm:
    """How a layer is put together.

    `order` is `pre` where a norm is in front of attention and block each, `post` where it follows their additions, and
    `parallel` where both read the same residual stream, behind one norm or (`two_norms`) one each. `rms_norm` has no
    bias; `norm_weights` says whether norms have weights at all.
    """

    order: Literal["pre", "post", "parallel"] = "pre"
    two_norms: bool = False
    rms_norm: bool = True
    norm_weights: bool = True
    gated: bool = True
    rotary: bool = True
    query_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False


@dataclass(frozen=True)
class ModelOutline:
    """A model in numbers. `embedding_width` is that of the embedding: projections connect it where it isn't `hidden`.

    `positions` are rows of a table of positions, 0 without one. `activation` is the gate's, in the dialect's text form.
    """

    hidden: int
    neurons: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    embedding_width: int
    positions: int
    tied: bool
    activation: str
    form: LayerForm


class _UnknownError(Exception):
    """A field is missing, or has a value that only capturing can judge."""


def outline_of_config(config: Config) -> ModelOutline | None:
    """Return the numbers of the model that `config` describes, None where they cannot be told from it alone.

    Raises `UnsupportedModelError` for a model that is not supported.
    """
    family = find_family(config)
    read = _READERS.get(family.name)
    if not family.is_known:
        return None
    named = family.fixed_activation is not None or isinstance(config.get(family.activation), str)
    if read is None or not named:
        return None
    activation = activation_text(config, family, "")
    check_values(config)
    try:
        _require_plain(config)
        outline = read(config, activation)
    except _UnknownError:
        return None
    fits = outline.heads % outline.kv_heads == 0 and outline.head_dim <= _MOST_HEAD_DIM
    return outline if fits and not (outline.form.rotary and outline.head_dim % 2) else None


def _llama(config: Config, activation: str) -> ModelOutline:
    """Return the outline of a Llama model, which has the biases that its config names."""
    attention_bias = _flag(config, "attention_bias", False)
    form = LayerForm(query_bias=attention_bias, output_bias=attention_bias, ffn_bias=_flag(config, "mlp_bias", False))
    return _llama_like(config, activation, form)


def _mistral(config: Config, activation: str) -> ModelOutline:
    return _llama_like(config, activation, LayerForm())


def _qwen2(config: Config, activation: str) -> ModelOutline:
    return _llama_like(config, activation, LayerForm(query_bias=True))


def _llama_like(config: Config, activation: str, form: LayerForm) -> ModelOutline:
    return _outline(
        config,
        activation,
        form,
        neurons=_count(config, "intermediate_size"),
        kv_heads=_count(config, "num_key_value_heads"),
        head_dim=None if config.get("head_dim") is None else _count(config, "head_dim"),
    )


def _opt(config: Config, activation: str) -> ModelOutline:
    bias, is_pre_norm = _flag(config, "enable_bias"), _flag(config, "do_layer_norm_before")
    if _flag(config, "_remove_final_layer_norm", False):
        raise _UnknownError
    form = LayerForm(
        order="pre" if is_pre_norm else "post",
        rms_norm=False,
        norm_weights=_flag(config, "layer_norm_elementwise_affine"),
        gated=False,
        rotary=False,
        query_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
    )
    return _outline(
        config,
        activation,
        form,
        neurons=_count(config, "ffn_dim"),
        embedding_width=_count(config, "word_embed_proj_dim"),
        positions=_count(config, "max_position_embeddings") + _OPT_POSITION_ROWS,
    )


def _falcon(config: Config, activation: str) -> ModelOutline:
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    is_new, bias = _flag(config, "new_decoder_architecture"), _flag(config, "bias")
    is_parallel = _flag(config, "parallel_attn")
    if _flag(config, "alibi") or config.get("num_ln_in_parallel_attn") not in (None, 2) or is_new > is_parallel:
        raise _UnknownError
    kv_heads = 1 if _flag(config, "multi_query") else heads
    form = LayerForm(
        order="parallel" if is_parallel else "pre",
        two_norms=is_new,
        rms_norm=False,
        gated=False,
        query_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
    )
    return _outline(
        config,
        activation,
        form,
        neurons=4 * hidden if config.get("ffn_hidden_size") is None else _count(config, "ffn_hidden_size"),
        kv_heads=_count(config, "num_kv_heads") if is_new else kv_heads,
    )


def _outline(
    config: Config,
    activation: str,
    form: LayerForm,
    *,
    neurons: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    embedding_width: int | None = None,
    positions: int = 0,
) -> ModelOutline:
    """Return the outline with the fields that all families name alike; None stands for what most models have."""
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    return ModelOutline(
        hidden=hidden,
        neurons=neurons,
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=_head_dim(config, hidden, heads) if head_dim is None else head_dim,
        vocab=_count(config, "vocab_size"),
        embedding_width=hidden if embedding_width is None else embedding_width,
        positions=positions,
        tied=_flag(config, "tie_word_embeddings"),
        activation=activation,
        form=form,
    )


_READERS: Mapping[str, Callable[[Config, str], ModelOutline]] = {
    "llama": _llama,
    "mistral": _mistral,
    "bamboo": _mistral,
    "qwen2": _qwen2,
    "opt": _opt,
    "falcon": _falcon,
}


def _require_plain(config: Config) -> None:
    """Raise `_UnknownError` for rotary embeddings and kinds of layers of which there may be several tables."""
    rope, kinds = config.get("rope_parameters"), config.get("layer_types")
    unknown = any(config.get(key) for key in _UNKNOWN)
    if unknown or not (kinds is None or (isinstance(kinds, list) and set(map(str, kinds)) == {"full_attention"})):
        raise _UnknownError
    if isinstance(kinds, list) and len(kinds) != config.get("num_hidden_layers"):
        raise _UnknownError
    if rope is not None:
        known = {"rope_type", "rope_theta", *(_LLAMA3_ROPE if rope.get("rope_type") == "llama3" else ())}
        is_known = rope.get("rope_type", "default") in ("default", "llama3") and set(rope) <= known
        if not is_known or any(not _is_positive(rope.get(key, 1)) for key in known - {"rope_type"}):
            raise _UnknownError
        if rope.get("rope_type") == "llama3" and not known <= set(rope):
            raise _UnknownError
    if any(not _is_positive(config[key]) for key in ("rope_theta", *_EPSILONS) if key in config):
        raise _UnknownError


_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _count(config: Config, key: str) -> int:
    """Return a number that `check_values` has found to be in bounds."""
    value = config.get(key)
    if type(value) is not int:
        raise _UnknownError
    return value


def _flag(config: Config, key: str, default: bool | None = None) -> bool:
    value = config.get(key, default)
    if type(value) is not bool:
        raise _UnknownError
    return value


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    if hidden % heads or config.get("head_dim", hidden // heads) not in (None, hidden // heads):
        raise _UnknownError
    return hidden // heads
