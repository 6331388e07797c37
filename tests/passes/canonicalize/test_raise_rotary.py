from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from helpers.raising import HIDDEN, Write, aten, captured, linear, only, operators, raised
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION, EMBEDDING, INDEX_SELECT, LINEAR, RMS_NORM, ROTARY
from picompile_passes.passes.canonicalize.raise_rotary import RaiseRotary

HEADS, SIZE = 3, HIDDEN // 3
FREQUENCIES = 0.3 ** torch.arange(SIZE // 2)

Turn = Callable[[GraphBuilder, Node, Node, Node], Node]


def _cos_sin(b: GraphBuilder, repeat: bool, factor: float = 1.0, positions: Node | None = None) -> tuple[Node, Node]:
    """[T, 1, d/2] each, or [T, 1, d] with both halves alike."""
    column = b.call(aten.unsqueeze.default, positions or b.positions, -1)
    angles = b.call(aten.mul.Tensor, column, b.constant("frequencies", FREQUENCIES))
    if repeat:
        angles = b.call(aten.cat.default, [angles, angles], -1)
    tables = (b.call(op, b.call(aten.unsqueeze.default, angles, 1)) for op in (aten.cos.default, aten.sin.default))
    cos, sin = (b.call(aten.mul.Tensor, table, factor) for table in tables)
    return cos, sin


def _halves(b: GraphBuilder, x: Node, cos: Node, sin: Node) -> Node:
    """transformers' rotate_half: x · cos + cat(−x₂, x₁) · sin."""
    first, second = (b.call(aten.slice.Tensor, x, -1, *half) for half in ((0, SIZE // 2), (SIZE // 2, SIZE)))
    turned = b.call(aten.cat.default, [b.call(aten.neg.default, second), first], -1)
    products = b.call(aten.mul.Tensor, x, cos), b.call(aten.mul.Tensor, turned, sin)
    return b.call(aten.add.Tensor, *products)


def _neighbours(b: GraphBuilder, x: Node, cos: Node, sin: Node) -> Node:
    """GPT-J's order: elements 2i and 2i + 1 turn together."""
    even, odd = (b.call(aten.slice.Tensor, x, -1, start, 2**63 - 1, 2) for start in (0, 1))
    first = b.call(aten.sub.Tensor, b.call(aten.mul.Tensor, even, cos), b.call(aten.mul.Tensor, odd, sin))
    second = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, odd, cos), b.call(aten.mul.Tensor, even, sin))
    return b.call(aten.flatten.using_ints, b.call(aten.stack.default, [first, second], -1), -2)


def _attend(b: GraphBuilder, x: Node, change: Callable[[Node, str], Node]) -> Node:
    """Attention of projections [T, HEADS, SIZE], of which `change` makes what is attended."""
    sides = []
    for name in "qkv":
        projected = linear(b, x, name)
        split = b.call(aten.unflatten.int, projected, -1, [HEADS, SIZE])
        sides.append(b.call(aten.flatten.using_ints, change(split, name) if name in "qk" else split, -2))
    return b.call(ATTENTION, *sides, HEADS, HEADS, 0.5, 0, 0, layer=0)


def _turned(turn: Turn, repeat: bool, factor: float = 1.0) -> GraphModule:
    def write(b: GraphBuilder, x: Node) -> Node:
        cos, sin = _cos_sin(b, repeat, factor)
        return _attend(b, x, lambda part, _: turn(b, part, cos, sin))

    return captured(write)


def _rotaries(graph_module: GraphModule) -> list[dict]:
    return [arguments(node) for node in graph_module.graph.find_nodes(op="call_function", target=ROTARY)]


def _frequencies_of(graph_module: GraphModule, rotary: dict) -> Tensor:
    return graph_module.get_buffer(rotary["inverse_frequency"].target)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_a_rotation_of_halves_becomes_rotary(factor: float) -> None:
    result = raised(_turned(_halves, True, factor), RaiseRotary())
    assert operators(result) == {"linear": 3, "rotary": 2, "attention": 1, "unflatten": 1, "flatten": 1}
    q, k = _rotaries(result)
    assert (q["heads"], q["scaling"]) == (HEADS, pytest.approx(factor))
    assert q["inverse_frequency"] is k["inverse_frequency"]
    assert torch.equal(_frequencies_of(result, q), FREQUENCIES)
    assert q["positions"].target == "positions"


def test_a_rotation_of_neighbouring_pairs_is_reordered() -> None:
    result = raised(_turned(_neighbours, False), RaiseRotary())
    q, _ = _rotaries(result)
    assert torch.equal(_frequencies_of(result, q), FREQUENCIES)
    assert q["x"].target is INDEX_SELECT
    columns = result.get_buffer(q["x"].args[2].target)
    assert columns[:SIZE].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_part_of_each_head_turns() -> None:
    """As Phi and GPT-NeoX have it: the rest stays, and counts as turning by 0."""
    turning = 4

    def partly(b: GraphBuilder, x: Node, cos: Node, sin: Node) -> Node:
        part, rest = (b.call(aten.slice.Tensor, x, -1, *ends) for ends in ((0, turning), (turning, SIZE)))
        first, second = (b.call(aten.slice.Tensor, part, -1, *ends) for ends in ((0, 2), (2, 4)))
        turned = b.call(aten.cat.default, [b.call(aten.neg.default, second), first], -1)
        sums = b.call(aten.mul.Tensor, part, cos), b.call(aten.mul.Tensor, turned, sin)
        return b.call(aten.cat.default, [b.call(aten.add.Tensor, *sums), rest], -1)

    def write(b: GraphBuilder, x: Node) -> Node:
        cos, sin = (b.call(aten.slice.Tensor, table, -1, 2, 4) for table in _cos_sin(b, False))
        cos, sin = (b.call(aten.cat.default, [table, table], -1) for table in (cos, sin))
        return _attend(b, x, lambda part, _: partly(b, part, cos, sin))

    result = raised(captured(write), RaiseRotary())
    assert _frequencies_of(result, _rotaries(result)[0]).tolist() == [*FREQUENCIES[2:].tolist(), 0.0, 0.0]


def _by_tables(rows: int, look_up: Write) -> GraphModule:
    """Attention whose cosines and sines are rows of tables."""

    def write(b: GraphBuilder, x: Node) -> Node:
        angles = torch.outer(torch.arange(float(rows)), FREQUENCIES)
        tables = [b.constant("cos_table", angles.cos()), b.constant("sin_table", angles.sin())]
        cos, sin = (b.call(aten.unsqueeze.default, look_up(b, table), 1) for table in tables)
        return _attend(b, x, lambda part, _: _neighbours(b, part, cos, sin))

    return captured(write)


def _indexed(b: GraphBuilder, table: Node) -> Node:
    return b.call(aten.index.Tensor, table, [b.positions])


@pytest.mark.parametrize("look_up", [_indexed, lambda b, table: b.call(EMBEDDING, b.positions, table, 0)])
def test_tables_of_cosines_are_fitted(look_up: Write) -> None:
    result = raised(_by_tables(300, look_up), RaiseRotary())
    torch.testing.assert_close(_frequencies_of(result, _rotaries(result)[0]), FREQUENCIES, rtol=3e-7, atol=0)


def test_short_tables_are_refused() -> None:
    text = r"index.* \(aten\.index\.Tensor\): it fails for 256 tokens, .* size 9"
    with pytest.raises(UnsupportedGraphError, match=text):
        RaiseRotary()(_by_tables(9, _indexed))


def test_tokens_in_front_of_the_batch() -> None:
    """As Megatron and ChatGLM have it: projections are of [T, 1, HIDDEN], the attention of [1, T, HIDDEN]."""

    def write(b: GraphBuilder, x: Node) -> Node:
        cos, sin = _cos_sin(b, True)
        sides = []
        for name in "qkv":
            projected = b.call(LINEAR, b.call(aten.unsqueeze.default, x, 1), b.parameter(name, HIDDEN, HIDDEN), None)
            split = b.call(aten.squeeze.dim, b.call(aten.unflatten.int, projected, -1, [HEADS, SIZE]), 1)
            turned = split if name == "v" else _halves(b, split, cos, sin)
            sides.append(b.call(aten.unsqueeze.default, b.call(aten.flatten.using_ints, turned, -2), 0))
        return b.call(ATTENTION, *sides, HEADS, HEADS, 0.5, 0, 0, layer=0)

    result = raised(captured(write), RaiseRotary())
    assert operators(result)["rotary"] == 2
    assert [rotary["x"].meta["val"].shape[0] for rotary in _rotaries(result)] == [1, 1]


def test_a_constant_factor_goes_into_the_scale() -> None:
    """Plain attention stays."""

    def write(b: GraphBuilder, x: Node) -> Node:
        return _attend(b, x, lambda part, name: b.call(aten.mul.Tensor, part, 0.25) if name == "q" else part)

    result = raised(captured(write), RaiseRotary())
    values = arguments(only(result, ATTENTION))
    assert (values["scale"], values["q"].target) == (0.125, LINEAR)
    assert not _rotaries(result)
    assert not RaiseRotary()(captured(lambda b, x: _attend(b, x, lambda part, _: part))).modified


def _queries_and_keys_differ(b: GraphBuilder, x: Node) -> Node:
    (cos, sin), (half_cos, half_sin) = _cos_sin(b, True), _cos_sin(b, False)

    def turn(part: Node, name: str) -> Node:
        return _halves(b, part, cos, sin) if name == "q" else _neighbours(b, part, half_cos, half_sin)

    return _attend(b, x, turn)


def _not_a_turn(b: GraphBuilder, x: Node) -> Node:
    cos, _ = _cos_sin(b, True)
    return _attend(b, x, lambda part, _: b.call(aten.mul.Tensor, part, cos))


def _uneven(b: GraphBuilder, x: Node) -> Node:
    cos, sin = _cos_sin(b, False, positions=b.call(aten.mul.Tensor, b.positions, b.positions))
    return _attend(b, x, lambda part, _: _neighbours(b, part, cos, sin))


def _normed_heads(b: GraphBuilder, x: Node) -> Node:
    cos, sin = _cos_sin(b, True)
    norm = aten.layer_norm.default
    return _attend(b, x, lambda part, _: _halves(b, b.call(norm, part, [SIZE], None, None, 1e-5), cos, sin))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_queries_and_keys_differ, "its query and key turn in different ways"),
        (_not_a_turn, "does not turn evenly"),
        (_uneven, "does not turn evenly"),
        (_normed_heads, "between layer_norm.* and attention is no rotary embedding"),
    ],
)
def test_other_rotations_are_refused(write: Write, message: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=message):
        RaiseRotary()(captured(write))


@pytest.mark.parametrize(("heads", "factor"), [(1, 1.25), (HEADS, 1.0), (HEADS, 1.25)])
def test_heads_that_turn_before_their_norm(heads: int, factor: float) -> None:
    """As Hunyuan has it; with one head too, whose norm has one group like that of whole tokens."""

    def write(b: GraphBuilder, x: Node) -> Node:
        cos, sin = _cos_sin(b, True, factor)
        projected = b.call(LINEAR, x, b.parameter("q", heads * SIZE, HIDDEN), None)
        turned = _halves(b, b.call(aten.unflatten.int, projected, -1, [heads, SIZE]), cos, sin)
        weight = b.parameter("norm", heads * SIZE)
        return b.call(RMS_NORM, b.call(aten.flatten.using_ints, turned, -2), weight, 1e-5, heads)

    result = raised(captured(write), RaiseRotary())
    (rotary,) = _rotaries(result)
    assert (rotary["heads"], rotary["scaling"]) == (heads, pytest.approx(factor))
    assert arguments(only(result, RMS_NORM))["x"].target is ROTARY
    assert torch.equal(_frequencies_of(result, rotary), FREQUENCIES)


def test_norms_of_what_does_not_turn_stay() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        """Norms of whole tokens, scaled or not, and of heads."""
        for number, groups in enumerate((1, HEADS)):
            x = b.call(RMS_NORM, b.call(aten.mul.Tensor, x, 9.0), b.parameter(f"norm.{number}", HIDDEN), 1e-5, groups)
        return x

    result = RaiseRotary()(captured(write))
    assert not _rotaries(result.graph_module)


def test_neighbours_that_turn_before_their_norm_are_refused() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        turned = _neighbours(b, b.call(aten.unflatten.int, x, -1, [HEADS, SIZE]), *_cos_sin(b, False))
        return b.call(RMS_NORM, b.call(aten.flatten.using_ints, turned, -2), b.parameter("norm", HIDDEN), 1e-5, HEADS)

    with pytest.raises(UnsupportedGraphError, match=r"rms_norm .*: its heads turn in neighbouring pairs"):
        RaiseRotary()(captured(write))


def _latent(change: Write, filled: bool = False, bias: bool = True) -> GraphModule:
    """Attention whose keys have a half of each head's own, and a turned half that is the same for all heads.

    `change` makes what is turned out of a projection [T, SIZE / 2].
    """
    half = SIZE // 2

    def write(b: GraphBuilder, x: Node) -> Node:
        cos, sin = (b.call(aten.slice.Tensor, table, -1, 0, half // 2) for table in _cos_sin(b, False))
        q, v = (linear(b, x, name) for name in "qv")
        still, part = (
            b.call(aten.slice.Tensor, b.call(aten.unflatten.int, q, -1, [HEADS, SIZE]), -1, *ends)
            for ends in ((0, half), (half, SIZE))
        )
        q = b.call(aten.cat.default, [still, _neighbours(b, part, cos, sin)], -1)
        own = b.call(
            LINEAR, x, b.parameter("own", HEADS * half, HIDDEN), b.parameter("bias", HEADS * half) if bias else None
        )
        own = b.call(aten.unflatten.int, own, -1, [HEADS, half])
        shared = change(b, b.call(LINEAR, x, b.parameter("shared", half, HIDDEN), None))
        shared = _neighbours(b, b.call(aten.unsqueeze.default, shared, 1), cos, sin)
        shared = b.call(aten.expand.default, shared, [-1, HEADS, -1])
        if filled:
            k = b.call(aten.slice_scatter.default, b.call(aten.neg.default, q), own, -1, 0, half)
            k = b.call(aten.slice_scatter.default, k, shared, -1, half, SIZE)
        else:
            k = b.call(aten.cat.default, [own, shared], -1)
        sides = [*(b.call(aten.flatten.using_ints, side, -2) for side in (q, k)), v]
        return b.call(ATTENTION, *sides, HEADS, HEADS, 0.5, 0, 0, layer=0)

    return captured(write)


@pytest.mark.parametrize(("filled", "bias"), [(False, True), (True, False)])
def test_keys_made_of_two_projections_become_their_sum(filled: bool, bias: bool) -> None:
    result = raised(_latent(lambda b, x: x, filled, bias), RaiseRotary())
    q, k = _rotaries(result)
    assert q["inverse_frequency"] is k["inverse_frequency"]
    frequencies = _frequencies_of(result, k).tolist()
    assert frequencies == [*FREQUENCIES[: SIZE // 4].tolist(), *[0.0] * (SIZE // 4)]
    assert k["x"].target is aten.add.Tensor
    parts = k["x"].args
    assert [part.target for part in parts] == [LINEAR, LINEAR]
    assert all(part.meta["val"].shape[-1] == HIDDEN for part in parts)
    kept = [result.get_buffer(part.args[1].args[1].args[0].target) for part in parts]
    # Each element comes from one of them; a half is the same projection for all heads.
    assert torch.equal(kept[0] + kept[1], torch.ones(HIDDEN))
    assert [int(mask.sum()) for mask in kept] == [HIDDEN // 2, HIDDEN // 2]
    assert [part.args[2] is not None for part in parts] == [bias, False]


def _half_known(b: GraphBuilder, x: Node) -> Node:
    cos = b.call(aten.squeeze.dim, _cos_sin(b, False)[0], 1)
    return b.call(aten.cat.default, [b.call(aten.slice.Tensor, side, -1, 0, SIZE // 4) for side in (x, cos)], -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, x: b.call(aten.tanh.default, x), r"tanh.*: a part of a query or key must be a projection"),
        (_half_known, "is no rotary embedding"),
    ],
)
def test_parts_of_keys_that_are_no_projections_are_refused(change: Write, message: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=message):
        RaiseRotary()(_latent(change))


def test_keys_that_are_filled_with_known_values_stay() -> None:
    """They are of no projection at all; what scales them goes into the attention."""

    def write(b: GraphBuilder, x: Node) -> Node:
        q, v = (linear(b, x, name) for name in "qv")
        row = b.constant("row", torch.arange(HIDDEN) / HIDDEN)
        known = b.call(aten.mul.Tensor, b.call(aten.unsqueeze.default, b.positions, -1), row)
        k = b.call(aten.slice_scatter.default, b.call(aten.neg.default, q), known, -1, 0, HIDDEN)
        return b.call(ATTENTION, q, b.call(aten.mul.Tensor, k, 2.0), v, HEADS, HEADS, 0.5, 0, 0, layer=0)

    result = raised(captured(write), RaiseRotary())
    assert arguments(only(result, ATTENTION))["scale"] == pytest.approx(1.0)
