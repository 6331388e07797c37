"""Our attention in transformers' registries, so that it arrives in the captured graph as one operator.

It is registered under a name of our own, which only the models that we build here are told to use.
"""

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from picompile.errors import UnsupportedModelError
from picompile_passes.operands import ATTENTION

ATTENTION_NAME = "picompile"

# What attention functions of transformers are given and ours can ignore: it says nothing about the result here.
_WITHOUT_EFFECT = frozenset({"dropout", "is_causal", "output_attentions", "position_ids", "use_cache"})


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it: query [B, H, T, d], key and value [B, KV, T, d] → [B, T, H, d].

    Raises `UnsupportedModelError` for options that would change the result (soft caps, sinks, biases).
    """
    used = sorted(name for name, option in options.items() if option is not None and name not in _WITHOUT_EFFECT)
    if used or attention_mask is not None:
        what = ", ".join(used) or "a mask"
        raise UnsupportedModelError(f"{type(module).__name__} attends with {what}, which is not supported")
    heads, kv_heads = query.shape[1], key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.transpose(1, 2).flatten(-2) for x in (query, key, value))
    result = ATTENTION(q, k, v, heads, kv_heads, scale, module.layer_idx, sliding_window or 0)
    return result.unflatten(-1, (heads, -1)), None


def no_mask(*_: Any, **__: Any) -> None:
    """A mask function: our attention is causal by itself."""
    return None


def register_attention() -> None:
    """Puts the two functions into transformers' registries; again has no effect."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, no_mask)
