"""Norms of heads that move in front of rotary embeddings, and those that stay."""

import pytest
import torch
from test_raise_rotary import HEADS, SIZE, _attend, _cos_sin, _halves, _neighbours

from helpers.raising import HIDDEN, Builder, Value, Write, operators, raised, stays
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import INDEX_SELECT, LINEAR, RMS_NORM, ROTARY
from picompile_passes.passes.canonicalize.norm_before_turn import NormBeforeTurn
from picompile_passes.passes.canonicalize.raise_rotary import RaiseRotary

_ONES = torch.ones(HIDDEN)


def _normed(turn: object, weight: torch.Tensor | None, factor: float = 1.0, groups: int = HEADS) -> Write:
    """Queries and keys that are turned, and then normed with `weight`; None is a parameter."""

    def write(b: Builder, x: Value) -> Value:
        cos, sin = _cos_sin(b, turn is _halves, factor)

        def change(part: Value, name: str) -> Value:
            turned = turn(b, part, cos, sin).flatten(-2)  # type: ignore[operator]
            vector = b.parameter(f"norm_{name}", HIDDEN) if weight is None else b.constant(f"ones_{name}", weight)
            return b.call(RMS_NORM, turned, vector, 1e-5, groups).unflatten(-1, [HEADS, SIZE])

        return _attend(b, x, change)

    return write


@pytest.mark.parametrize(("weight", "groups"), [(1.0, HEADS), (0.5, HEADS), (1.0, 1)])
def test_a_norm_of_one_weight_moves_in_front_of_pairs(weight: float, groups: int) -> None:
    """A norm of whole tokens does not see either how heads turn."""
    result = raised(_normed(_neighbours, _ONES * weight, groups=groups), NormBeforeTurn())
    assert [arguments(norm)["x"].target for norm in calls(result.graph, RMS_NORM)] == [LINEAR, LINEAR]
    result = raised(result, RaiseRotary())
    found = operators(result)
    assert (found["rms_norm"], found["rotary"], found["index_select"]) == (2, 2, 2)
    assert [arguments(rotary)["x"].target for rotary in calls(result.graph, ROTARY)] == [INDEX_SELECT] * 2


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(_normed(_neighbours, None), id="a parameter"),
        pytest.param(_normed(_neighbours, torch.arange(HIDDEN) + 1.0), id="several weights"),
        pytest.param(_normed(_neighbours, _ONES, factor=1.5), id="scaled"),
        pytest.param(_normed(_halves, _ONES), id="halves"),
        pytest.param(lambda b, x: b.call(RMS_NORM, x * 2.0, b.constant("one", _ONES), 1e-5, HEADS), id="no turn"),
    ],
)
def test_other_norms_stay(write: Write) -> None:
    assert stays(write, NormBeforeTurn())
