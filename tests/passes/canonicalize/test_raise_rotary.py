from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, refused, stays
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import ATTENTION, EMBEDDING, INDEX_SELECT, LINEAR, RMS_NORM, ROTARY
from picompile_passes.passes.canonicalize.raise_rotary import RaiseRotary

HEADS, SIZE = 3, HIDDEN // 3
FREQUENCIES = 0.3 ** torch.arange(SIZE // 2)

Turn = Callable[[Builder, Value, Value, Value], Value]


def _cos_sin(
    b: Builder, repeat: bool, factor: float = 1.0, positions: Value | None = None, frequencies: Tensor = FREQUENCIES
) -> tuple[Value, Value]:
    """[T, 1, d/2] each, or [T, 1, d] with both halves alike."""
    angles = (positions or b.positions).unsqueeze(-1) * b.constant("frequencies", frequencies)
    if repeat:
        angles = b.aten("cat", [angles, angles], -1)
    tables = (b.call(op, angles.unsqueeze(1)) for op in (aten.cos.default, aten.sin.default))
    cos, sin = (table * factor for table in tables)
    return cos, sin


def _halves(b: Builder, x: Value, cos: Value, sin: Value) -> Value:
    """transformers' rotate_half: x · cos + cat(−x₂, x₁) · sin."""
    first, second = (x.slice(-1, *half) for half in ((0, SIZE // 2), (SIZE // 2, SIZE)))
    return b.call(aten.add.Tensor, *(x * cos, b.aten("cat", [-second, first], -1) * sin))


def _neighbours(b: Builder, x: Value, cos: Value, sin: Value) -> Value:
    """GPT-J's order: elements 2i and 2i + 1 turn together."""
    even, odd = (x.slice(-1, start, 2**63 - 1, 2) for start in (0, 1))
    return b.aten("stack", [even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def _attend(b: Builder, x: Value, change: Callable[[Value, str], Value]) -> Value:
    """Attention of projections [T, HEADS, SIZE], of which `change` makes what is attended."""
    sides = []
    for name in "qkv":
        projected = b.linear(x, name)
        split = projected.unflatten(-1, [HEADS, SIZE])
        sides.append((change(split, name) if name in "qk" else split).flatten(-2))
    return b.call(ATTENTION, *sides, HEADS, HEADS, 0.5, 0, 0, layer=0)


def _turned(turn: Turn, repeat: bool, factor: float = 1.0) -> Write:
    def write(b: Builder, x: Value) -> Value:
        cos, sin = _cos_sin(b, repeat, factor)
        return _attend(b, x, lambda part, _: turn(b, part, cos, sin))

    return write


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


@pytest.mark.parametrize(("factor", "still"), [(1.0, 1.0), (1.25, 1.0), (1.25, 0.5)])
def test_a_part_of_each_head_turns(factor: float, still: float) -> None:
    """As Phi and GPT-NeoX have it: the rest stays, and counts as turning by 0; LongRoPE scales only what turns."""
    turning = 4

    def partly(b: Builder, x: Value, cos: Value, sin: Value) -> Value:
        part, rest = (x.slice(-1, *ends) for ends in ((0, turning), (turning, SIZE)))
        first, second = (part.slice(-1, *ends) for ends in ((0, 2), (2, 4)))
        sums = part * cos, b.aten("cat", [-second, first], -1) * sin
        return b.aten("cat", [b.call(aten.add.Tensor, *sums), rest if still == 1 else rest * still], -1)

    def write(b: Builder, x: Value) -> Value:
        cos, sin = (table.slice(-1, 2, 4) for table in _cos_sin(b, False, factor))
        cos, sin = (b.aten("cat", [table, table], -1) for table in (cos, sin))
        return _attend(b, x, lambda part, _: partly(b, part, cos, sin))

    result = raised(write, RaiseRotary())
    for rotary in _rotaries(result):
        assert _frequencies_of(result, rotary).tolist() == [*FREQUENCIES[2:].tolist(), 0.0, 0.0]
        assert (rotary["scaling"], rotary["still_scaling"]) == (pytest.approx(factor), still)


def test_what_is_still_has_one_factor() -> None:
    """A head whose still elements are scaled by two numbers is no rotary embedding."""

    def write(b: Builder, x: Value) -> Value:
        cos, sin = _cos_sin(b, True, frequencies=FREQUENCIES * torch.tensor([1, 1, 0, 0]))
        scales = b.constant("scales", torch.tensor([1.0, 1, 1, 0.5] * 2))
        return _attend(b, x, lambda part, _: _halves(b, part, cos, sin) * scales)

    refused(write, RaiseRotary(), "does not turn evenly")


def _by_tables(rows: int, look_up: Write) -> Write:
    """Attention whose cosines and sines are rows of tables."""

    def write(b: Builder, x: Value) -> Value:
        angles = torch.outer(torch.arange(float(rows)), FREQUENCIES)
        tables = [b.constant("cos_table", angles.cos()), b.constant("sin_table", angles.sin())]
        cos, sin = (look_up(b, table).unsqueeze(1) for table in tables)
        return _attend(b, x, lambda part, _: _neighbours(b, part, cos, sin))

    return write


def _indexed(b: Builder, table: Value) -> Value:
    return table.index([b.positions])


@pytest.mark.parametrize("look_up", [_indexed, lambda b, table: b.call(EMBEDDING, b.positions, table, 0)])
def test_tables_of_cosines_are_fitted(look_up: Write) -> None:
    result = raised(_by_tables(300, look_up), RaiseRotary())
    torch.testing.assert_close(_frequencies_of(result, _rotaries(result)[0]), FREQUENCIES, rtol=3e-7, atol=0)


def test_tokens_in_front_of_the_batch() -> None:
    """As Megatron and ChatGLM have it: projections are of [T, 1, HIDDEN], the attention of [1, T, HIDDEN]."""

    def write(b: Builder, x: Value) -> Value:
        cos, sin = _cos_sin(b, True)
        sides = []
        for name in "qkv":
            projected = b.call(LINEAR, x.unsqueeze(1), b.parameter(name, HIDDEN, HIDDEN), None)
            split = projected.unflatten(-1, [HEADS, SIZE]).squeeze(1)
            turned = split if name == "v" else _halves(b, split, cos, sin)
            sides.append(turned.flatten(-2).unsqueeze(0))
        return b.call(ATTENTION, *sides, HEADS, HEADS, 0.5, 0, 0, layer=0)

    result = raised(write, RaiseRotary())
    assert operators(result)["rotary"] == 2
    assert [rotary["x"].meta["val"].shape[0] for rotary in _rotaries(result)] == [1, 1]


@pytest.mark.parametrize(
    "scaled",
    [lambda b, q: q * 0.25, lambda b, q: q / 4, lambda b, q: b.call(aten.mul.Scalar, q, 0.25)],
    ids=["mul", "div", "mul by a scalar"],
)
def test_a_constant_factor_goes_into_the_scale(scaled: Write) -> None:
    """Plain attention stays."""
    result = raised(
        lambda b, x: _attend(b, x, lambda part, name: scaled(b, part) if name == "q" else part), RaiseRotary()
    )
    values = arguments(only(result, ATTENTION))
    assert (values["scale"], values["q"].target) == (0.125, LINEAR)
    assert not _rotaries(result)
    assert stays(lambda b, x: _attend(b, x, lambda part, _: part), RaiseRotary())


@pytest.mark.parametrize(("heads", "factor"), [(1, 1.25), (HEADS, 1.0), (HEADS, 1.25)])
def test_heads_that_turn_before_their_norm(heads: int, factor: float) -> None:
    """As Hunyuan has it; with one head too, whose norm has one group like that of whole tokens."""

    def write(b: Builder, x: Value) -> Value:
        cos, sin = _cos_sin(b, True, factor)
        projected = b.call(LINEAR, x, b.parameter("q", heads * SIZE, HIDDEN), None)
        turned = _halves(b, projected.unflatten(-1, [heads, SIZE]), cos, sin)
        return b.call(RMS_NORM, turned.flatten(-2), b.parameter("norm", heads * SIZE), 1e-5, heads)

    result = raised(write, RaiseRotary())
    (rotary,) = _rotaries(result)
    assert (rotary["heads"], rotary["scaling"]) == (heads, pytest.approx(factor))
    assert arguments(only(result, RMS_NORM))["x"].target is ROTARY
    assert torch.equal(_frequencies_of(result, rotary), FREQUENCIES)


@pytest.mark.parametrize("signs", [(-1, -1, -1, -1), (1, -1, 1, -1)], ids=["all", "some"])
def test_pairs_that_turn_backwards_keep_their_order(signs: tuple[int, ...]) -> None:
    """A norm behind them has weights in that order."""
    frequencies = FREQUENCIES * torch.tensor(signs)

    def write(b: Builder, x: Value) -> Value:
        turned = _halves(b, x.unflatten(-1, [HEADS, SIZE]), *_cos_sin(b, True, frequencies=frequencies))
        return b.call(RMS_NORM, turned.flatten(-2), b.parameter("norm", HIDDEN), 1e-5, HEADS)

    result = raised(write, RaiseRotary())
    assert operators(result) == {"rotary": 1, "rms_norm": 1}
    assert torch.equal(_frequencies_of(result, _rotaries(result)[0]), frequencies)


def test_norms_of_what_does_not_turn_stay() -> None:
    def write(b: Builder, x: Value) -> Value:
        """Norms of whole tokens, and of heads, scaled by a number; of whole tokens scaled by their positions."""
        by_position = b.positions.unsqueeze(-1) + 1.0
        for number, (groups, factor) in enumerate(((1, 9.0), (HEADS, 9.0), (1, by_position))):
            x = b.call(RMS_NORM, x * factor, b.parameter(f"norm.{number}", HIDDEN), 1e-5, groups)
        return x

    assert not _rotaries(raised(write, RaiseRotary()))


def _latent(change: Write, filled: bool = False, bias: bool = True) -> Write:
    """Attention whose keys have a half of each head's own, and a turned half that is the same for all heads.

    `change` makes what is turned out of a projection [T, SIZE / 2].
    """
    half = SIZE // 2

    def write(b: Builder, x: Value) -> Value:
        cos, sin = (table.slice(-1, 0, half // 2) for table in _cos_sin(b, False))
        q, v = (b.linear(x, name) for name in "qv")
        still, part = (q.unflatten(-1, [HEADS, SIZE]).slice(-1, *ends) for ends in ((0, half), (half, SIZE)))
        q = b.aten("cat", [still, _neighbours(b, part, cos, sin)], -1)
        own = b.call(
            LINEAR, x, b.parameter("own", HEADS * half, HIDDEN), b.parameter("bias", HEADS * half) if bias else None
        )
        own = own.unflatten(-1, [HEADS, half])
        shared = change(b, b.call(LINEAR, x, b.parameter("shared", half, HIDDEN), None))
        shared = _neighbours(b, shared.unsqueeze(1), cos, sin)
        shared = shared.expand([-1, HEADS, -1])
        if filled:
            k = (-q).slice_scatter(own, -1, 0, half)
            k = k.slice_scatter(shared, -1, half, SIZE)
        else:
            k = b.aten("cat", [own, shared], -1)
        return b.call(ATTENTION, *[*(side.flatten(-2) for side in (q, k)), v], HEADS, HEADS, 0.5, 0, 0, layer=0)

    return write


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


def test_keys_that_are_filled_with_known_values_stay() -> None:
    """They are of no projection at all; what scales them goes into the attention."""

    def write(b: Builder, x: Value) -> Value:
        q, v = (b.linear(x, name) for name in "qv")
        known = b.positions.unsqueeze(-1) * b.constant("row", torch.arange(HIDDEN) / HIDDEN)
        k = (-q).slice_scatter(known, -1, 0, HIDDEN)
        return b.call(ATTENTION, q, k * 2.0, v, HEADS, HEADS, 0.5, 0, 0, layer=0)

    result = raised(write, RaiseRotary())
    assert arguments(only(result, ATTENTION))["scale"] == pytest.approx(1.0)


def _queries_and_keys_differ(b: Builder, x: Value) -> Value:
    (cos, sin), (half_cos, half_sin) = _cos_sin(b, True), _cos_sin(b, False)

    def turn(part: Value, name: str) -> Value:
        return _halves(b, part, cos, sin) if name == "q" else _neighbours(b, part, half_cos, half_sin)

    return _attend(b, x, turn)


def _not_a_turn(b: Builder, x: Value) -> Value:
    cos, _ = _cos_sin(b, True)
    return _attend(b, x, lambda part, _: part * cos)


def _uneven(b: Builder, x: Value) -> Value:
    cos, sin = _cos_sin(b, False, positions=b.positions * b.positions)
    return _attend(b, x, lambda part, _: _neighbours(b, part, cos, sin))


def _normed_heads(b: Builder, x: Value) -> Value:
    cos, sin = _cos_sin(b, True)
    norm = aten.layer_norm.default
    return _attend(b, x, lambda part, _: _halves(b, b.call(norm, part, [SIZE], None, None, 1e-5), cos, sin))


def _neighbours_before_a_norm(b: Builder, x: Value) -> Value:
    turned = _neighbours(b, x.unflatten(-1, [HEADS, SIZE]), *_cos_sin(b, False))
    return b.call(RMS_NORM, turned.flatten(-2), b.parameter("norm", HIDDEN), 1e-5, HEADS)


def _half_known(b: Builder, x: Value) -> Value:
    cos = _cos_sin(b, False)[0].squeeze(1)
    return b.aten("cat", [side.slice(-1, 0, SIZE // 4) for side in (x, cos)], -1)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_queries_and_keys_differ, "its query and key turn in different ways"),
        (_not_a_turn, "does not turn evenly"),
        (_uneven, "does not turn evenly"),
        (_normed_heads, "between layer_norm.* and attention is no rotary embedding"),
        (_neighbours_before_a_norm, r"rms_norm .*: its heads turn in neighbouring pairs"),
        (_latent(lambda b, x: x.tanh()), r"tanh.*: a part of a query or key must be a projection"),
        (_latent(_half_known), "is no rotary embedding"),
        (_by_tables(9, _indexed), r"index.* \(aten\.index\.Tensor\): it fails for 256 tokens, .* size 9"),
    ],
)
def test_other_rotations_are_refused(write: Write, message: str) -> None:
    refused(write, RaiseRotary(), message)
