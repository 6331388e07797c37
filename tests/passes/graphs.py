"""Small canonical graphs built by hand, in the manner of Llama and OPT, with weights to run them on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from picompile_passes.materialize import materialize
from picompile_passes.operands import (
    ADD,
    ATTENTION,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LAYER_NORM,
    LINEAR,
    RMS_NORM,
    ROTARY,
    TRANSPOSE,
)
from picompile_passes.propagate import fake_like
from picompile_passes.rewriter import Rewriter
from picompile_passes.stages import Stage, set_stage

# Examples that are the same at every run are few, and not shrunk: that takes minutes, and the models are small.
_SAME = {"max_examples": 20, "phases": (Phase.explicit, Phase.generate)}
PROFILE = settings(**_SAME) if settings.default.derandomize else settings()


@dataclass(frozen=True)
class Shape:
    """Sizes and kind of a model. `gated` makes it Llama-like, otherwise it is OPT-like."""

    hidden: int = 24
    heads: int = 3
    kv_heads: int = 3
    ffn: int = 40
    vocab: int = 50
    layers: int = 2
    activation: str = "relu"
    up_activation: str = "identity"
    gated: bool = True
    fused: bool = False
    """Gate and up are halves of one matrix (Llama-like only)."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LLAMA = Shape()
OPT = Shape(gated=False)


def shapes(**fixed: object) -> st.SearchStrategy[Shape]:
    """Odd sizes of both kinds."""
    heads = st.sampled_from([(1, 1), (3, 1), (4, 2), (3, 3)])
    drawn = {
        "heads_and_kv": heads,
        "half_head": st.integers(1, 5),
        "ffn": st.integers(1, 45),
        "vocab": st.integers(2, 40),
        "layers": st.integers(1, 3),
        "activation": st.sampled_from(["relu", "relu2", "relu6", "fatrelu(0.02)", "silu", "gelu"]),
        "up_activation": st.sampled_from(["identity", "relu"]),
        "gated": st.booleans(),
        "fused": st.booleans(),
    }
    return st.fixed_dictionaries(drawn | {key: st.just(value) for key, value in fixed.items()}).map(_shape)


def _shape(values: dict) -> Shape:
    heads, kv_heads = values.pop("heads_and_kv")
    hidden = heads * 2 * values.pop("half_head")
    return Shape(hidden=hidden, heads=heads, kv_heads=kv_heads, **values)


@dataclass
class Weights:
    """A weight source in memory, which notes what is loaded."""

    tensors: dict[str, Tensor]
    loaded: list[str] = field(default_factory=list)

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        self.loaded.append(name)
        return self.tensors[name]


def random_weights(graph_module: GraphModule, seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Values for every parameter of `graph_module`, with which about half of the neurons fire."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in graph_module.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            value /= parameter.shape[1] ** 0.5
        else:
            value = value * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        tensors[name] = value.to(dtype)
    return Weights(tensors)


def run(graph_module: GraphModule, weights: Weights, tokens: int = 6) -> Tensor:
    """Logits of `graph_module` in eager PyTorch for some tokens."""
    real = materialize(graph_module, weights)
    inputs, *_ = graph_module.graph.find_nodes(op="placeholder")
    embedding = next(user for user in inputs.users if user.target is EMBEDDING)
    vocab = embedding.args[1].meta["val"].shape[0]
    ids = torch.arange(tokens) * 7 % vocab
    with torch.no_grad():
        return real(ids, torch.arange(tokens))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """Differences within `tolerance` of the largest expected value."""
    largest = expected.abs().max().clamp(min=1e-6)
    torch.testing.assert_close(actual / largest, expected / largest, rtol=0, atol=tolerance)


class Builder:
    """Makes a graph call by call. Parameters are meta tensors under the names they would have in a checkpoint."""

    def __init__(self) -> None:
        self.module = nn.Module()
        self.graph = Graph()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        self.tokens = self.graph.placeholder("tokens")
        self.positions = self.graph.placeholder("positions")
        self.end = self.graph.output(self.tokens)
        symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        self.tokens.meta["val"] = mode.from_tensor(torch.zeros(7, dtype=torch.int64), symbolic_context=symbolic)
        with mode:
            self.positions.meta["val"] = torch.empty(self.tokens.meta["val"].shape, dtype=torch.int64)
        self.rewriter = Rewriter(GraphModule(self.module, self.graph), "builder")

    def parameter(self, name: str, *shape: int) -> Node:
        path, _, leaf = name.rpartition(".")
        owner = self.rewriter.graph_module
        for part in filter(None, path.split(".")):
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
        with self.graph.inserting_before(self.tokens):
            node = self.graph.get_attr(name)
        node.meta["val"] = fake_like(self.graph, torch.empty(shape, device="meta"))
        return node

    def call(self, op, *args, layer: int | None = None) -> Node:
        return self.rewriter.call(op, args, before=self.end, sources=(), layer=layer)

    def finish(self, logits: Node) -> GraphModule:
        self.end.args = (logits,)
        module = self.rewriter.graph_module
        for node in self.graph.nodes:
            # Nothing here came from a pass.
            node.meta.pop("from", None)
        module.recompile()
        set_stage(module, Stage.CANONICAL)
        return module


def build(shape: Shape = LLAMA) -> GraphModule:
    """A canonical graph with parameters on the meta device and a symbolic token count."""
    return _llama(shape) if shape.gated else _opt(shape)


def _llama(shape: Shape) -> GraphModule:
    b = Builder()
    d, k = shape.hidden, shape.kv_heads * shape.head_dim
    frequency = b.rewriter.constant("inverse_frequency", 10.0 ** -torch.arange(0.0, 1.0, 2 / shape.head_dim))
    x = b.call(EMBEDDING, b.tokens, b.parameter("model.embed.weight", shape.vocab, d), 0)
    for i in range(shape.layers):
        name = f"model.layers.{i}"
        h = b.call(RMS_NORM, x, b.parameter(f"{name}.input_norm.weight", d), 1e-6)
        q = b.call(LINEAR, h, b.parameter(f"{name}.q_proj.weight", d, d), None)
        key = b.call(LINEAR, h, b.parameter(f"{name}.k_proj.weight", k, d), None)
        value = b.call(LINEAR, h, b.parameter(f"{name}.v_proj.weight", k, d), None)
        q = b.call(ROTARY, q, b.positions, frequency, shape.heads, 1.0)
        key = b.call(ROTARY, key, b.positions, frequency, shape.kv_heads, 1.0)
        scale = shape.head_dim**-0.5
        y = b.call(ATTENTION, q, key, value, shape.heads, shape.kv_heads, scale, i, 0, layer=i)
        x = b.call(ADD, x, b.call(LINEAR, y, b.parameter(f"{name}.o_proj.weight", d, d), None))
        h = b.call(RMS_NORM, x, b.parameter(f"{name}.post_norm.weight", d), 1e-6)
        gate, up = _gate_up(b, shape, f"{name}.mlp")
        down = b.call(TRANSPOSE, b.parameter(f"{name}.mlp.down_proj.weight", d, shape.ffn), 0, 1)
        weights = (gate, up, down, None, None, None)
        x = b.call(ADD, x, b.call(FFN, h, *weights, shape.activation, shape.up_activation, layer=i))
    x = b.call(RMS_NORM, x, b.parameter("model.norm.weight", d), 1e-6)
    return b.finish(b.call(LINEAR, x, b.parameter("lm_head.weight", shape.vocab, d), None))


def _gate_up(b: Builder, shape: Shape, name: str) -> tuple[Node, Node]:
    f, d = shape.ffn, shape.hidden
    if not shape.fused:
        return b.parameter(f"{name}.gate_proj.weight", f, d), b.parameter(f"{name}.up_proj.weight", f, d)
    both = b.parameter(f"{name}.gate_up_proj.weight", 2 * f, d)
    gate = b.rewriter.constant("gate_rows", torch.arange(f))
    up = b.rewriter.constant("up_rows", torch.arange(f, 2 * f))
    return b.call(INDEX_SELECT, both, 0, gate), b.call(INDEX_SELECT, both, 0, up)


def _opt(shape: Shape) -> GraphModule:
    """Learned positions two rows late, biases everywhere, a head tied to the embedding."""
    b = Builder()
    d = shape.hidden
    embedding = b.parameter("model.embed.weight", shape.vocab, d)
    places = b.call(EMBEDDING, b.positions, b.parameter("model.embed_positions.weight", 66, d), 2)
    x = b.call(ADD, b.call(EMBEDDING, b.tokens, embedding, 0), places)
    for i in range(shape.layers):
        name = f"model.layers.{i}"
        h = b.call(LAYER_NORM, x, *_weight_bias(b, f"{name}.attn_norm", d), 1e-5)
        q, k, v = (b.call(LINEAR, h, *_weight_bias(b, f"{name}.{p}_proj", d, d)) for p in "qkv")
        y = b.call(ATTENTION, q, k, v, shape.heads, shape.heads, shape.head_dim**-0.5, i, 0, layer=i)
        x = b.call(ADD, x, b.call(LINEAR, y, *_weight_bias(b, f"{name}.out_proj", d, d)))
        h = b.call(LAYER_NORM, x, *_weight_bias(b, f"{name}.ffn_norm", d), 1e-5)
        up, up_bias = _weight_bias(b, f"{name}.fc1", shape.ffn, d)
        down, down_bias = b.parameter(f"{name}.fc2.weight", d, shape.ffn), b.parameter(f"{name}.fc2.bias", d)
        weights = (None, up, b.call(TRANSPOSE, down, 0, 1), None, up_bias, down_bias)
        x = b.call(ADD, x, b.call(FFN, h, *weights, shape.activation, "identity", layer=i))
    x = b.call(LAYER_NORM, x, *_weight_bias(b, "model.norm", d), 1e-5)
    return b.finish(b.call(LINEAR, x, embedding, None))


def _weight_bias(b: Builder, name: str, *shape: int) -> tuple[Node, Node]:
    return b.parameter(f"{name}.weight", *shape), b.parameter(f"{name}.bias", shape[0])


def structure(graph_module: GraphModule) -> Sequence[tuple]:
    """All that makes up a graph: to see that it has not changed."""
    return [
        (node.name, node.op, node.target, str(node.args), str(node.kwargs), dict(node.meta))
        for node in graph_module.graph.nodes
    ]
