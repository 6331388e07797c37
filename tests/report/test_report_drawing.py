"""SVG as the page needs it: its colours, its titles, nothing from elsewhere, the same bytes each time."""

import re
from xml.etree import ElementTree

import matplotlib
import pytest

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


def test_pictures_of_one_page_share_no_id() -> None:
    ids = [set(re.findall(r'\bid="([^"]+)"', drawn(name))) for name in ("p1", "p2")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_references_in_a_picture_resolve() -> None:
    svg = drawn()
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    referred = {*re.findall(r'href="#([^"]+)"', svg), *re.findall(r"url\(#([^)]+)\)", svg)}
    assert referred
    assert referred <= set(ids)
    labelled = re.search(r'aria-labelledby="([^"]+)"', svg)
    assert labelled is not None
    assert set(labelled[1].split()) <= set(ids)


def test_a_picture_has_a_title_and_a_description() -> None:
    root = ElementTree.fromstring(drawn())
    assert root.get("role") == "img"
    assert [(child.tag, child.text) for child in root][:2] == [("title", "A <title>"), ("desc", "What & why")]


def test_pointing_at_a_line_names_it() -> None:
    root = ElementTree.fromstring(drawn())
    named = {group.findtext("title"): group for group in root.iter("g") if group.get("class") == "hover"}
    assert set(named) == {'a "line" <b>', "a bar"}
    assert named['a "line" <b>'].find("path") is not None


def test_colours_are_the_pages() -> None:
    svg = drawn()
    for variable in ("currentColor", "var(--ramp-3)", "var(--series-1)", "var(--faint)"):
        assert variable in svg
    assert not re.search(r"#[0-9a-f]{6}\b", svg)


def test_nothing_is_loaded_and_nothing_leaks() -> None:
    svg = drawn()
    assert "http" not in svg
    assert "<style" not in svg
    assert "font-family" not in svg


def test_special_characters_stay_text() -> None:
    texts = {element.text for element in ElementTree.fromstring(drawn()).iter("text")}
    assert {"x & <y>", "$a_b$ and $", "one"} <= texts


@pytest.mark.parametrize("count", [1, 2, 12, 96])
def test_the_ramp_goes_from_one_end_to_the_other(count: int) -> None:
    steps = [RAMP.index(ramp(number, count)) for number in range(count)]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert count == 1 or steps[-1] == RAMP_STEPS - 1
    assert len(set(steps)) == min(count, RAMP_STEPS)
