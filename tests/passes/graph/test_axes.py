"""Constants that are moves of whole axes of a parameter."""

import pytest

from helpers.raising import Builder, Value, captured
from picompile_passes.graph.axes import Axes, axes_of


@pytest.mark.parametrize(
    ("moves", "axes"),
    [
        (lambda p: p, ((0,), (1,), (2,))),
        (lambda p: p.transpose(1, 2).reshape([24, 3]), ((0, 2), (1,))),
        (lambda p: p.permute([1, 0, 2]).flatten(1).contiguous(), ((1,), (0, 2))),
        (lambda p: p.reshape([12, 6]).t(), ((2,), (0, 1))),
        (lambda p: p.reshape([12, 6]).reshape([4, 3, 6]), ((0,), (1,), (2,))),
        # Axes are cut, selected or computed with.
        (lambda p: p.reshape([8, 9]), None),
        (lambda p: p.select(0, 1), None),
        (lambda p: p + 1.0, None),
    ],
)
def test_axes_of_moves(moves: object, axes: Axes | None) -> None:
    found = []

    def write(b: Builder, x: Value) -> Value:
        made = moves(b.parameter("stack", 4, 3, 6))  # type: ignore[operator]
        found.append(axes_of(made))
        return x

    captured(write)
    assert (None if found[0] is None else found[0].axes) == axes
    assert found[0] is None or str(found[0].parameter.target) == "stack"
