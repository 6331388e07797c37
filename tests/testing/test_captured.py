from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import find, given, settings
from torch.fx import GraphModule

from picompile.testing import CapturedStyle, assert_equivalent, build_captured, captured_styles
from picompile.testing.captured.style import ACTIVATIONS, consistent
from picompile_passes.base import Stage
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION, FFN, ROTARY
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.verify import verify

aten = torch.ops.aten


@pytest.mark.slow("draws and exports many graphs")
@settings(max_examples=25)
@given(captured_styles())
def test_every_style_is_raised(style: CapturedStyle) -> None:
    captured = build_captured(style)
    verify(captured, Stage.CAPTURED)
    result = Pipeline(CANONICALIZE, hook=verifying)(captured).graph_module
    assert_equivalent(captured, result, tokens=(1, 2, 9))
    check_blocks(result, style)
    check_attention(result, style)


def check_blocks(graph_module: GraphModule, style: CapturedStyle) -> None:
    """The feed-forward blocks of `style`, with its activations. Where only up has one, it counts as the gate."""
    texts = (style.ffn.activation, style.ffn.up_activation)
    expected = sorted(ACTIVATIONS[text].text.format(style.ffn.threshold) for text in texts)
    blocks = [arguments(node) for node in calls(graph_module.graph, FFN)]
    assert [sorted((b["activation"], b["up_activation"])) for b in blocks] == [expected] * style.sizes.layers
    assert all((block["gate"] is not None) == style.ffn.gated for block in blocks)


def check_attention(graph_module: GraphModule, style: CapturedStyle) -> None:
    """The attention of `style`: its heads, its windows, and queries and keys turned or not."""
    found = [arguments(node) for node in calls(graph_module.graph, ATTENTION)]
    heads = (style.sizes.heads, style.sizes.kv_heads)
    assert [(values["heads"], values["kv_heads"]) for values in found] == [heads] * style.sizes.layers
    mask = style.attention.mask
    windows = [0 if mask.alternate and layer % 2 else mask.window for layer in range(style.sizes.layers)]
    assert [values["window"] for values in found] == windows
    # The slopes of a mask are nothing to a token that sees itself alone.
    ours = style.attention.operator == "picompile"
    sloping = [mask.slopes != "no" and (ours or window != 1) for window in windows]
    assert [values["slopes"] is not None for values in found] == sloping
    assert {values["softcap"] for values in found} == {style.attention.softcap}
    assert all((values["sinks"] is not None) == style.attention.sinks for values in found)
    turned = 0 if style.positions.rotary == "no" else 2 * style.sizes.layers
    assert len(list(calls(graph_module.graph, ROTARY))) == turned


@pytest.mark.slow("draws and exports many graphs")
def test_every_choice_is_drawn() -> None:
    drawn: dict[str, set[object]] = defaultdict(set)

    @settings(max_examples=2000, derandomize=True, database=None)
    @given(captured_styles())
    def draw(style: CapturedStyle) -> None:
        assert consistent(style) == style
        for name, value, _ in choices(style):
            drawn[name].add(value)

    draw()
    assert find(captured_styles(), lambda style: True, settings=settings(database=None)) == CapturedStyle()
    for name, _, possible in choices(CapturedStyle()):
        assert drawn[name] >= set(possible), f"{name} is never one of {set(possible) - drawn[name]}"
    assert drawn["Sizes.heads"] == {1, 2, 3, 4}
    assert drawn["Sizes.layers"] == {1, 2, 3}
    assert 0 in drawn["CapturedStyle.copies"]
    assert len(drawn["CapturedStyle.copies"]) > 20


def choices(style: object) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every field of a style and of its parts, by class and name, with its value and its choices."""
    for each in fields(style):  # type: ignore[arg-type]
        value = getattr(style, each.name)
        if is_dataclass(value):
            yield from choices(value)
        else:
            yield f"{type(style).__name__}.{each.name}", value, each.metadata.get("choices", ())
