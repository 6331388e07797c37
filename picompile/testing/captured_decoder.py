"""The body of a captured decoder: embedding, layers in the order of the style, head."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from picompile.testing.captured_attention import AttentionWriter
from picompile.testing.captured_ffn import write_ffn
from picompile.testing.captured_linears import write_linear, write_product
from picompile.testing.captured_norms import write_norm
from picompile.testing.captured_positions import write_position_embedding
from picompile.testing.captured_style import Style
from picompile.testing.captured_writer import Writer
from picompile_passes.stages import Stage

_aten = torch.ops.aten


@dataclass(frozen=True)
class DecoderWriter:
    """Writes a whole decoder, from the embedding to the logits."""

    w: Writer
    style: Style
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
            x = write_linear(self.w, self.style.head, x, "model.project_out", sizes.embedding)
        if self.style.head_slice:
            # transformers keeps the logits of the last tokens, here of all.
            x = self.w.call(_aten.slice.Tensor, x, -2, 0, 2**63 - 1)
        return self.w.builder.finish(self._unbatched(self._head(x, embedding)), stage=Stage.CAPTURED)

    def _embedded(self) -> tuple[Node, Node]:
        """The first value of the residual stream, and the table it comes from."""
        sizes = self.style.sizes
        table = self.w.builder.parameter("model.embed_tokens.weight", sizes.vocab, sizes.embedding or sizes.hidden)
        x = self.w.call(_aten.embedding.default, table, self._ids())
        if sizes.embedding:
            x = write_linear(self.w, self.style.head, x, "model.project_in", sizes.hidden)
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
        return write_ffn(self.w, self.style.ffn, x, f"{name}.mlp", self.style.sizes.ffn)

    def _residual(self, x: Node, y: Node) -> Node:
        return self.w.call(_aten.add.Tensor, *((x, y) if self.style.residual_first else (y, x)))

    def _norm(self, x: Node, name: str) -> Node:
        return write_norm(self.w, self.style.norm, x, name)

    def _head(self, x: Node, embedding: Node) -> Node:
        vocab = self.style.sizes.vocab
        if self.style.tied == "no" or self.style.head.product == "conv1d":
            return write_linear(self.w, self.style.head, x, "lm_head", vocab, bias=self.style.head_bias)
        weight = embedding if self.style.tied == "one node" else self.w.builder.read("model.embed_tokens.weight")
        bias = self.w.parameter("lm_head.bias", vocab) if self.style.head_bias else None
        return write_product(self.w, self.style.head, x, weight, bias)

    def _unbatched(self, logits: Node) -> Node:
        if self.style.batch == "none":
            return logits
        if self.style.unbatch == "squeeze":
            return self.w.call(_aten.squeeze.dim, logits, 0)
        if self.style.unbatch == "select":
            return self.w.call(_aten.select.int, logits, 0, 0)
        return self.w.rows(logits)
