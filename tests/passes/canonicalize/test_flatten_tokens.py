import pytest
import torch

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, refused
from picompile.testing import OPT, build
from picompile_passes.base import Stage, stage_of
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION, ELEMENTWISE, EMBEDDING, FFN, LAYER_NORM, LINEAR, RMS_NORM
from picompile_passes.passes.canonicalize.flatten_tokens import FlattenTokens
from picompile_passes.verify import verify

HEADS, SIZE = 3, HIDDEN // 3


def test_views_and_batch_dimensions_go() -> None:
    def write(b: Builder, x: Value) -> Value:
        x = b.call(RMS_NORM, x.unsqueeze(0), b.parameter("norm", HIDDEN), 1e-5)
        back = b.linear(x, "w").unflatten(-1, [HEADS, SIZE]).transpose(1, 2).permute([0, 2, 1, 3]).flatten(2)
        return b.linear(back, "head").squeeze(0)

    result = raised(write, FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"rms_norm": 1, "linear": 2}


def test_parts_of_a_fused_linear_become_linears() -> None:
    def write(b: Builder, x: Value) -> Value:
        fused = b.linear(x, "qkv", 3 * HIDDEN, bias=True)
        # Falcon's order: q, k and v of each head side by side.
        heads = fused.unflatten(-1, [HEADS, 3, SIZE])
        q, k, v = (heads.select(2, i).flatten(1) for i in range(3))
        return b.linear(b.call(ATTENTION, q, k, v, HEADS, HEADS, 0.3, 0, 0, layer=0), "head")

    result = raised(write, FlattenTokens())
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
    def write(b: Builder, x: Value) -> Value:
        fused = b.linear(x, "fused", 2 * HIDDEN)
        norms = [b.parameter(f"norm{i}", HIDDEN) for i in range(2)]
        halves = [b.call(RMS_NORM, fused.slice(-1, 0, HIDDEN), norm, 1e-5) for norm in norms]
        return b.linear(b.call(aten.add.Tensor, *halves), "head")

    result = raised(write, FlattenTokens())
    assert operators(result) == {"index_select": 1, "linear": 2, "rms_norm": 2, "add": 1}


@pytest.mark.parametrize(
    ("operator", "weights"), [(RMS_NORM, ["norm"]), (LAYER_NORM, ["norm", "bias"]), (LAYER_NORM, [])]
)
def test_columns_of_a_norm_that_stay_in_their_groups(operator: object, weights: list[str]) -> None:
    """Partial rotary embeddings behind a norm of each head take its columns in another order."""

    def write(b: Builder, x: Value) -> Value:
        vectors = [b.parameter(name, HIDDEN) for name in weights] or [None, None]
        heads = b.call(operator, b.linear(x, "w"), *vectors, 1e-5, HEADS).unflatten(-1, [HEADS, SIZE])
        parts = heads.index_select(-1, b.constant("order", torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])))
        return b.linear(parts.flatten(-2), "head")

    result = raised(write, FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert (operators(result)["linear"], arguments(only(result, operator))["groups"]) == (2, HEADS)


def test_some_heads_of_a_norm() -> None:
    def write(b: Builder, x: Value) -> Value:
        normed = b.call(RMS_NORM, b.linear(x, "w"), b.parameter("norm", HIDDEN), 1e-5, HEADS)
        return b.call(LINEAR, normed.slice(-1, SIZE, 3 * SIZE), b.parameter("h", 9, 2 * SIZE), None)

    assert arguments(only(raised(write, FlattenTokens()), RMS_NORM))["groups"] == 2


def test_columns_of_arithmetic_are_arithmetic_on_columns() -> None:
    """Fused projections that are clamped, or scaled by a vector, before they are taken apart."""

    def write(b: Builder, x: Value) -> Value:
        fused = b.linear(x, "qkv", 3 * HIDDEN)
        gate = b.call(LINEAR, x, b.parameter("gate", 1, HIDDEN), None)
        inputs = [fused, gate, b.parameter("scale", 3 * HIDDEN), b.constant("number", torch.tensor([0.5]))]
        text = "t0 = mul(x0, x1); t1 = mul(t0, x2); t2 = add(t1, x3); minimum(t2, 0.7)"
        clamped = b.call(ELEMENTWISE, inputs, text)
        q, k, v = (clamped.slice(-1, i * HIDDEN, (i + 1) * HIDDEN) for i in range(3))
        return b.linear(b.call(ATTENTION, q, k, v, HEADS, HEADS, 0.3, 0, 0, layer=0), "head")

    result = raised(write, FlattenTokens())
    verify(result, Stage.CANONICAL)
    assert operators(result) == {"linear": 5, "index_select": 6, "elementwise": 3, "attention": 1}


def test_ids_of_embeddings() -> None:
    """Positions may be made inside: they are the input all the same."""

    def write(b: Builder, x: Value) -> Value:
        shifted = b.positions.unsqueeze(0) + 2
        again = b.call(EMBEDDING, b.tokens.unsqueeze(0), b.parameter("again", 31, HIDDEN), 0)
        both = b.call(EMBEDDING, shifted, b.parameter("shifted", 13, HIDDEN), 1) + again
        x = x + b.call(EMBEDDING, b.tokens.sym_size(0).arange(), b.parameter("counted", 13, HIDDEN), 0)
        return b.linear(x.unsqueeze(0) + both, "head").squeeze(0)

    result = raised(write, FlattenTokens())
    found = {n.args[1].target: n.args for n in result.graph.find_nodes(op="call_function", target=EMBEDDING)}
    read = {name: (ids.target, offset) for name, (ids, _, offset) in found.items() if name != "embed.weight"}
    assert read == {"shifted": ("positions", 3), "again": ("tokens", 0), "counted": ("positions", 0)}


def test_a_canonical_graph_stays() -> None:
    result = FlattenTokens()(build(OPT))
    assert not result.modified
    assert stage_of(result.graph_module) == Stage.CANONICAL


def _normed_heads(b: Builder, x: Value) -> Value:
    heads = b.linear(x, "w").unflatten(-1, [HEADS, SIZE])
    return b.call(RMS_NORM, heads, b.parameter("norm", SIZE), 1e-5).flatten(1)


def _joined_weight(b: Builder, x: Value) -> Value:
    weight = b.aten("cat", [b.parameter(name, HIDDEN, HIDDEN) for name in ("gate", "up")])
    return b.call(LINEAR, x, weight, None)


def _multiplied_weight(b: Builder, x: Value) -> Value:
    weight = b.call(aten.mm.default, *(b.parameter(name, HIDDEN, HIDDEN) for name in ("a", "b")))
    return b.call(LINEAR, x, weight, None)


def _attending_to_heads(b: Builder, x: Value) -> Value:
    sides = [b.linear(x, name).unsqueeze(1) for name in "qkv"]
    return b.call(ATTENTION, *sides, HEADS, HEADS, 0.3, 0, 0, layer=0).squeeze(1)


def _block_without_attention(b: Builder, x: Value) -> Value:
    weights = [b.parameter(name, 40, HIDDEN) for name in ("up", "down")]
    return b.call(FFN, x, None, *weights, None, None, None, "relu", "identity")


def _headed(change: Write) -> Write:
    return lambda b, x: b.linear(change(b, x), "head", 31)


@pytest.mark.parametrize(
    "change", [_joined_weight, lambda b, x: b.call(RMS_NORM, x, b.parameter("norm", HIDDEN) + 1.0, 1e-5)]
)
def test_weights_may_be_computed(change: Write) -> None:
    verify(raised(_headed(change), FlattenTokens()), Stage.CANONICAL)


def _norm(b: Builder, x: Value, *shape: int) -> Value:
    return b.call(RMS_NORM, x, b.parameter("norm", *shape), 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b, x: (x * 12.0).unsqueeze(0),
            r"mul \(aten\.mul\.Tensor\): linear.* takes it, but it is not just columns",
        ),
        (
            lambda b, x: _norm(b, x, HIDDEN).slice(-1, 0, SIZE),
            "it takes some of the columns of rms_norm, which is no linear",
        ),
        (
            lambda b, x: b.call(ELEMENTWISE, [b.linear(x, "w", 1)], "relu(x0)").expand([-1, HIDDEN]),
            "it takes some of the columns of elementwise, which is no linear",
        ),
        (lambda b, x: x.flip([0]), "linear.* takes it, but it is not just columns"),
        (_normed_heads, "it works on each head"),
        (lambda b, x: x + b.parameter("shift", HIDDEN), "it adds values of different shapes"),
        (lambda b, x: x + 1.0, "it takes a number"),
        (lambda b, x: x + b.linear(x, "w", 1), "it adds values of different shapes"),
        (_multiplied_weight, r"mm \(aten\.mm\.default\): the weight of linear is not computed from parameters alone"),
        (
            lambda b, x: b.call(RMS_NORM, x, b.parameter("norm", 3, HIDDEN).sum([0]), 1e-5),
            r"sum_1 \(aten\.sum\.dim_IntList\): the weight of rms_norm is not computed",
        ),
        (
            lambda b, x: b.call(RMS_NORM, x, b.parameter("norm", HIDDEN) * b.positions.select(0, 0), 1e-5),
            r"positions \(positions\): the weight of rms_norm is not computed",
        ),
        (lambda b, x: _norm(b, x, 1, HIDDEN), r"rms_norm .*: its weight is float32\[1, 24\]"),
        (
            lambda b, x: x + b.call(EMBEDDING, b.tokens, b.constant("table", torch.zeros(31, HIDDEN).double()), 0),
            "it is torch.float64, not float32",
        ),
        (_attending_to_heads, "it attends to other dimensions than the tokens"),
        (_block_without_attention, r"ffn .*: a feed-forward block before the first attention"),
    ],
)
def test_operators_outside_the_dialect_are_named(change: Write, message: str) -> None:
    refused(_headed(change), FlattenTokens(), message)


def test_what_nothing_needs_is_not_looked_at() -> None:
    def write(b: Builder, x: Value) -> Value:
        _block_without_attention(b, x)
        return b.linear(x, "head")

    assert operators(raised(write, FlattenTokens()))["linear"] == 1


def test_logits_are_made_by_alinear() -> None:
    refused(lambda b, x: _norm(b, x, HIDDEN), FlattenTokens(), r"rms_norm .*: it makes the logits")
