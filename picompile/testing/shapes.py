"""Small canonical graphs written by hand, in the manner of Llama, Falcon and OPT, and mixtures of experts of these."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from picompile_passes.dialect.expressions import FUNCTIONS
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    ELEMENTWISE,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LAYER_NORM,
    LINEAR,
    RESHAPE,
    RMS_NORM,
    ROTARY,
    ROUTE,
    TRANSPOSE,
)

# Rows of OPT's table of positions; the first two are never read.
_POSITION_ROWS = 66


@dataclass(frozen=True, repr=False)
class GraphShape:
    """Sizes and kind of a model. `gated` makes it Llama-like, otherwise it is OPT-like.

    `hidden` is a multiple of twice `heads`. OPT-like models have as many key heads as heads.
    """

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
    parallel: bool = False
    """Attention and feed-forward block read the same norm, and are added to the residual together."""
    bias: bool = True
    """Linears have biases (OPT-like only)."""
    window: int = 0
    """The number of tokens that the attention of layers 0, 2, 4 … sees; 0 is all."""
    softcap: float = 0.0
    """The soft cap of attention scores; 0 is none."""
    alibi: bool = False
    """Scores fall with the distance of the tokens, by the slopes of ALiBi (arXiv 2108.12409)."""
    sinks: bool = False
    """Attention has a learned sink for each head."""
    eps: float = 1e-5
    """The epsilon of every norm."""
    ffn_norm: bool = False
    """Feed-forward blocks divide their neurons' outputs by the root mean square of these."""
    experts: int = 0
    """The routed experts of each block, of `ffn` neurons each; 0 is a plain block. No block of experts has `ffn_norm`.
    """
    chosen: int = 1
    """The experts that a token chooses."""
    shared: int = 0
    """The neurons of a block that all tokens share, beside the experts; 0 is none."""
    scores: str = "softmax"
    """What the router makes of its logits: one of `SCORES` in the dialect's `route`."""
    normalized: str = "none"
    """What is done with the scores of the chosen experts: one of `NORMALIZED` there."""
    router_bias: bool = False
    """The router has a bias that the choice alone depends on."""
    expert_bias: bool = False
    """Experts have biases."""
    turned: bool = False
    """Stacks of experts have inputs before outputs, as in gpt-oss, whose rows of gate and up alternate."""

    @property
    def head_dim(self) -> int:
        """Columns of one head."""
        return self.hidden // self.heads

    def layer_window(self, layer: int) -> int:
        """The window of one layer."""
        return self.window if layer % 2 == 0 else 0

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Shape({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"


LLAMA = GraphShape()
OPT = GraphShape(gated=False)

_ACTIVATIONS = ("relu", "relu2", "relu6", "fatrelu(0.02)", "silu", "gelu")


_OF_EXPERTS = ("chosen", "shared", "scores", "normalized", "router_bias", "expert_bias", "turned")


def shapes(**fixed: Any) -> st.SearchStrategy[GraphShape]:
    """Shapes of both kinds, mostly of odd sizes. What is `fixed`, by name, is not drawn."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "heads_and_kv": st.sampled_from([(1, 1), (3, 1), (4, 2), (3, 3)]),
        "half_head": st.integers(1, 5),
        "ffn": st.integers(1, 45),
        "vocab": st.integers(2, 40),
        "layers": st.integers(1, 3),
        "activation": st.sampled_from(_ACTIVATIONS),
        "up_activation": st.sampled_from(["identity", "relu"]),
        "gated": st.booleans(),
        "fused": st.booleans(),
        "parallel": st.booleans(),
        "bias": st.booleans(),
        "window": st.sampled_from([0, 0, 1, 3]),
        "softcap": st.sampled_from([0.0, 0.0, 1.5]),
        "alibi": st.sampled_from([False, False, True]),
        "sinks": st.sampled_from([False, False, True]),
        "eps": st.sampled_from([1e-5, 1e-6]),
        "ffn_norm": st.sampled_from([False, False, True]),
        "experts": st.sampled_from([0, 0, 0, 1, 3, 4]),
        "chosen": st.integers(1, 4),
        "shared": st.sampled_from([0, 0, 5]),
        "scores": st.sampled_from(["softmax", "sigmoid", "identity"]),
        "normalized": st.sampled_from(["none", "sum", "softmax"]),
        "router_bias": st.booleans(),
        "expert_bias": st.booleans(),
        "turned": st.booleans(),
    }
    return st.fixed_dictionaries(drawn | {name: st.just(value) for name, value in fixed.items()}).map(_shape)


def _shape(values: dict[str, Any]) -> GraphShape:
    """`hidden`, `heads` and `kv_heads` that were not fixed follow from what was drawn; experts allow not everything."""
    heads, kv_heads = values.pop("heads_and_kv")
    half_head = values.pop("half_head")
    heads = values.setdefault("heads", heads)
    values.setdefault("kv_heads", kv_heads if heads % kv_heads == 0 else heads)
    values.setdefault("hidden", heads * 2 * half_head)
    if not values.get("experts"):
        return GraphShape(**{name: value for name, value in values.items() if name not in _OF_EXPERTS})
    values["chosen"] = min(values.get("chosen", 1), values["experts"])
    # Logits of any sign may add up to nothing.
    if (values["scores"], values["normalized"]) == ("identity", "sum"):
        values["normalized"] = "softmax"
    return GraphShape(**values | {"ffn_norm": False})


def build(shape: GraphShape = LLAMA) -> GraphModule:
    """The canonical graph of `shape`: parameters on the meta device, a token count that is a symbol."""
    return _llama(shape) if shape.gated else _opt(shape)


def _llama(shape: GraphShape) -> GraphModule:
    b = GraphBuilder()
    d, eps = shape.hidden, shape.eps
    frequency = b.constant("inverse_frequency", 10.0 ** -torch.arange(0.0, 1.0, 2 / shape.head_dim))
    x = b.call(EMBEDDING, b.tokens, b.parameter("model.embed.weight", shape.vocab, d), 0)
    for i in range(shape.layers):
        name = f"model.layers.{i}"
        h = b.call(RMS_NORM, x, b.parameter(f"{name}.input_norm.weight", d), eps)
        attended = b.call(ADD, x, _rotary_attention(b, shape, h, frequency, layer=i))
        if not shape.parallel:
            h = b.call(RMS_NORM, attended, b.parameter(f"{name}.post_norm.weight", d), eps)
        if shape.experts:
            x = b.call(ADD, attended, _mixture(b, shape, h, name, layer=i))
            continue
        gate, up = _gate_up(b, shape, f"{name}.mlp", i)
        down = b.call(TRANSPOSE, b.parameter(f"{name}.mlp.down_proj.weight", d, shape.ffn), 0, 1)
        x = b.call(ADD, attended, _ffn(b, shape, h, weights=(gate, up, down, None, None, None), layer=i))
    x = b.call(RMS_NORM, x, b.parameter("model.norm.weight", d), eps)
    return b.finish(b.call(LINEAR, x, b.parameter("lm_head.weight", shape.vocab, d), None))


def _rotary_attention(b: GraphBuilder, shape: GraphShape, h: Node, frequency: Node, layer: int) -> Node:
    d, k, name = shape.hidden, shape.kv_heads * shape.head_dim, f"model.layers.{layer}"
    q = b.call(LINEAR, h, b.parameter(f"{name}.q_proj.weight", d, d), None)
    key = b.call(LINEAR, h, b.parameter(f"{name}.k_proj.weight", k, d), None)
    value = b.call(LINEAR, h, b.parameter(f"{name}.v_proj.weight", k, d), None)
    q = b.call(ROTARY, q, b.positions, frequency, shape.heads, 1.0)
    key = b.call(ROTARY, key, b.positions, frequency, shape.kv_heads, 1.0)
    y = _attention(b, shape, qkv=(q, key, value), kv_heads=shape.kv_heads, layer=layer)
    return b.call(LINEAR, y, b.parameter(f"{name}.o_proj.weight", d, d), None)


def _attention(b: GraphBuilder, shape: GraphShape, qkv: tuple[Node, ...], kv_heads: int, layer: int) -> Node:
    scale, window = shape.head_dim**-0.5, shape.layer_window(layer)
    options: list[Any] = [shape.softcap, None, None]
    if shape.alibi:
        slopes = 2.0 ** (-8.0 * torch.arange(1, shape.heads + 1) / shape.heads)
        options[1] = b.constant(f"layer_{layer}_slopes", slopes)
    if shape.sinks:
        options[2] = b.parameter(f"model.layers.{layer}.sinks", shape.heads)
    while options and not options[-1]:
        options.pop()
    return b.call(ATTENTION, *qkv, shape.heads, kv_heads, scale, layer, window, *options, layer=layer)


def _gate_up(b: GraphBuilder, shape: GraphShape, name: str, layer: int) -> tuple[Node, Node]:
    f, d = shape.ffn, shape.hidden
    if not shape.fused:
        return b.parameter(f"{name}.gate_proj.weight", f, d), b.parameter(f"{name}.up_proj.weight", f, d)
    both = b.parameter(f"{name}.gate_up_proj.weight", 2 * f, d)
    gate = b.constant(f"layer_{layer}_gate_rows", torch.arange(f))
    up = b.constant(f"layer_{layer}_up_rows", torch.arange(f, 2 * f))
    return b.call(INDEX_SELECT, both, 0, gate), b.call(INDEX_SELECT, both, 0, up)


def _opt(shape: GraphShape) -> GraphModule:
    """Learned positions two rows late, a head tied to the embedding."""
    b = GraphBuilder()
    d = shape.hidden
    embedding = b.parameter("model.embed.weight", shape.vocab, d)
    places = b.call(EMBEDDING, b.positions, b.parameter("model.embed_positions.weight", _POSITION_ROWS, d), 2)
    x = b.call(ADD, b.call(EMBEDDING, b.tokens, embedding, 0), places)
    for i in range(shape.layers):
        name = f"model.layers.{i}"
        h = _layer_norm(b, shape, x, f"{name}.attn_norm")
        q, k, v = (b.call(LINEAR, h, *_linear(b, shape, name=f"{name}.{p}_proj", rows=d, columns=d)) for p in "qkv")
        y = _attention(b, shape, qkv=(q, k, v), kv_heads=shape.heads, layer=i)
        attended = b.call(ADD, x, b.call(LINEAR, y, *_linear(b, shape, name=f"{name}.out_proj", rows=d, columns=d)))
        if not shape.parallel:
            h = _layer_norm(b, shape, attended, f"{name}.ffn_norm")
        if shape.experts:
            x = b.call(ADD, attended, _mixture(b, shape, h, name, layer=i))
            continue
        up, up_bias = _linear(b, shape, name=f"{name}.fc1", rows=shape.ffn, columns=d)
        down, down_bias = _linear(b, shape, name=f"{name}.fc2", rows=d, columns=shape.ffn)
        weights = (None, up, b.call(TRANSPOSE, down, 0, 1), None, up_bias, down_bias)
        x = b.call(ADD, attended, _ffn(b, shape, h, weights, layer=i))
    x = _layer_norm(b, shape, x, "model.norm")
    return b.finish(b.call(LINEAR, x, embedding, None))


def _ffn(b: GraphBuilder, shape: GraphShape, h: Node, weights: tuple[Node | None, ...], layer: int) -> Node:
    up_activation = shape.up_activation if shape.gated else "identity"
    norm = (shape.eps,) if shape.ffn_norm else ()
    return b.call(FFN, h, *weights, shape.activation, up_activation, *norm, layer=layer)


def _mixture(b: GraphBuilder, shape: GraphShape, h: Node, name: str, layer: int) -> Node:
    """A router, its experts, and the block that all tokens share, if there is one."""
    d, e = shape.hidden, shape.experts
    logits = b.call(LINEAR, h, b.parameter(f"{name}.mlp.router.weight", e, d), None)
    bias = b.parameter(f"{name}.mlp.router.correction_bias", e) if shape.router_bias else None
    gains = b.call(ROUTE, logits, bias, None, shape.chosen, shape.scores, shape.normalized)
    gate, gate_bias, up, up_bias = _expert_rows(b, shape, f"{name}.mlp.experts", layer)
    down = _expert_down(b, shape, f"{name}.mlp.experts.down_proj")
    expert_bias = b.parameter(f"{name}.mlp.experts.down_proj_bias", e, d) if shape.expert_bias else None
    weights = (gate, up, down, gate_bias, up_bias, None)
    up_activation = shape.up_activation if shape.gated else "identity"
    y = b.call(FFN, h, *weights, shape.activation, up_activation, None, gains, expert_bias, layer=layer)
    return b.call(ADD, y, _shared_block(b, shape, h, f"{name}.mlp.shared")) if shape.shared else y


def _shared_block(b: GraphBuilder, shape: GraphShape, h: Node, name: str) -> Node:
    """A block of linears and arithmetic, as canonical graphs have those beside experts."""
    d, f = shape.hidden, shape.shared
    activation = shape.activation if shape.activation in FUNCTIONS else "relu"
    hidden = b.call(LINEAR, h, b.parameter(f"{name}.up_proj.weight", f, d), None)
    if shape.gated:
        gate = b.call(LINEAR, h, b.parameter(f"{name}.gate_proj.weight", f, d), None)
        hidden = b.call(ELEMENTWISE, [gate, hidden], f"t0 = {activation}(x0); mul(t0, x1)")
    else:
        hidden = b.call(ELEMENTWISE, [hidden], f"{activation}(x0)")
    return b.call(LINEAR, hidden, b.parameter(f"{name}.down_proj.weight", d, f), None)


def _expert_rows(b: GraphBuilder, shape: GraphShape, name: str, layer: int) -> tuple[Node | None, ...]:
    """Gate, its bias, up and its bias: rows of one stack, or of a stack each; None for what there is not."""
    e, f = shape.experts, shape.ffn
    if not shape.gated:
        return None, None, *_expert_stack(b, shape, f"{name}.up_proj", f)
    if not shape.fused:
        return *_expert_stack(b, shape, f"{name}.gate_proj", f), *_expert_stack(b, shape, f"{name}.up_proj", f)
    both, bias = _expert_stack(b, shape, f"{name}.gate_up_proj", 2 * f)
    rows = torch.arange(2 * e * f)
    alternating, halves = (rows.view(e, f, 2).transpose(1, 2), rows.view(e, 2, f))
    found: list[Node | None] = []
    for number, side in enumerate(("gate", "up")):
        chosen = (alternating if shape.turned else halves)[:, number].flatten()
        table = b.constant(f"layer_{layer}_{side}_rows", chosen)
        found += [None if matrix is None else b.call(INDEX_SELECT, matrix, 0, table) for matrix in (both, bias)]
    return tuple(found)


def _expert_stack(b: GraphBuilder, shape: GraphShape, name: str, rows: int) -> tuple[Node, Node | None]:
    """A stack of `rows` rows an expert as one matrix [experts · rows, hidden], and its bias."""
    e, d = shape.experts, shape.hidden
    stack = b.call(TRANSPOSE, b.parameter(name, e, d, rows), 1, 2) if shape.turned else b.parameter(name, e, rows, d)
    bias = b.parameter(f"{name}_bias", e, rows) if shape.expert_bias else None
    flat = None if bias is None else b.call(RESHAPE, bias, [e * rows])
    return b.call(RESHAPE, stack, [e * rows, d]), flat


def _expert_down(b: GraphBuilder, shape: GraphShape, name: str) -> Node:
    """The rows of all neurons: float32 [experts · neurons, hidden]."""
    e, f, d = shape.experts, shape.ffn, shape.hidden
    by_neurons = b.parameter(name, e, f, d) if shape.turned else b.call(TRANSPOSE, b.parameter(name, e, d, f), 1, 2)
    return b.call(RESHAPE, by_neurons, [e * f, d])


def _layer_norm(b: GraphBuilder, shape: GraphShape, x: Node, name: str) -> Node:
    weight, bias = (b.parameter(f"{name}.{part}", shape.hidden) for part in ("weight", "bias"))
    return b.call(LAYER_NORM, x, weight, bias, shape.eps)


def _linear(b: GraphBuilder, shape: GraphShape, name: str, rows: int, columns: int) -> tuple[Node, Node | None]:
    weight = b.parameter(f"{name}.weight", rows, columns)
    return weight, b.parameter(f"{name}.bias", rows) if shape.bias else None
