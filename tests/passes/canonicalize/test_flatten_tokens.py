import pytest
import torch
from torch.fx import GraphModule, Node

from helpers.raising import HIDDEN, Write, aten, captured, linear, only, operators, raised
from picompile.testing import OPT, build
from picompile_passes.base import Stage, stage_of
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION, ELEMENTWISE, EMBEDDING, FFN, LAYER_NORM, LINEAR, RMS_NORM
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.verify import verify

HEADS, SIZE = 3, HIDDEN // 3


def _batched(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.unsqueeze.default, x, 0)


def test_views_and_batch_dimensions_go() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        x = b.call(RMS_NORM, _batched(b, x), b.parameter("norm", HIDDEN), 1e-5)
        heads = b.call(aten.unflatten.int, linear(b, x, "w"), -1, [HEADS, SIZE])
        turned = b.call(aten.transpose.int, heads, 1, 2)
        back = b.call(aten.flatten.using_ints, b.call(aten.permute.default, turned, [0, 2, 1, 3]), 2)
        return b.call(aten.squeeze.dim, linear(b, back, "head"), 0)

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"rms_norm": 1, "linear": 2}


def test_parts_of_a_fused_linear_become_linears() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        fused = linear(b, x, "qkv", 3 * HIDDEN, bias=True)
        # Falcon's order: q, k and v of each head side by side.
        heads = b.call(aten.unflatten.int, fused, -1, [HEADS, 3, SIZE])
        q, k, v = (b.call(aten.flatten.using_ints, b.call(aten.select.int, heads, 2, i), 1) for i in range(3))
        return linear(b, b.call(ATTENTION, q, k, v, HEADS, HEADS, 0.3, 0, 0, layer=0), "head")

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"index_select": 6, "linear": 4, "attention": 1}
    attention = only(result, ATTENTION)
    assert attention.meta["layer"] == 0
    for number, side in enumerate("qkv"):
        _, weight, bias = arguments(attention)[side].args
        assert (weight.args[0].target, bias.args[0].target) == ("qkv", "qkv_bias")
        assert weight.args[2] is bias.args[2]
        rows = result.get_buffer(weight.args[2].target).unflatten(0, (HEADS, SIZE))
        assert torch.equal(rows[:, 0], (3 * torch.arange(HEADS) + number) * SIZE)


def test_equal_parts_are_onelinear() -> None:
    # The sum of twice the same is a form of it, so it has to pass through something in between.
    def write(b: GraphBuilder, x: Node) -> Node:
        fused = linear(b, x, "fused", 2 * HIDDEN)
        norms = [b.parameter(f"norm{i}", HIDDEN) for i in range(2)]
        halves = [b.call(RMS_NORM, b.call(aten.slice.Tensor, fused, -1, 0, HIDDEN), norm, 1e-5) for norm in norms]
        return linear(b, b.call(aten.add.Tensor, *halves), "head")

    result = raised(captured(write), FlattenTokens())
    assert operators(result) == {"index_select": 1, "linear": 2, "rms_norm": 2, "add": 1}


@pytest.mark.parametrize(
    ("operator", "weights"), [(RMS_NORM, ["norm"]), (LAYER_NORM, ["norm", "bias"]), (LAYER_NORM, [])]
)
def test_columns_of_a_norm_that_stay_in_their_groups(operator: object, weights: list[str]) -> None:
    """Partial rotary embeddings behind a norm of each head take its columns in another order."""

    def write(b: GraphBuilder, x: Node) -> Node:
        vectors = [b.parameter(name, HIDDEN) for name in weights] or [None, None]
        normed = b.call(operator, linear(b, x, "w"), *vectors, 1e-5, HEADS)
        heads = b.call(aten.unflatten.int, normed, -1, [HEADS, SIZE])
        order = b.constant("order", torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]))
        parts = b.call(aten.index_select.default, heads, -1, order)
        return linear(b, b.call(aten.flatten.using_ints, parts, -2), "head")

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert (operators(result)["linear"], arguments(only(result, operator))["groups"]) == (2, HEADS)


def test_some_heads_of_a_norm() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        normed = b.call(RMS_NORM, linear(b, x, "w"), b.parameter("norm", HIDDEN), 1e-5, HEADS)
        return b.call(
            LINEAR, b.call(aten.slice.Tensor, normed, -1, SIZE, 3 * SIZE), b.parameter("h", 9, 2 * SIZE), None
        )

    assert arguments(only(raised(captured(write), FlattenTokens()), RMS_NORM))["groups"] == 2


def test_columns_of_arithmetic_are_arithmetic_on_columns() -> None:
    """Fused projections that are clamped, or scaled by a vector, before they are taken apart."""

    def write(b: GraphBuilder, x: Node) -> Node:
        fused = linear(b, x, "qkv", 3 * HIDDEN)
        gate = b.call(LINEAR, x, b.parameter("gate", 1, HIDDEN), None)
        inputs = [fused, gate, b.parameter("scale", 3 * HIDDEN), b.constant("number", torch.tensor([0.5]))]
        text = "t0 = mul(x0, x1); t1 = mul(t0, x2); t2 = add(t1, x3); minimum(t2, 0.7)"
        clamped = b.call(ELEMENTWISE, inputs, text)
        q, k, v = (b.call(aten.slice.Tensor, clamped, -1, i * HIDDEN, (i + 1) * HIDDEN) for i in range(3))
        return linear(b, b.call(ATTENTION, q, k, v, HEADS, HEADS, 0.3, 0, 0, layer=0), "head")

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"linear": 5, "index_select": 6, "elementwise": 3, "attention": 1}


def test_ids_of_embeddings() -> None:
    """Positions may be made inside: they are the input all the same."""

    def write(b: GraphBuilder, x: Node) -> Node:
        shifted = b.call(aten.add.Tensor, _batched(b, b.positions), 2)
        again = b.call(EMBEDDING, _batched(b, b.tokens), b.parameter("again", 31, HIDDEN), 0)
        both = b.call(aten.add.Tensor, b.call(EMBEDDING, shifted, b.parameter("shifted", 13, HIDDEN), 1), again)
        count = b.call(aten.arange.default, b.call(aten.sym_size.int, b.tokens, 0))
        x = b.call(aten.add.Tensor, x, b.call(EMBEDDING, count, b.parameter("counted", 13, HIDDEN), 0))
        return b.call(aten.squeeze.dim, linear(b, b.call(aten.add.Tensor, _batched(b, x), both), "head"), 0)

    result = raised(captured(write), FlattenTokens())
    found = {n.args[1].target: n.args for n in result.graph.find_nodes(op="call_function", target=EMBEDDING)}
    read = {name: (ids.target, offset) for name, (ids, _, offset) in found.items() if name != "embed.weight"}
    assert read == {"shifted": ("positions", 3), "again": ("tokens", 0), "counted": ("positions", 0)}


def test_a_canonical_graph_stays() -> None:
    result = FlattenTokens()(build(OPT))
    assert not result.modified
    assert stage_of(result.graph_module) == Stage.CANONICAL


def _normed_heads(b: GraphBuilder, x: Node) -> Node:
    heads = b.call(aten.unflatten.int, linear(b, x, "w"), -1, [HEADS, SIZE])
    return b.call(aten.flatten.using_ints, b.call(RMS_NORM, heads, b.parameter("norm", SIZE), 1e-5), 1)


def _joined_weight(b: GraphBuilder, x: Node) -> Node:
    weight = b.call(aten.cat.default, [b.parameter(name, HIDDEN, HIDDEN) for name in ("gate", "up")])
    return b.call(LINEAR, x, weight, None)


def _shifted_weight(b: GraphBuilder, x: Node) -> Node:
    return b.call(RMS_NORM, x, b.call(aten.add.Tensor, b.parameter("norm", HIDDEN), 1.0), 1e-5)


def _multiplied_weight(b: GraphBuilder, x: Node) -> Node:
    weight = b.call(aten.mm.default, *(b.parameter(name, HIDDEN, HIDDEN) for name in ("a", "b")))
    return b.call(LINEAR, x, weight, None)


def _summed_weight(b: GraphBuilder, x: Node) -> Node:
    return b.call(RMS_NORM, x, b.call(aten.sum.dim_IntList, b.parameter("norm", 3, HIDDEN), [0]), 1e-5)


def _in_double(b: GraphBuilder, x: Node) -> Node:
    return b.call(
        aten.add.Tensor, x, b.call(EMBEDDING, b.tokens, b.constant("table", torch.zeros(31, HIDDEN).double()), 0)
    )


def _attending_to_heads(b: GraphBuilder, x: Node) -> Node:
    sides = [b.call(aten.unsqueeze.default, linear(b, x, name), 1) for name in "qkv"]
    return b.call(aten.squeeze.dim, b.call(ATTENTION, *sides, HEADS, HEADS, 0.3, 0, 0, layer=0), 1)


def _block_without_attention(b: GraphBuilder, x: Node) -> Node:
    weights = [b.parameter(name, 40, HIDDEN) for name in ("up", "down")]
    return b.call(FFN, x, None, *weights, None, None, None, "relu", "identity", layer=0)


def _headed(change: Write) -> GraphModule:
    return captured(lambda b, x: linear(b, change(b, x), "head", 31))


@pytest.mark.parametrize("change", [_joined_weight, _shifted_weight])
def test_weights_may_be_computed(change: Write) -> None:
    verify(raised(_headed(change), FlattenTokens()), Stage.CANONICAL)


def _norm(b: GraphBuilder, x: Node, *shape: int) -> Node:
    return b.call(RMS_NORM, x, b.parameter("norm", *shape), 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b, x: _batched(b, b.call(aten.mul.Tensor, x, 12.0)),
            r"mul \(aten\.mul\.Tensor\): linear.* takes it, but it is not just columns",
        ),
        (
            lambda b, x: b.call(aten.slice.Tensor, _norm(b, x, HIDDEN), -1, 0, SIZE),
            "it takes some of the columns of rms_norm, which is no linear",
        ),
        (lambda b, x: b.call(aten.flip.default, x, [0]), "linear.* takes it, but it is not just columns"),
        (_normed_heads, "it works on each head"),
        (lambda b, x: b.call(aten.add.Tensor, x, b.parameter("shift", HIDDEN)), "it adds values of different shapes"),
        (lambda b, x: b.call(aten.add.Tensor, x, 1.0), "it takes a number"),
        (lambda b, x: b.call(aten.add.Tensor, x, linear(b, x, "w", 1)), "it adds values of different shapes"),
        (_multiplied_weight, r"mm \(aten\.mm\.default\): the weight of linear is not computed from parameters alone"),
        (_summed_weight, r"sum_1 \(aten\.sum\.dim_IntList\): the weight of rms_norm is not computed"),
        (lambda b, x: _norm(b, x, 1, HIDDEN), r"rms_norm .*: its weight is float32\[1, 24\]"),
        (_in_double, "it is torch.float64, not float32"),
        (_attending_to_heads, "it attends to other dimensions than the tokens"),
        (_block_without_attention, r"ffn .*: a feed-forward block more than the 0 attentions"),
    ],
)
def test_operators_outside_the_dialect_are_named(change: Write, message: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=message) as caught:
        FlattenTokens()(_headed(change))
    assert "\n" not in str(caught.value)


def test_logits_are_made_by_alinear() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"rms_norm .*: it makes the logits"):
        FlattenTokens()(captured(lambda b, x: _norm(b, x, HIDDEN)))
