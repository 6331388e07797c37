"""Whole decoders in the form that capture gives, each in a style of its own, which the raising passes must recognize.

The graphs are built call by call, without `torch.export`, in some tens of milliseconds. A `CapturedStyle` says how
a decoder is written; `captured_styles` draws one, `build_captured` writes it, `captured_decoders` does both.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from picompile.testing.captured.attention import AttentionWriter
from picompile.testing.captured.ffn import write_ffn, write_linear, write_norm, write_product
from picompile.testing.captured.positions import RotaryWriter, write_position_embedding
from picompile.testing.captured.style import (
    AttentionStyle,
    CapturedStyle,
    FfnStyle,
    LinearStyle,
    MaskStyle,
    NormStyle,
    PositionStyle,
    Sizes,
    consistent,
)
from picompile.testing.captured.writer import CaptureWriter
from picompile_passes.base import Stage

_aten = torch.ops.aten


@dataclass(frozen=True)
class DecoderWriter:
    """Writes a whole decoder, from the embedding to the logits."""

    w: CaptureWriter
    style: CapturedStyle
    attention: AttentionWriter

    def write(self) -> GraphModule:
        """The finished graph."""
        sizes = self.style.sizes
        x, embedding = self._embedded()
        for layer in range(sizes.layers):
            x = self._layer(x, f"model.layers.{layer}", layer)
        if self.style.final_norm:
            x = self._norm(x, "model.norm")
        if sizes.embedding:
            x = write_linear(self.w, style=self.style.head, x=x, name="model.project_out", outputs=sizes.embedding)
        if self.style.head_slice:
            # transformers keeps the logits of the last tokens, here of all.
            x = self.w.call(_aten.slice.Tensor, x, -2, 0, 2**63 - 1)
        return self.w.builder.finish(self._unbatched(self._logits(x, embedding)), stage=Stage.CAPTURED)

    def _embedded(self) -> tuple[Node, Node]:
        """The first value of the residual stream, and the table it comes from."""
        sizes = self.style.sizes
        table = self.w.builder.parameter("model.embed_tokens.weight", sizes.vocab, sizes.embedding or sizes.hidden)
        x = self.w.call(_aten.embedding.default, table, self._ids())
        x = self._times(x, self.style.embedding_factor)
        if sizes.embedding:
            x = write_linear(self.w, style=self.style.head, x=x, name="model.project_in", outputs=sizes.hidden)
        x = write_position_embedding(self.w, self.style.positions, x)
        return (self._norm(x, "model.embed_norm") if self.style.embedding_norm else x), table

    def _ids(self) -> Node:
        if self.style.batch == "none":
            return self.w.tokens
        if self.style.batch == "view":
            return self.w.call(_aten.view.default, self.w.tokens, [1, -1])
        return self.w.call(_aten.unsqueeze.default, self.w.tokens, 0)

    def _layer(self, x: Node, name: str, layer: int) -> Node:
        if self.style.block.startswith("parallel"):
            return self._parallel(x, name, layer)
        x = self._half(x, f"{name}.input_layernorm", lambda h: self._attend(h, name, layer))
        return self._half(x, f"{name}.post_attention_layernorm", lambda h: self._feed_forward(h, name))

    def _half(self, x: Node, norm: str, inner: Callable[[Node], Node]) -> Node:
        if self.style.block == "post":
            return self._norm(self._residual(x, inner(x)), norm)
        y = inner(self._norm(x, norm))
        return self._residual(x, self._norm(y, f"{norm}_after") if self.style.block == "sandwich" else y)

    def _parallel(self, x: Node, name: str, layer: int) -> Node:
        """Falcon's and GPT-J's: attention and feed-forward block side by side, on one norm or on one each."""
        h = self._norm(x, f"{name}.input_layernorm")
        attended = self._attend(h, name, layer)
        if self.style.block == "parallel with two norms":
            h = self._norm(x, f"{name}.mlp_layernorm")
        return self._residual(x, self._residual(self._feed_forward(h, name), attended))

    def _attend(self, x: Node, name: str, layer: int) -> Node:
        return self.attention.write(x, f"{name}.self_attn", layer)

    def _feed_forward(self, x: Node, name: str) -> Node:
        return write_ffn(self.w, style=self.style.ffn, x=x, name=f"{name}.mlp", neurons=self.style.sizes.ffn)

    def _times(self, x: Node, factor: float) -> Node:
        return x if factor == 1.0 else self.w.call(_aten.mul.Tensor, x, factor)

    def _residual(self, x: Node, y: Node) -> Node:
        y = self._times(y, self.style.residual_factor)
        return self.w.call(_aten.add.Tensor, *((x, y) if self.style.residual_first else (y, x)))

    def _norm(self, x: Node, name: str) -> Node:
        return write_norm(self.w, self.style.norm, x, name)

    def _logits(self, x: Node, embedding: Node) -> Node:
        logits = self._head(x, embedding)
        if self.style.logits == "capped":
            return self._times(self.w.call(_aten.tanh.default, self.w.call(_aten.div.Tensor, logits, 2.5)), 2.5)
        return self._times(logits, 1.0 if self.style.logits == "plain" else 0.125)

    def _head(self, x: Node, embedding: Node) -> Node:
        vocab = self.style.sizes.vocab
        if self.style.tied == "no" or self.style.head.product == "conv1d":
            return write_linear(
                self.w, style=self.style.head, x=x, name="lm_head", outputs=vocab, bias=self.style.head_bias
            )
        weight = embedding if self.style.tied == "one node" else self.w.builder.read("model.embed_tokens.weight")
        bias = self.w.parameter("lm_head.bias", vocab) if self.style.head_bias else None
        return write_product(self.w, style=self.style.head, x=x, weight=weight, bias=bias)

    def _unbatched(self, logits: Node) -> Node:
        if self.style.batch == "none":
            return logits
        if self.style.unbatch == "squeeze":
            return self.w.call(_aten.squeeze.dim, logits, 0)
        if self.style.unbatch == "select":
            return self.w.call(_aten.select.int, logits, 0, 0)
        return self.w.rows(logits)


def captured_decoders() -> st.SearchStrategy[GraphModule]:
    """Draw small decoders at stage captured, which `CANONICALIZE` must raise."""
    return captured_styles().map(build_captured)


def captured_styles() -> st.SearchStrategy[CapturedStyle]:
    """Draw styles from all ways of writing, with odd and small sizes."""
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
    return _styles(CapturedStyle, **parts, copies=copies).map(consistent)


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


def build_captured(style: CapturedStyle) -> GraphModule:
    """The graph of a decoder written in `style`, at stage captured: parameters on the meta device, tokens a symbol."""
    style = consistent(style)
    w = CaptureWriter(
        batched=style.batch != "none",
        views=style.views,
        count=style.count,
        copies=style.copies,
        max_tokens=style.max_tokens,
    )
    rotary = RotaryWriter(w, style.positions, style.sizes.head_dim)
    return DecoderWriter(w, style, AttentionWriter(w, style, rotary)).write()
