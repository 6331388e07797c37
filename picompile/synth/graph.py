"""The canonical graph of a shape, without a checkpoint and without transformers."""

import torch
from torch.fx import GraphModule, Node

from picompile.synth.shapes import POSITION_OFFSET, ModelShape, tensor_shapes
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    EMBEDDING,
    FFN,
    LAYER_NORM,
    LINEAR,
    RMS_NORM,
    ROTARY,
    TRANSPOSE,
)


def shape_graph(shape: ModelShape) -> GraphModule:
    """Return the graph at stage canonical, with parameters on the meta device, named as in a checkpoint.

    Falcon's matrix for queries, keys and values is three here: what reads it has them apart.
    """
    return _ShapeGraph(shape).build()


class _ShapeGraph:
    def __init__(self, shape: ModelShape) -> None:
        self._shape, self._names, self._sizes = shape, shape.family.names, dict(tensor_shapes(shape))
        self._builder = GraphBuilder()

    def build(self) -> GraphModule:
        b, shape = self._builder, self._shape
        table = self._parameter("embedding")
        x = b.call(EMBEDDING, b.tokens, table, 0)
        if "positions" in self._names:
            x = b.call(ADD, x, b.call(EMBEDDING, b.positions, self._parameter("positions"), POSITION_OFFSET))
        else:
            self._frequency = b.constant("inverse_frequency", torch.ones(shape.head_dim // 2))
        for layer in range(shape.layers):
            x = self._layer(layer, x)
        x = self._norm("final_norm", 0, x)
        return b.finish(b.call(LINEAR, x, table if shape.tied else self._parameter("head"), None))

    def _layer(self, layer: int, x: Node) -> Node:
        b = self._builder
        normed = self._norm("attention_norm", layer, x)
        attended = self._attention(layer, normed)
        if self._shape.family.parallel:
            for_block = self._norm("ffn_norm", layer, x) if "ffn_norm" in self._names else normed
            return b.call(ADD, x, b.call(ADD, self._block(layer, for_block), attended))
        x = b.call(ADD, x, attended)
        return b.call(ADD, x, self._block(layer, self._norm("ffn_norm", layer, x)))

    def _attention(self, layer: int, x: Node) -> Node:
        b, shape = self._builder, self._shape
        q, k, v = self._queries_keys_values(layer, x)
        if "positions" not in self._names:
            q = b.call(ROTARY, q, b.positions, self._frequency, shape.heads, 1.0)
            k = b.call(ROTARY, k, b.positions, self._frequency, shape.kv_heads, 1.0)
        scale = shape.head_dim**-0.5
        y = b.call(ATTENTION, q, k, v, shape.heads, shape.kv_heads, scale, layer, 0, layer=layer)
        return self._linear("o", layer, y)

    def _queries_keys_values(self, layer: int, x: Node) -> list[Node]:
        if "qkv" not in self._names:
            return [self._linear(name, layer, x) for name in ("q", "k", "v")]
        b, shape, name = self._builder, self._shape, self._names["qkv"].format(layer)
        found = []
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            rows = heads * shape.head_dim
            bias = b.parameter(f"{name}.{part}.bias", rows) if shape.query_bias else None
            found.append(b.call(LINEAR, x, b.parameter(f"{name}.{part}.weight", rows, shape.hidden), bias))
        return found

    def _block(self, layer: int, x: Node) -> Node:
        family = self._shape.family
        gate, gate_bias = self._matrix("gate", layer) if family.gated else (None, None)
        up, up_bias = self._matrix("up", layer)
        down, down_bias = self._matrix("down", layer)
        weights = (gate, up, self._builder.call(TRANSPOSE, down, 0, 1), gate_bias, up_bias, down_bias)
        activation = self._shape.activation
        up_activation = activation if family.two_sided else "identity"
        return self._builder.call(FFN, x, *weights, activation, up_activation, layer=layer)

    def _linear(self, role: str, layer: int, x: Node) -> Node:
        return self._builder.call(LINEAR, x, *self._matrix(role, layer))

    def _norm(self, role: str, layer: int, x: Node) -> Node:
        weight, bias = self._matrix(role, layer)
        if self._shape.family.norm == "rms":
            return self._builder.call(RMS_NORM, x, weight, self._shape.eps)
        return self._builder.call(LAYER_NORM, x, weight, bias, self._shape.eps)

    def _matrix(self, role: str, layer: int) -> tuple[Node, Node | None]:
        """Return the weight of `role`, and its bias if it has one."""
        bias = f"{self._names[role].format(layer)}.bias"
        return self._parameter(role, layer), self._builder.parameter(
            bias, *self._sizes[bias]
        ) if bias in self._sizes else None

    def _parameter(self, role: str, layer: int = 0) -> Node:
        name = f"{self._names[role].format(layer)}.weight"
        return self._builder.parameter(name, *self._sizes[name])
