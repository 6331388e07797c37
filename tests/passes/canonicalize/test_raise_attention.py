from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from helpers.raising import HIDDEN, Write, aten, bounded, captured, linear, only, operators, raised
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments, attribute
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize.raise_attention import RaiseAttention

SDPA = aten.scaled_dot_product_attention.default
HEADS, SIZE = 6, HIDDEN // 6


def _heads(b: GraphBuilder, x: Node, name: str, count: int = HEADS) -> Node:
    """[1, count, T, SIZE] of a projection of x [T, HIDDEN]."""
    projected = b.call(aten.unsqueeze.default, linear(b, x, name, count * SIZE), 0)
    return b.call(aten.transpose.int, b.call(aten.unflatten.int, projected, -1, [count, SIZE]), 1, 2)


def _together(b: GraphBuilder, attended: Node) -> Node:
    return b.call(aten.flatten.using_ints, b.call(aten.transpose.int, attended, 1, 2), 2)


def _qkv(b: GraphBuilder, x: Node, kv_heads: int = HEADS) -> list[Node]:
    return [_heads(b, x, "q"), _heads(b, x, "k", kv_heads), _heads(b, x, "v", kv_heads)]


def _attended(write: Write) -> dict[str, Any]:
    """Return the arguments of the one attention that becomes of what is written."""
    return arguments(only(raised(captured(write), RaiseAttention()), ATTENTION))


def test_layers_are_numbered_and_a_given_scale_is_kept() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        for layer in range(3):
            parts = [_heads(b, x, f"{name}{layer}") for name in "qkv"]
            attended = b.call(SDPA, *parts, None, 0.0, True)
            attended.kwargs = {"scale": 0.1 * layer} if layer else {}
            x = b.call(aten.squeeze.dim, _together(b, attended), 0)
        return x

    result = raised(captured(write), RaiseAttention())
    nodes = result.graph.find_nodes(op="call_function", target=ATTENTION)
    found = [arguments(node) for node in nodes]
    assert [(values["heads"], values["kv_heads"], values["window"]) for values in found] == [(HEADS, HEADS, 0)] * 3
    assert [values["layer"] for values in found] == [node.meta["layer"] for node in nodes] == [0, 1, 2]
    assert [values["scale"] for values in found] == pytest.approx([SIZE**-0.5, 0.1, 0.2])
    assert nodes[0].meta["from"].pass_name == "raise-attention"
    assert SDPA._opname not in operators(result)


def _repeated_by_expand(b: GraphBuilder, x: Node, repeat: int) -> Node:
    """As transformers repeats heads."""
    with_axis = b.call(aten.unsqueeze.default, x, 2)
    expanded = b.call(aten.expand.default, with_axis, [-1, -1, repeat, -1, -1])
    return b.call(aten.flatten.using_ints, expanded, 1, 2)


def _repeated_by_index(b: GraphBuilder, x: Node, repeat: int) -> Node:
    table = torch.arange(x.meta["val"].shape[1]).repeat_interleave(repeat)
    return b.call(aten.index_select.default, x, 1, b.constant("heads", table))


@pytest.mark.parametrize(
    ("repeated", "kv_heads"), [(_repeated_by_expand, 1), (_repeated_by_expand, 3), (_repeated_by_index, 2)]
)
def test_repeated_heads_become_grouped_queries(repeated: Callable[..., Node], kv_heads: int) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        q, k, v = _qkv(b, x, kv_heads)
        k, v = (repeated(b, part, HEADS // kv_heads) for part in (k, v))
        return _together(b, b.call(SDPA, q, k, v, None, 0.0, True))

    values = _attended(write)
    assert (values["heads"], values["kv_heads"]) == (HEADS, kv_heads)


def _interleaved(b: GraphBuilder, x: Node) -> Node:
    q, k, v = _qkv(b, x, 2)
    table = b.constant("heads", torch.tensor([0, 1, 0, 1, 0, 1]))
    k, v = (b.call(aten.index_select.default, part, 1, table) for part in (k, v))
    return _together(b, b.call(SDPA, q, k, v, None, 0.0, True))


def _keys_alone(b: GraphBuilder, x: Node) -> Node:
    q, k = _heads(b, x, "q"), _repeated_by_expand(b, _heads(b, x, "k", 2), 3)
    return _together(b, b.call(SDPA, q, k, _heads(b, x, "v"), None, 0.0, True))


@pytest.mark.parametrize("write", [_interleaved, _keys_alone])
def test_heads_repeated_in_another_order_or_in_k_alone_stay(write: Write) -> None:
    assert _attended(write)["kv_heads"] == HEADS


def test_grouped_queries_of_torch() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        q, k, v = _qkv(b, x, 2)
        attended = b.call(SDPA, q, *(_repeated_by_expand(b, part, 3) for part in (k, v)), None, 0.0, True)
        # The fake value is the same; only the repetition is left to the operator.
        attended.args, attended.kwargs = (q, k, v, None, 0.0, True), {"enable_gqa": True}
        return _together(b, attended)

    values = _attended(write)
    assert (values["heads"], values["kv_heads"]) == (HEADS, 2)


def _visible(b: GraphBuilder, window: int | None) -> Node:
    """A bool mask [T, T] made of positions."""
    rows, columns = (b.call(aten.unsqueeze.default, b.positions, dim) for dim in (1, 0))
    distance = b.call(aten.sub.Tensor, rows, columns)
    causal = b.call(aten.ge.Scalar, distance, 0)
    return (
        causal if window is None else b.call(aten.logical_and.default, causal, b.call(aten.lt.Scalar, distance, window))
    )


def _additive(b: GraphBuilder, window: int | None, hidden: float) -> Node:
    mask = b.call(aten.logical_not.default, _visible(b, window))
    return b.call(aten.mul.Tensor, mask, hidden)


@pytest.mark.parametrize(
    ("window", "hidden"), [(None, None), (600, None), (1, -3.4e38), (5, -3.4e38), (None, -1e9), (600, -1e9)]
)
def test_masks_of_positions(window: int | None, hidden: float | None) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        bounded(b, 700)
        mask = _visible(b, window) if hidden is None else _additive(b, window, hidden)
        return _together(b, b.call(SDPA, *_qkv(b, x), mask))

    assert _attended(write)["window"] == (window or 0)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0625, 1 / 3, 0.01])


def _distances(b: GraphBuilder) -> Node:
    """Position of the key less that of the query, float32 [T, T]."""
    rows, columns = (b.call(aten.unsqueeze.default, b.positions, dim) for dim in (1, 0))
    return b.call(aten._to_copy.default, b.call(aten.sub.Tensor, columns, rows), dtype=torch.float32)


def _rising(b: GraphBuilder, slopes: torch.Tensor) -> Node:
    """Positions of the keys times slopes, [H, 1, T]."""
    column = b.constant("alibi", slopes.reshape(-1, 1, 1))
    return b.call(aten.mul.Tensor, column, b.call(aten._to_copy.default, b.positions, dtype=torch.float32))


def _plus_mask(b: GraphBuilder, bias: Node, window: int | None = None, hidden: float = -1e9) -> Node:
    return b.call(aten.add.Tensor, bias, _additive(b, window, hidden))


def _by_keys(b: GraphBuilder, window: int | None) -> Node:
    """As BLOOM has it: one row for each head, in front of a causal mask."""
    return _plus_mask(b, _rising(b, SLOPES), window, -3.4e38)


def _by_keys_behind(b: GraphBuilder, window: int | None) -> Node:
    """In four dimensions, with something that all keys have in common."""
    rising = b.call(aten.unsqueeze.default, b.call(aten.add.Tensor, _rising(b, SLOPES), 3.0), 0)
    return b.call(aten.add.Tensor, _additive(b, window, -1e9), rising)


def _by_distances(b: GraphBuilder, window: int | None) -> Node:
    column = b.constant("alibi", SLOPES.reshape(1, -1, 1, 1))
    return _plus_mask(b, b.call(aten.mul.Tensor, column, _distances(b)), window, -3.4e38)


def _filled(b: GraphBuilder, window: int | None) -> Node:
    hidden = b.call(aten.logical_not.default, _visible(b, window))
    return b.call(aten.masked_fill.Scalar, _rising(b, SLOPES), hidden, -torch.inf)


def _one_for_all(b: GraphBuilder, window: int | None) -> Node:
    return _plus_mask(b, b.call(aten.mul.Tensor, _distances(b), 0.2), window)


def _common(b: GraphBuilder, window: int | None) -> Node:
    """A bias that all keys have in common is no slope."""
    return _plus_mask(b, b.constant("common", torch.arange(6.0).reshape(6, 1, 1)), window)


@pytest.mark.parametrize(
    ("biased", "window", "expected"),
    [
        *[(_by_keys, None, SLOPES), (_by_keys_behind, 5, SLOPES), (_by_distances, None, SLOPES)],
        *[(_by_distances, 5, SLOPES), (_filled, 5, SLOPES), (_filled, None, SLOPES)],
        *[(_one_for_all, None, torch.full((HEADS,), 0.2)), (_common, 5, None)],
    ],
)
def test_biases_that_rise_with_positions_become_slopes(
    biased: Callable[[GraphBuilder, int | None], Node], window: int | None, expected: torch.Tensor | None
) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        bounded(b, 60)
        return _together(b, b.call(SDPA, *_qkv(b, x), biased(b, window)))

    result = raised(captured(write), RaiseAttention())
    values = arguments(only(result, ATTENTION))
    assert (values["window"], values["softcap"], values["sinks"]) == (window or 0, 0.0, None)
    assert (values["slopes"] is None) == (expected is None)
    if expected is not None:
        slopes = attribute(result, str(values["slopes"].target))
        assert slopes.dtype == torch.float32
        assert torch.allclose(slopes, expected, rtol=2e-6, atol=1e-7)


def test_slopes_of_many_tokens() -> None:
    """4097 tokens in rows of keys, which are never a square for each head."""

    def write(b: GraphBuilder, x: Node) -> Node:
        for layer in range(2):
            parts = [_heads(b, x, f"{name}{layer}") for name in "qkv"]
            x = b.call(aten.squeeze.dim, _together(b, b.call(SDPA, *parts, _by_keys(b, 600 if layer else None))), 0)
        return x

    result = raised(captured(write), RaiseAttention())
    found = [arguments(node) for node in result.graph.find_nodes(op="call_function", target=ATTENTION)]
    assert [values["window"] for values in found] == [0, 600]
    assert found[0]["slopes"] is found[1]["slopes"], "equal slopes are one constant"
    assert torch.allclose(attribute(result, str(found[0]["slopes"].target)), SLOPES, rtol=2e-6)


def test_a_table_shorter_than_the_graph_takes_tokens_is_refused() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        shown = b.constant("shown", torch.ones(9, 9, dtype=torch.bool).tril())
        rows = b.call(aten.index.Tensor, shown, [b.positions])
        mask = b.call(aten.index_select.default, rows, 1, b.positions)
        return _together(b, b.call(SDPA, *_qkv(b, x), mask))

    with pytest.raises(
        UnsupportedGraphError, match=r"index \(aten\.index\.Tensor\): it fails for \d+ tokens, .* size 9"
    ):
        RaiseAttention()(captured(write))


def test_a_mask_of_more_dimensions_than_the_heads_is_refused() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        heads = [b.call(aten.squeeze.dim, part, 0) for part in _qkv(b, x)]
        mask = b.call(aten.unsqueeze.default, b.call(aten.unsqueeze.default, _visible(b, None), 0), 0)
        return _together(b, b.call(SDPA, *heads, mask))

    with pytest.raises(UnsupportedGraphError, match="its q, k and v are not of its dimensions"):
        RaiseAttention()(captured(write))


def _queries_differ(b: GraphBuilder, x: Node) -> Node:
    """The slope grows with the position of the query."""
    row = b.call(aten._to_copy.default, b.call(aten.unsqueeze.default, b.positions, 1), dtype=torch.float32)
    return _plus_mask(b, b.call(aten.mul.Tensor, _distances(b), row), None, -3.4e38)


def _windows_differ(b: GraphBuilder, x: Node) -> Node:
    masks = [_additive(b, window, -torch.finfo(torch.float32).max) for window in (3, 3, 3, 4, 4, 4)]
    return b.call(aten.stack.default, masks)


def _even_only(b: GraphBuilder, x: Node) -> Node:
    even = b.call(aten.eq.Scalar, b.call(aten.remainder.Scalar, b.positions, 2), 0)
    return b.call(aten.logical_and.default, _visible(b, None), b.call(aten.unsqueeze.default, even, 0))


_REFUSED: dict[str, Callable[[GraphBuilder, Node], Node | None]] = {
    "no mask": lambda b, x: None,
    "hides too little": lambda b, x: _additive(b, None, -2.0),
    "hides nothing": lambda b, x: b.call(aten.ge.Scalar, _distances(b), -1e9),
    "by content": lambda b, x: b.call(aten.ge.Scalar, b.call(aten.mm.default, x, b.call(aten.t.default, x)), 0.0),
    "even positions only": _even_only,
    "rises with the square": lambda b, x: _plus_mask(b, b.call(aten.square.default, _rising(b, SLOPES))),
    "the same at every second distance": lambda b, x: _plus_mask(b, b.call(aten.remainder.Scalar, _distances(b), 2)),
    "queries differ": _queries_differ,
    "not causal": lambda b, x: _rising(b, SLOPES),
    "windows differ": _windows_differ,
    "not a number": lambda b, x: _plus_mask(b, b.call(aten.log.default, _distances(b))),
    # A truth that is added counts 1.
    "truths that are added": lambda b, x: _plus_mask(b, _visible(b, None), None, -0.5),
}


@pytest.mark.parametrize("mask", _REFUSED)
def test_other_masks_are_refused(mask: str) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        bounded(b, 60)
        return _together(b, b.call(SDPA, *_qkv(b, x), _REFUSED[mask](b, x)))

    with pytest.raises(UnsupportedGraphError, match="causal"):
        RaiseAttention()(captured(write))


def test_squares_for_too_many_heads_are_refused() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        q, k, v = (b.call(aten.expand.default, part, [-1, 18, -1, -1]) for part in (_heads(b, x, n, 1) for n in "qkv"))
        column = b.constant("alibi", torch.arange(18.0).reshape(-1, 1, 1))
        return _together(b, b.call(SDPA, q, k, v, _plus_mask(b, b.call(aten.mul.Tensor, column, _distances(b)))))

    with pytest.raises(UnsupportedGraphError, match="a mask of 18 heads is too large to compare for 4097 tokens: add"):
        RaiseAttention()(captured(write))
