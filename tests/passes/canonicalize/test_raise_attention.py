from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, refused
from picompile_passes.graph.nodes import arguments, attribute
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize.raise_attention import RaiseAttention

SDPA = aten.scaled_dot_product_attention.default
HEADS, SIZE = 6, HIDDEN // 6


def _heads(b: Builder, x: Value, name: str, count: int = HEADS) -> Value:
    """[1, count, T, SIZE] of a projection of x [T, HIDDEN]."""
    return b.linear(x, name, count * SIZE).unsqueeze(0).unflatten(-1, [count, SIZE]).transpose(1, 2)


def _together(b: Builder, attended: Value) -> Value:
    return attended.transpose(1, 2).flatten(2)


def _qkv(b: Builder, x: Value, kv_heads: int = HEADS) -> list[Value]:
    return [_heads(b, x, "q"), _heads(b, x, "k", kv_heads), _heads(b, x, "v", kv_heads)]


def _attended(write: Write) -> dict[str, Any]:
    """Return the arguments of the one attention that becomes of what is written."""
    return arguments(only(raised(write, RaiseAttention()), ATTENTION))


def test_layers_are_numbered_and_a_given_scale_is_kept() -> None:
    def write(b: Builder, x: Value) -> Value:
        for layer in range(3):
            parts = [_heads(b, x, f"{name}{layer}") for name in "qkv"]
            attended = b.call(SDPA, *parts, None, 0.0, True)
            attended.kwargs = {"scale": 0.1 * layer} if layer else {}
            x = _together(b, attended).squeeze(0)
        return x

    result = raised(write, RaiseAttention())
    nodes = result.graph.find_nodes(op="call_function", target=ATTENTION)
    found = [arguments(node) for node in nodes]
    assert [(values["heads"], values["kv_heads"], values["window"]) for values in found] == [(HEADS, HEADS, 0)] * 3
    assert [values["layer"] for values in found] == [0, 1, 2]
    assert [values["scale"] for values in found] == pytest.approx([SIZE**-0.5, 0.1, 0.2])
    assert nodes[0].meta["from"].pass_name == "raise-attention"
    assert SDPA._opname not in operators(result)


def _repeated_by_expand(b: Builder, x: Value, repeat: int) -> Value:
    """As transformers repeats heads."""
    return x.unsqueeze(2).expand([-1, -1, repeat, -1, -1]).flatten(1, 2)


def _repeated_by_index(b: Builder, x: Value, repeat: int) -> Value:
    return x.index_select(1, b.constant("heads", torch.arange(x.meta["val"].shape[1]).repeat_interleave(repeat)))


@pytest.mark.parametrize(
    ("repeated", "kv_heads"), [(_repeated_by_expand, 1), (_repeated_by_expand, 3), (_repeated_by_index, 2)]
)
def test_repeated_heads_become_grouped_queries(repeated: Callable[..., Value], kv_heads: int) -> None:
    def write(b: Builder, x: Value) -> Value:
        q, k, v = _qkv(b, x, kv_heads)
        k, v = (repeated(b, part, HEADS // kv_heads) for part in (k, v))
        return _together(b, b.call(SDPA, q, k, v, None, 0.0, True))

    values = _attended(write)
    assert (values["heads"], values["kv_heads"]) == (HEADS, kv_heads)


def _interleaved(b: Builder, x: Value) -> Value:
    q, k, v = _qkv(b, x, 2)
    table = b.constant("heads", torch.tensor([0, 1, 0, 1, 0, 1]))
    k, v = (part.index_select(1, table) for part in (k, v))
    return _together(b, b.call(SDPA, q, k, v, None, 0.0, True))


def _keys_alone(b: Builder, x: Value) -> Value:
    q, k = _heads(b, x, "q"), _repeated_by_expand(b, _heads(b, x, "k", 2), 3)
    return _together(b, b.call(SDPA, q, k, _heads(b, x, "v"), None, 0.0, True))


@pytest.mark.parametrize("write", [_interleaved, _keys_alone])
def test_heads_repeated_in_another_order_or_in_k_alone_stay(write: Write) -> None:
    assert _attended(write)["kv_heads"] == HEADS


def test_grouped_queries_of_torch() -> None:
    def write(b: Builder, x: Value) -> Value:
        q, k, v = _qkv(b, x, 2)
        attended = b.call(SDPA, q, *(_repeated_by_expand(b, part, 3) for part in (k, v)), None, 0.0, True)
        # The fake value is the same; only the repetition is left to the operator.
        attended.args, attended.kwargs = (q, k, v, None, 0.0, True), {"enable_gqa": True}
        return _together(b, attended)

    values = _attended(write)
    assert (values["heads"], values["kv_heads"]) == (HEADS, 2)


def _visible(b: Builder, window: int | None) -> Value:
    """A bool mask [T, T] made of positions."""
    rows, columns = (b.positions.unsqueeze(dim) for dim in (1, 0))
    distance = rows - columns
    causal = distance.ge(0)
    return causal if window is None else causal.logical_and(distance.lt(window))


def _additive(b: Builder, window: int | None, hidden: float) -> Value:
    return _visible(b, window).logical_not() * hidden


@pytest.mark.parametrize(
    ("window", "hidden"), [(None, None), (600, None), (1, -3.4e38), (5, -3.4e38), (None, -1e9), (600, -1e9)]
)
def test_masks_of_positions(window: int | None, hidden: float | None) -> None:
    def write(b: Builder, x: Value) -> Value:
        b.bounded(700)
        mask = _visible(b, window) if hidden is None else _additive(b, window, hidden)
        return _together(b, b.call(SDPA, *_qkv(b, x), mask))

    assert _attended(write)["window"] == (window or 0)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0625, 1 / 3, 0.01])


def _distances(b: Builder) -> Value:
    """Position of the key less that of the query, float32 [T, T]."""
    rows, columns = (b.positions.unsqueeze(dim) for dim in (1, 0))
    return (columns - rows)._to_copy(dtype=torch.float32)


def _rising(b: Builder, slopes: torch.Tensor) -> Value:
    """Positions of the keys times slopes, [H, 1, T]."""
    return b.constant("alibi", slopes.reshape(-1, 1, 1)) * b.positions._to_copy(dtype=torch.float32)


def _plus_mask(b: Builder, bias: Value, window: int | None = None, hidden: float = -1e9) -> Value:
    return bias + _additive(b, window, hidden)


def _by_keys(b: Builder, window: int | None) -> Value:
    """As BLOOM has it: one row for each head, in front of a causal mask."""
    return _plus_mask(b, _rising(b, SLOPES), window, -3.4e38)


def _by_distances(b: Builder, window: int | None) -> Value:
    return _plus_mask(b, b.constant("alibi", SLOPES.reshape(1, -1, 1, 1)) * _distances(b), window, -3.4e38)


def _filled(b: Builder, window: int | None) -> Value:
    return _rising(b, SLOPES).masked_fill(_visible(b, window).logical_not(), -torch.inf)


@pytest.mark.parametrize(
    ("biased", "window", "expected"),
    [
        # In four dimensions, with something that all keys have in common.
        (lambda b, window: _additive(b, window, -1e9) + (_rising(b, SLOPES) + 3.0).unsqueeze(0), 5, SLOPES),
        (lambda b, window: _plus_mask(b, _distances(b) * 0.2, window), None, torch.full((HEADS,), 0.2)),
        # A bias that all keys have in common is no slope.
        (lambda b, _: _plus_mask(b, b.constant("common", torch.arange(6.0).reshape(6, 1, 1)), 5), 5, None),
        *((biased, None, SLOPES) for biased in (_by_keys, _by_distances, _filled)),
        *((biased, 5, SLOPES) for biased in (_by_distances, _filled)),
    ],
)
def test_biases_that_rise_with_positions_become_slopes(
    biased: Callable[[Builder, int | None], Value], window: int | None, expected: torch.Tensor | None
) -> None:
    def write(b: Builder, x: Value) -> Value:
        b.bounded(60)
        return _together(b, b.call(SDPA, *_qkv(b, x), biased(b, window)))

    result = raised(write, RaiseAttention())
    values = arguments(only(result, ATTENTION))
    assert (values["window"], values["softcap"], values["sinks"]) == (window or 0, 0.0, None)
    assert (values["slopes"] is None) == (expected is None)
    if expected is not None:
        slopes = attribute(result, str(values["slopes"].target))
        assert slopes.dtype == torch.float32
        assert torch.allclose(slopes, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.slow("exports rows of 4,097 tokens; short ones are fast")
def test_slopes_of_many_tokens() -> None:
    """4097 tokens in rows of keys, which are never a square for each head."""

    def write(b: Builder, x: Value) -> Value:
        for layer in range(2):
            parts = [_heads(b, x, f"{name}{layer}") for name in "qkv"]
            x = _together(b, b.call(SDPA, *parts, _by_keys(b, 600 if layer else None))).squeeze(0)
        return x

    result = raised(write, RaiseAttention())
    found = [arguments(node) for node in result.graph.find_nodes(op="call_function", target=ATTENTION)]
    assert [values["window"] for values in found] == [0, 600]
    assert found[0]["slopes"] is found[1]["slopes"], "equal slopes are one constant"
    assert torch.allclose(attribute(result, str(found[0]["slopes"].target)), SLOPES, rtol=2e-6)


def _queries_differ(b: Builder, x: Value) -> Value:
    """The slope grows with the position of the query."""
    return _plus_mask(b, _distances(b) * b.positions.unsqueeze(1)._to_copy(dtype=torch.float32), None, -3.4e38)


def _windows_differ(b: Builder, x: Value) -> Value:
    return b.aten("stack", [_additive(b, window, -torch.finfo(torch.float32).max) for window in (3, 3, 3, 4, 4, 4)])


_REFUSED: dict[str, Callable[[Builder, Value], Value | None]] = {
    "no mask": lambda b, x: None,
    "hides too little": lambda b, x: _additive(b, None, -2.0),
    "hides nothing": lambda b, x: _distances(b).ge(-1e9),
    "by content": lambda b, x: x.mm(x.t()).ge(0.0),
    "even positions only": lambda b, x: _visible(b, None).logical_and(b.positions.remainder(2).eq(0).unsqueeze(0)),
    "rises with the square": lambda b, x: _plus_mask(b, _rising(b, SLOPES).square()),
    "the same at every second distance": lambda b, x: _plus_mask(b, _distances(b).remainder(2)),
    "queries differ": _queries_differ,
    "not causal": lambda b, x: _rising(b, SLOPES),
    "windows differ": _windows_differ,
    "not a number": lambda b, x: _plus_mask(b, _distances(b).log()),
    # A truth that is added counts 1.
    "truths that are added": lambda b, x: _plus_mask(b, _visible(b, None), None, -0.5),
}


@pytest.mark.parametrize("mask", _REFUSED)
def test_other_masks_are_refused(mask: str) -> None:
    def write(b: Builder, x: Value) -> Value:
        b.bounded(60)
        return _together(b, b.call(SDPA, *_qkv(b, x), _REFUSED[mask](b, x)))

    refused(write, RaiseAttention(), "causal")


def _short_table(b: Builder, x: Value) -> Value:
    rows = b.constant("shown", torch.ones(9, 9, dtype=torch.bool).tril()).index([b.positions])
    return b.call(SDPA, *_qkv(b, x), rows.index_select(1, b.positions))


def _more_dimensions_than_the_heads(b: Builder, x: Value) -> Value:
    heads = [part.squeeze(0) for part in _qkv(b, x)]
    return b.call(SDPA, *heads, _visible(b, None).unsqueeze(0).unsqueeze(0))


def _squares_for_many_heads(b: Builder, x: Value) -> Value:
    q, k, v = (_heads(b, x, name, 1).expand([-1, 18, -1, -1]) for name in "qkv")
    column = b.constant("alibi", torch.arange(18.0).reshape(-1, 1, 1))
    return b.call(SDPA, q, k, v, _plus_mask(b, column * _distances(b)))


@pytest.mark.parametrize(
    ("attended", "message"),
    [
        (_short_table, r"index \(aten\.index\.Tensor\): it fails for \d+ tokens, .* size 9"),
        (_more_dimensions_than_the_heads, "its q, k and v are not of its dimensions"),
        (_squares_for_many_heads, "a mask of 18 heads is too large to compare for 4097 tokens: add"),
    ],
)
def test_masks_that_are_not_compared_are_refused(attended: Write, message: str) -> None:
    refused(lambda b, x: _together(b, attended(b, x)), RaiseAttention(), message)
