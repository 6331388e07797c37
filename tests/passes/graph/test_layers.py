"""The marks of layers: parallel blocks, several blocks or none in a layer, norms behind a block, and the head."""

from collections.abc import Callable

import torch
from torch.fx import Node

from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.layers import token_calls
from picompile_passes.graph.operands import ADD, ATTENTION, ELEMENTWISE, EMBEDDING, FFN, LINEAR, RMS_NORM

SIZE = 8


class Decoder:
    """Writes a decoder call by call; and notes what the marks of each call should be."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.layers = 0
        self.expected: dict[Node, str] = {}

    def call(self, expected: str, *args: object) -> Node:
        node = self.b.call(*args)  # type: ignore[arg-type]
        self.expected[node] = expected
        return node

    def weight(self, *shape: int) -> Node:
        return self.b.parameter(f"w{len(self.b.graph.nodes)}", *shape)

    def embed(self) -> Node:
        return self.call("embedding", EMBEDDING, self.b.tokens, self.weight(16, SIZE), 0)

    def norm(self, x: Node, expected: str) -> Node:
        return self.call(expected, RMS_NORM, x, self.weight(SIZE), 1e-5)

    def linear(self, x: Node, expected: str, outputs: int = SIZE) -> Node:
        return self.call(expected, LINEAR, x, self.weight(outputs, SIZE), None)

    def add(self, x: Node, y: Node, expected: str) -> Node:
        return self.call(expected, ADD, x, y)

    def attend(self, x: Node) -> Node:
        expected = f"mixer_{self.layers}"
        self.layers += 1
        q, k, v = (self.linear(x, expected) for _ in range(3))
        attended = self.call(expected, ATTENTION, q, k, v, 2, 2, 0.5, self.layers - 1, 0)
        return self.linear(attended, expected)

    def block(self, x: Node) -> Node:
        weights = [self.weight(12, SIZE) for _ in range(2)]
        none = (None, None, None)
        return self.call(f"block_{self.layers - 1}", FFN, x, None, *weights, *none, "relu", "identity")


def check(write: Callable[[Decoder, Node], Node], logits: Callable[[Decoder, Node], Node] | None = None) -> None:
    """Check the marks of each call."""
    decoder = Decoder()
    x = decoder.norm(write(decoder, decoder.embed()), "head")
    x = decoder.linear(x, "head", 16)
    graph = decoder.b.finish(x if logits is None else logits(decoder, x)).graph
    for node in token_calls(graph):
        part, layer = node.meta["part"], node.meta.get("layer")
        assert decoder.expected[node] == (part if layer is None else f"{part}_{layer}"), node.name


def test_attention_and_then_a_block() -> None:
    def write(d: Decoder, x: Node) -> Node:
        for n in range(3):
            x = d.add(x, d.attend(d.norm(x, f"mixer_{n}")), f"mixer_{n}")
            x = d.add(x, d.block(d.norm(x, f"block_{n}")), f"block_{n}")
        return x

    check(write)
    check(write, lambda d, x: d.call("head", ELEMENTWISE, [x], "tanh(x0)"))


def test_parallel_blocks() -> None:
    """The block may come first, and may share its norm with the attention."""

    def write(d: Decoder, x: Node) -> Node:
        shared = d.norm(x, "mixer_0")
        x = d.add(x, d.add(d.attend(shared), d.block(shared), "block_0"), "block_0")
        for n in (1, 2):
            normed = d.norm(x, f"block_{n}")
            d.layers += 1
            block = d.block(normed)
            d.layers -= 1
            x = d.add(x, d.add(block, d.attend(d.norm(x, f"mixer_{n}")), f"block_{n}"), f"block_{n}")
        return x

    check(write)


def test_several_blocks_and_none() -> None:
    def write(d: Decoder, x: Node) -> Node:
        x = d.add(x, d.attend(d.norm(x, "mixer_0")), "mixer_0")
        for _ in range(2):
            x = d.add(x, d.block(d.norm(x, "block_0")), "block_0")
        x = d.add(x, d.attend(d.norm(x, "mixer_1")), "mixer_1")
        x = d.add(x, d.attend(d.norm(x, "mixer_2")), "mixer_2")
        normed = d.norm(x, "block_2")
        return d.add(x, d.add(d.block(normed), d.block(normed), "block_2"), "block_2")

    check(write)


def test_norms_behind_what_they_normalize() -> None:
    """On both sides of each sub-layer, as in Gemma 2, or of the sum, as in OPT-350M, with a norm of the embeddings."""

    def write(d: Decoder, x: Node) -> Node:
        x = d.norm(d.linear(x, "embedding"), "embedding")
        for n in (0, 1):
            x = d.add(x, d.norm(d.attend(d.norm(x, f"mixer_{n}")), f"mixer_{n}"), f"mixer_{n}")
            x = d.add(x, d.norm(d.block(d.norm(x, f"block_{n}")), f"block_{n}"), f"block_{n}")
        x = d.norm(d.add(x, d.attend(x), "mixer_2"), "mixer_2")
        return d.add(x, d.block(x), "block_2")

    check(write)


def test_given_marks_stay_and_constants_have_none() -> None:
    d = Decoder()
    x = d.b.call(RMS_NORM, d.embed(), d.b.constant("ones", torch.ones(SIZE)), 1e-5, layer=7, part="mixer")
    graph = d.b.finish(d.linear(x, "head", 16)).graph
    assert [(node.meta.get("part"), node.meta.get("layer")) for node in graph.nodes if node.op != "placeholder"] == [
        *[(None, None)] * 3,
        *[("embedding", None), ("mixer", 7), ("head", None), (None, None)],
    ]
