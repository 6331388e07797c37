from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from helpers.raising import HIDDEN, aten, captured, only, operators, raised
from picompile.testing import LLAMA, OPT, GraphShape, build
from picompile_passes.base import Stage, stage_of
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION, ELEMENTWISE, EMBEDDING, FFN, LAYER_NORM, LINEAR, RMS_NORM
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.verify import verify

HEADS, SIZE = 3, HIDDEN // 3


def _linear(b: GraphBuilder, x: Node, name: str = "w", rows: int = HIDDEN, bias: bool = False) -> Node:
    return b.call(LINEAR, x, b.parameter(name, rows, HIDDEN), b.parameter(f"{name}_bias", rows) if bias else None)


def _batched(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.unsqueeze.default, x, 0)


def test_views_and_batch_dimensions_go() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        x = b.call(RMS_NORM, _batched(b, x), b.parameter("norm", HIDDEN), 1e-5)
        heads = b.call(aten.unflatten.int, _linear(b, x), -1, [HEADS, SIZE])
        turned = b.call(aten.transpose.int, heads, 1, 2)
        back = b.call(aten.flatten.using_ints, b.call(aten.permute.default, turned, [0, 2, 1, 3]), 2)
        return b.call(aten.squeeze.dim, _linear(b, back, "head"), 0)

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"rms_norm": 1, "linear": 2}


def test_parts_of_a_fused_linear_become_linears() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        fused = _linear(b, x, "qkv", 3 * HIDDEN, bias=True)
        # Falcon's order: q, k and v of each head side by side.
        heads = b.call(aten.unflatten.int, fused, -1, [HEADS, 3, SIZE])
        q, k, v = (b.call(aten.flatten.using_ints, b.call(aten.select.int, heads, 2, i), 1) for i in range(3))
        return _linear(b, b.call(ATTENTION, q, k, v, HEADS, HEADS, 0.3, 0, 0, layer=0), "head")

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


def test_equal_parts_are_one_linear() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        fused = _linear(b, x, "fused", 2 * HIDDEN)
        halves = [b.call(aten.slice.Tensor, fused, -1, 0, HIDDEN) for _ in range(2)]
        return _linear(b, b.call(aten.add.Tensor, *halves), "head")

    # The sum of twice the same is a form of it, so it has to pass through something in between.
    def apart(b: GraphBuilder, x: Node) -> Node:
        fused = _linear(b, x, "fused", 2 * HIDDEN)
        norms = [b.parameter(f"norm{i}", HIDDEN) for i in range(2)]
        halves = [b.call(RMS_NORM, b.call(aten.slice.Tensor, fused, -1, 0, HIDDEN), norm, 1e-5) for norm in norms]
        return _linear(b, b.call(aten.add.Tensor, *halves), "head")

    result = raised(captured(apart), FlattenTokens())
    assert operators(result) == {"index_select": 1, "linear": 2, "rms_norm": 2, "add": 1}
    with pytest.raises(UnsupportedGraphError, match="add"):
        FlattenTokens()(captured(write))


def _turned_columns(b: GraphBuilder, x: Node, order: list[int]) -> Node:
    """The columns of each head of `x` in another order."""
    heads = b.call(aten.unflatten.int, x, -1, [HEADS, SIZE])
    parts = b.call(aten.index_select.default, heads, -1, b.constant("order", torch.tensor(order)))
    return b.call(aten.flatten.using_ints, parts, -2)


@pytest.mark.parametrize("operator", [RMS_NORM, LAYER_NORM])
@pytest.mark.parametrize("affine", [False, True])
def test_columns_of_a_norm_that_stay_in_their_groups(operator: object, affine: bool) -> None:
    """Partial rotary embeddings behind a norm of each head take its columns in another order."""

    def write(b: GraphBuilder, x: Node) -> Node:
        weights = [b.parameter("norm", HIDDEN) if affine or operator is RMS_NORM else None]
        if operator is LAYER_NORM:
            weights.append(b.parameter("bias", HIDDEN) if affine else None)
        normed = b.call(operator, _linear(b, x), *weights, 1e-5, HEADS)
        return _linear(b, _turned_columns(b, normed, [0, 2, 4, 6, 1, 3, 5, 7]), "head")

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert (operators(result)["linear"], arguments(only(result, operator))["groups"]) == (2, HEADS)


def test_some_heads_of_a_norm() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        normed = b.call(RMS_NORM, _linear(b, x), b.parameter("norm", HIDDEN), 1e-5, HEADS)
        return b.call(
            LINEAR, b.call(aten.slice.Tensor, normed, -1, SIZE, 3 * SIZE), b.parameter("h", 9, 2 * SIZE), None
        )

    assert arguments(only(raised(captured(write), FlattenTokens()), RMS_NORM))["groups"] == 2


def test_columns_of_arithmetic_are_arithmetic_on_columns() -> None:
    """Fused projections that are clamped, or scaled by a vector, before they are taken apart."""

    def write(b: GraphBuilder, x: Node) -> Node:
        fused = _linear(b, x, "qkv", 3 * HIDDEN)
        gate = b.call(LINEAR, x, b.parameter("gate", 1, HIDDEN), None)
        inputs = [fused, gate, b.parameter("scale", 3 * HIDDEN), b.constant("number", torch.tensor([0.5]))]
        text = "t0 = mul(x0, x1); t1 = mul(t0, x2); t2 = add(t1, x3); minimum(t2, 0.7)"
        clamped = b.call(ELEMENTWISE, inputs, text)
        q, k, v = (b.call(aten.slice.Tensor, clamped, -1, i * HIDDEN, (i + 1) * HIDDEN) for i in range(3))
        return _linear(b, b.call(ATTENTION, q, k, v, HEADS, HEADS, 0.3, 0, 0, layer=0), "head")

    result = raised(captured(write), FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"linear": 5, "index_select": 6, "elementwise": 3, "attention": 1}


def test_ids_of_embeddings() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        shifted = b.call(aten.add.Tensor, _batched(b, b.positions), 2)
        table = b.parameter("positions", 13, HIDDEN)
        again = b.call(EMBEDDING, _batched(b, b.tokens), b.parameter("again", 31, HIDDEN), 0)
        both = b.call(aten.add.Tensor, b.call(EMBEDDING, shifted, table, 1), again)
        return b.call(aten.squeeze.dim, _linear(b, b.call(aten.add.Tensor, _batched(b, x), both), "head"), 0)

    result = raised(captured(write), FlattenTokens())
    found = {n.args[1].target: n.args for n in result.graph.find_nodes(op="call_function", target=EMBEDDING)}
    assert (found["positions"][0].target, found["positions"][2]) == ("positions", 3)
    assert (found["again"][0].target, found["again"][2]) == ("tokens", 0)


def test_positions_made_inside_are_the_positions() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        count = b.call(aten.sym_size.int, b.tokens, 0)
        made = b.call(EMBEDDING, b.call(aten.arange.default, count), b.parameter("positions", 13, HIDDEN), 0)
        return _linear(b, b.call(aten.add.Tensor, x, made), "head")

    result = raised(captured(write), FlattenTokens())
    assert operators(result)["embedding"] == 1
    (ids,) = [n.args[0] for n in result.graph.find_nodes(op="call_function", target=EMBEDDING)][1:]
    assert ids.target == "positions"


@pytest.mark.parametrize("shape", [LLAMA, OPT])
def test_a_canonical_graph_stays(shape: GraphShape) -> None:
    graph_module = build(shape)
    result = FlattenTokens()(graph_module)
    assert not result.modified
    assert stage_of(result.graph_module) == Stage.CANONICAL


def _scaled(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.unsqueeze.default, b.call(aten.mul.Tensor, x, 12.0), 0)


def _heads_mixed(b: GraphBuilder, x: Node) -> Node:
    normed = b.call(RMS_NORM, x, b.parameter("norm", HIDDEN), 1e-5)
    return b.call(aten.slice.Tensor, normed, -1, 0, SIZE)


def _tokens_mixed(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.flip.default, x, [0])


def _normed_heads(b: GraphBuilder, x: Node) -> Node:
    heads = b.call(aten.unflatten.int, _linear(b, x), -1, [HEADS, SIZE])
    return b.call(aten.flatten.using_ints, b.call(RMS_NORM, heads, b.parameter("norm", SIZE), 1e-5), 1)


def _plus_constant(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.add.Tensor, x, b.parameter("shift", HIDDEN))


def _plus_number(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.add.Tensor, x, 1.0)


def _one_for_all(b: GraphBuilder, x: Node) -> Node:
    return b.call(aten.add.Tensor, x, b.call(LINEAR, x, b.parameter("one", 1, HIDDEN), None))


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


def _wide_weight(b: GraphBuilder, x: Node) -> Node:
    return b.call(RMS_NORM, x, b.parameter("norm", 1, HIDDEN), 1e-5)


def _in_double(b: GraphBuilder, x: Node) -> Node:
    return b.call(
        aten.add.Tensor, x, b.call(EMBEDDING, b.tokens, b.constant("table", torch.zeros(31, HIDDEN).double()), 0)
    )


def _attending_to_heads(b: GraphBuilder, x: Node) -> Node:
    sides = [b.call(aten.unsqueeze.default, _linear(b, x, name), 1) for name in "qkv"]
    return b.call(aten.squeeze.dim, b.call(ATTENTION, *sides, HEADS, HEADS, 0.3, 0, 0, layer=0), 1)


def _block_without_attention(b: GraphBuilder, x: Node) -> Node:
    weights = [b.parameter(name, 40, HIDDEN) for name in ("up", "down")]
    return b.call(FFN, x, None, *weights, None, None, None, "relu", "identity", layer=0)


@pytest.mark.parametrize("change", [_joined_weight, _shifted_weight])
def test_weights_may_be_computed(change: Callable[[GraphBuilder, Node], Node]) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        changed = change(b, x)
        return b.call(LINEAR, changed, b.parameter("head", 31, int(changed.meta["val"].shape[-1])), None)

    verify(raised(captured(write), FlattenTokens()), Stage.CANONICAL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scaled, r"mul \(aten\.mul\.Tensor\): linear.* takes it, but it is not just columns"),
        (_heads_mixed, "it takes some of the columns of rms_norm, which is no linear"),
        (_tokens_mixed, r"flip \(aten\.flip\.default\): linear.* takes it, but it is not just columns"),
        (_normed_heads, "it works on each head"),
        (_plus_constant, r"add .*it adds values of different shapes"),
        (_plus_number, "it takes a number"),
        (_one_for_all, "it adds values of different shapes"),
        (_multiplied_weight, r"mm \(aten\.mm\.default\): the weight of linear is not computed from parameters alone"),
        (_summed_weight, r"sum_1 \(aten\.sum\.dim_IntList\): the weight of rms_norm is not computed"),
        (_wide_weight, r"rms_norm .*: its weight is float32\[1, 24\]"),
        (_in_double, "it is torch.float64, not float32"),
        (_attending_to_heads, "it attends to other dimensions than the tokens"),
        (_block_without_attention, r"ffn .*: a feed-forward block more than the 0 attentions"),
    ],
)
def test_operators_outside_the_dialect_are_named(change: Callable[[GraphBuilder, Node], Node], message: str) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        changed = change(b, x)
        columns = int(changed.meta["val"].shape[-1])
        return b.call(LINEAR, changed, b.parameter("head", 31, columns), None)

    with pytest.raises(UnsupportedGraphError, match=message) as caught:
        FlattenTokens()(captured(write))
    assert "\n" not in str(caught.value)


def test_logits_are_made_by_a_linear() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"rms_norm .*: it makes the logits"):
        FlattenTokens()(captured(lambda b, x: b.call(RMS_NORM, x, b.parameter("norm", HIDDEN), 1e-5)))
