"""Our attention in transformers' registries, so that it arrives in the captured graph as one operator.

It is registered under a name of our own, which only the models that we build here are told to use. A model asks the
mask registry for a mask first and hands it to the attention. Ours returns no mask where the attention is causal. Where
tokens see a window, it returns a stand-in that says so. Any other mask is transformers' own, and the attention is
torch's, which a pass raises by the mask's values.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from picompile.errors import UnsupportedModelError
from picompile_passes.graph.operands import ATTENTION

ATTENTION_NAME = "picompile"

# Arguments of transformers' attention functions that ours can ignore: they do not change the result here. The window is
# the mask's, as it is in transformers' eager attention.
_WITHOUT_EFFECT = frozenset(
    {
        *("dropout", "output_attentions", "position_ids", "use_cache", "sliding_window", "cache_position"),
        *("output_router_logits", "output_hidden_states", "layer_idx", "past_key_values", "return_dict"),
    }
)
_WINDOW = "picompile_window"
# The mask of this many tokens is compared element by element, and that of the last of many more row by row.
_SQUARE = 48
_LONG = 1 << 18


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H, T, d], key and value [B, KV, T, d] → [B, T, H, d].

    Raises `UnsupportedModelError` for options that would change the result in a way that the dialect has not.
    """
    used = sorted(name for name, option in options.items() if _has_effect(name, option))
    if used:
        raise UnsupportedModelError(f"{type(module).__name__} attends with {', '.join(used)}, which is not supported")
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[-2] is not query.shape[-2] and key.shape[-2] != query.shape[-2]:
        raise UnsupportedModelError(f"{type(module).__name__} attends to other values than those of its tokens")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = 0 if attention_mask is None else getattr(attention_mask, _WINDOW, None)
    if window is None:
        if softcap is not None or s_aux is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends with a mask of its own beside a soft cap or sinks, "
                "which is not supported"
            )
        return _masked(query, key, value, mask=attention_mask, scale=scale), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not causal:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens; only causal attention is supported"
        )
    q, k, v = (x.transpose(1, 2).flatten(-2) for x in (query, key, value))
    result = ATTENTION(q, k, v, heads, kv_heads, scale, 0, window, *_extras(softcap, s_aux))
    return result.unflatten(-1, (heads, -1)), None


def _extras(softcap: float | None, sinks: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments behind the window, none where they have their defaults."""
    if not softcap and sinks is None:
        return ()
    return (float(softcap or 0.0), None, sinks)


def _has_effect(name: str, option: Any) -> bool:
    # Logits of all tokens.
    if name == "logits_to_keep" and type(option) is int and option == 0:
        return False
    return name not in _WITHOUT_EFFECT and option is not None and option is not False


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return torch's own attention with the mask of a model, [B, T, H, d]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)


def causal_mask(
    *, q_length: Any, kv_length: Any, mask_function: Callable[..., Any], attention_mask: Tensor | None = None,
    use_vmap: bool = False, q_offset: Any = 0, kv_offset: Any = 0, **options: Any,
) -> Tensor | None:  # fmt: skip
    """Return no mask for causal attention, a stand-in for a window, or transformers' mask for any other."""
    window = None if use_vmap or attention_mask is not None else window_of(mask_function)
    if window == 0:
        return None
    if window is not None:
        stand_in = torch.zeros(1, 1, 1, 1)
        setattr(stand_in, _WINDOW, window)
        return stand_in
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, use_vmap=use_vmap, **options,
    )  # fmt: skip
    return mask


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return the window of transformers' mask function, 0 for a causal one without; None for any other function.

    The function is called on real numbers. This needs a thread of its own: while a model is traced, every tensor of its
    thread is a symbol.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_window_of, mask_function).result()


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    try:
        last = _shown(mask_function, torch.tensor([[_LONG - 1]]), torch.arange(_LONG).unsqueeze(0))
        width = int(last.sum())
        if width == 0:
            return None
        for rows in (_SQUARE, min(_LONG, width + _SQUARE)):
            q, k = torch.arange(max(0, rows - _SQUARE), rows).unsqueeze(1), torch.arange(rows).unsqueeze(0)
            if not torch.equal(_shown(mask_function, q, k), (k <= q) & (k > q - width)):
                return None
    except Exception:
        # A function of other things than indices, which only the model itself can call.
        return None
    return 0 if width == _LONG else width


def _shown(mask_function: Callable[..., Any], q: Tensor, k: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    return torch.as_tensor(mask_function(zero, zero, q, k)).expand(q.shape[0], k.shape[1])


@contextmanager
def one_sequence() -> Iterator[None]:
    """Make transformers take the tokens of a call for one sequence, whatever their positions.

    It would otherwise look in the positions for the ends of sequences that are packed into one, which takes their
    values, and a traced model has none.
    """
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


@contextmanager
def one_chunk() -> Iterator[None]:
    """Make transformers take all tokens for one chunk, in layers that attend to a chunk: no text is longer than that.

    A model that is captured has no text longer than `text_limit`.
    """
    found = masking_utils.chunked_overlay
    masking_utils.chunked_overlay = lambda chunk_size, left_padding: lambda batch, head, q, kv: kv == kv
    try:
        yield
    finally:
        masking_utils.chunked_overlay = found


def register_attention() -> None:
    """Put the two functions into transformers' registries; again has no effect."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, causal_mask)
