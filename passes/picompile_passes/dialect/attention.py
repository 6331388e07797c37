"""`attention`: causal attention over all tokens, or over a window of them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from picompile_passes.dialect.heads import split_heads
from picompile_passes.dialect.operator import Call, operator
from picompile_passes.dialect.state import TOKENS, State
from picompile_passes.formats import CACHE_FORMATS


def _keys_and_values(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the KV cache of a call, from its arguments."""
    heads = values["kv_heads"]
    return {name: (heads, TOKENS, int(values[name].meta["val"].shape[-1]) // heads) for name in ("k", "v")}


def _heads_fit(call: Call) -> Iterator[str]:
    """Heads divide q, k and v, and equally many query heads share each key head; slopes and sinks have one of each."""
    heads, kv_heads = call.values["heads"], call.values["kv_heads"]
    q, k, v = (call.columns(name) for name in "qkv")
    if heads % kv_heads or q % heads or k % kv_heads or v % kv_heads or q // heads != k // kv_heads:
        yield f"{heads} heads and {kv_heads} key heads do not fit q, k, v of {q}, {k}, {v}"
    for name in ("slopes", "sinks"):
        if call.values[name] is not None and tuple(call.values[name].meta["val"].shape) != (heads,):
            yield f"its {name} are {call.text(name)}, not one for each of {heads}"


def _window_is_possible(call: Call) -> Iterator[str]:
    """The window is a number of tokens, or 0 for all; the soft cap is positive, or 0 for none."""
    if call.values["window"] < 0:
        yield f"its window is {call.values['window']}"
    if not 0 <= call.values["softcap"] < math.inf:
        yield f"its soft cap is {call.values['softcap']}"


def _like_values(q: Tensor, v: Tensor, heads: int, kv_heads: int, **_: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1] // kv_heads * heads))


@operator(
    part="mixer",
    dimensions={"q": "TQ", "k": "TK", "v": "TV", "slopes": "S", "sinks": "S"},
    result=_like_values,
    state=State("positional", _keys_and_values, ("float16", "float32", *CACHE_FORMATS), operands=("k", "v")),
    checks=(_heads_fit, _window_is_possible),
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    layer: int,
    window: int,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """y = softmax(q · kᵀ · scale) · v, causal; heads / kv_heads query heads share a key head.

    Token t sees tokens max(0, t − window + 1) … t, or all up to t when `window` is 0. q [T, heads · d],
    k [T, kv_heads · d], v [T, kv_heads · e] → [T, heads · e]. The compiled form reads and extends the KV cache of
    `layer`.

    Where they are given, in this order: `softcap` turns a score s into softcap · tanh(s / softcap) (Gemma 2,
    arXiv 2408.00118); `slopes` [heads] add slopes[head] · (i − t) to the score of token i (ALiBi, arXiv 2108.12409);
    `sinks` [heads] are scores of one more key of each head, whose value is 0 (gpt-oss, arXiv 2508.10925).
    """
    tokens = q.shape[-2]
    queries = split_heads(q, heads).transpose(-2, -3)
    keys = split_heads(k, kv_heads).transpose(-2, -3).repeat_interleave(heads // kv_heads, dim=-3)
    values = split_heads(v, kv_heads).transpose(-2, -3).repeat_interleave(heads // kv_heads, dim=-3)
    distance = torch.arange(tokens, device=q.device).unsqueeze(-1) - torch.arange(tokens, device=q.device)
    visible = distance >= 0 if window == 0 else (distance >= 0) & (distance < window)
    scores = queries @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * distance
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    mixed: Tensor = scores.softmax(dim=-1)[..., :tokens] @ values
    return mixed.transpose(-2, -3).flatten(-2)
