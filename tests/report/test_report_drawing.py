"""SVG as the page needs it: its colours, its titles, nothing from elsewhere, the same bytes each time."""

import re
from xml.etree import ElementTree

import matplotlib

from picompile.report.drawing import INK, RAMP, RAMP_STEPS, SERIES, Canvas, draw, ramp


def paint(canvas: Canvas) -> None:
    axes = canvas.axes(x="x & <y>", y="$a_b$ and $")
    (line,) = axes.plot([0, 1, 2], [3, 1, 2], "o-", color=RAMP[3], label="one")
    canvas.hover(line, 'a "line" <b>')
    (bar,) = axes.bar([1], [2], color=SERIES[1])
    canvas.hover(bar, "a bar")
    axes.plot([0, 2], [0, 0], color=INK)
    axes.legend()


def drawn(name: str = "p1") -> str:
    return str(draw(paint, name=name, title="A <title>", description="What & why", size=(300, 200)))


def test_the_same_picture_has_the_same_bytes() -> None:
    first = drawn()
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        assert drawn() == first
    assert matplotlib.rcParams["svg.fonttype"] == matplotlib.rcParamsDefault["svg.fonttype"]


def test_a_picture_can_stand_in_a_page() -> None:
    """With ids of its own, the page's colours, nothing from elsewhere, and texts as they were given."""
    svg, root = drawn(), ElementTree.fromstring(drawn())
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) > 0
    assert not set(ids) & set(re.findall(r'\bid="([^"]+)"', drawn("p2")))
    referred = {*re.findall(r'href="#([^"]+)"', svg), *re.findall(r"url\(#([^)]+)\)", svg)}
    assert referred and referred | set(str(root.get("aria-labelledby")).split()) <= set(ids)
    assert root.get("role") == "img"
    assert [(child.tag, child.text) for child in root][:2] == [("title", "A <title>"), ("desc", "What & why")]
    named = {group.findtext("title"): group for group in root.iter("g") if group.get("class") == "hover"}
    assert set(named) == {'a "line" <b>', "a bar"}
    assert named['a "line" <b>'].find("path") is not None
    assert {"x & <y>", "$a_b$ and $", "one"} <= {element.text for element in root.iter("text")}
    assert all(name in svg for name in ("currentColor", "var(--ramp-3)", "var(--series-1)", "var(--faint)"))
    assert not re.search(r"#[0-9a-f]{6}\b|http|<style|font-family", svg)


def test_the_ramp_goes_from_one_end_to_the_other() -> None:
    for count in (1, 2, 12, 96):
        steps = [RAMP.index(ramp(number, count)) for number in range(count)]
        assert steps == sorted(steps) and steps[0] == 0
        assert count == 1 or steps[-1] == RAMP_STEPS - 1
        assert len(set(steps)) == min(count, RAMP_STEPS)
