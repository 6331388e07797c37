"""Whole decoders as capture gives them, each in a style of its own: what the raising passes must understand.

The graphs are built call by call, without `torch.export`, and cost some tens of milliseconds. What they are written
like is a `Style`; `captured_styles` draws one, `build_captured` writes it, `captured_decoders` does both.
"""

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st
from torch.fx import GraphModule

from picompile.testing.captured_attention import AttentionWriter
from picompile.testing.captured_decoder import DecoderWriter
from picompile.testing.captured_positions import RotaryWriter
from picompile.testing.captured_style import (
    AttentionStyle,
    FfnStyle,
    LinearStyle,
    MaskStyle,
    NormStyle,
    PositionStyle,
    Sizes,
    Style,
    consistent,
)
from picompile.testing.captured_writer import Writer


def captured_decoders() -> st.SearchStrategy[GraphModule]:
    """Small decoders at stage captured, which `CANONICALIZE` must raise."""
    return captured_styles().map(build_captured)


def captured_styles() -> st.SearchStrategy[Style]:
    """All ways of writing, with odd and small sizes."""
    linears = _styles(LinearStyle)
    attention = _styles(AttentionStyle, linear=linears, mask=_styles(MaskStyle))
    parts = {
        "sizes": _sizes(),
        "norm": _styles(NormStyle),
        "attention": attention,
        "positions": _styles(PositionStyle),
        "ffn": _styles(FfnStyle, linear=linears),
        "head": linears,
    }
    copies = st.one_of(st.just(0), st.integers(1, 99))
    return _styles(Style, **parts, copies=copies).map(consistent)


def _styles(style: type[Any], **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    choices = {each.name: st.sampled_from(each.metadata["choices"]) for each in fields(style) if each.metadata}
    return st.builds(style, **choices, **parts)


def _sizes() -> st.SearchStrategy[Sizes]:
    drawn = {
        "hidden": st.integers(3, 32),
        "heads_and_kv_heads": st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2), (4, 1)]),
        "half_head_dim": st.integers(1, 5),
        "value_dim": st.one_of(st.just(0), st.integers(1, 9)),
        "ffn": st.integers(1, 45),
        "vocab": st.integers(2, 40),
        "layers": st.sampled_from([1, 1, 2, 3]),
        "embedding": st.one_of(st.just(0), st.integers(3, 12)),
    }
    return st.fixed_dictionaries(drawn).map(_sizes_from)


def _sizes_from(drawn: dict[str, Any]) -> Sizes:
    heads, kv_heads = drawn.pop("heads_and_kv_heads")
    head_dim = 2 * drawn.pop("half_head_dim")
    value_dim = drawn.pop("value_dim") or head_dim
    return Sizes(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, **drawn)


def build_captured(style: Style) -> GraphModule:
    """The graph of a decoder written in `style`, at stage captured: parameters on the meta device, tokens a symbol."""
    style = consistent(style)
    w = Writer(
        batched=style.batch != "none",
        views=style.views,
        count=style.count,
        copies=style.copies,
        max_tokens=style.max_tokens,
    )
    rotary = RotaryWriter(w, style.positions, style.sizes.head_dim)
    return DecoderWriter(w, style, AttentionWriter(w, style, rotary)).write()
