"""Differences between two dumps, layers that are alike, and the page that shows them."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from helpers.report_pages import Page
from picompile.report.graph import Compared, Comparison, compare, counts_text, listing, render_page
from picompile.report.graph.changes import sections
from picompile.report.graph.layout import lay_out
from picompile.report.graph.listing import fold
from picompile.report.graph.picture import short_operator
from picompile.testing import GraphShape, build
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.dump_reader import DumpGraph, read_dump
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

LAYERS = 4


def dumps(hot: dict[int, tuple[int, ...]], **shape: object) -> dict[str, DumpGraph]:
    """The graph at each stage. It has four layers unless `shape` says otherwise."""
    graph_module = build(GraphShape(**{"layers": LAYERS, **shape}))  # type: ignore[arg-type]
    found = {"canonical": read_dump(graph_text(graph_module))}
    for pass_ in (InsertPredictors(), Partition(hot), Quantize("q8")):
        graph_module = pass_(graph_module).graph_module
        found[str(graph_module.meta["stage"])] = read_dump(graph_text(graph_module))
    return found


@pytest.fixture(scope="module")
def stages() -> dict[str, DumpGraph]:
    return dumps(dict.fromkeys(range(LAYERS), (1, 5)))


def step(stages: dict[str, DumpGraph], before: str, after: str) -> Comparison:
    return compare(stages[before], stages[after])


def text(comparison: Comparison) -> list[str]:
    return [line.text for line in listing(comparison)]


def changed(graph: DumpGraph, name: str, **changes: object) -> DumpGraph:
    """The graph with one node changed."""
    return replace(graph, nodes={**graph.nodes, name: replace(graph.nodes[name], **changes)})  # type: ignore[type-var]


def node_of(graph: DumpGraph, operator: str, layer: int) -> str:
    """The first call of an operator in a layer."""
    places = sections(graph)
    return next(
        n.name for n in graph.nodes.values() if short_operator(n.operator) == operator and places[n.name] == layer
    )


# What changed


def test_equal_dumps_do_not_differ(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "canonical", "canonical")
    assert comparison.equal
    assert (text(comparison), counts_text(comparison)) == ([], "no difference")
    # Two captures call the number of tokens differently.
    lines = graph_text(build(GraphShape(layers=1)))
    symbol = re.search(r"s\d+", lines)
    assert symbol is not None
    assert compare(read_dump(lines), read_dump(lines.replace(symbol[0], "s991"))).equal


def test_every_kind_of_change(stages: dict[str, DumpGraph]) -> None:
    before = stages["partitioned"]
    name = node_of(before, "predict", 2)
    node = before.nodes[name]
    arguments = tuple((key, "0.5" if key == "threshold" else value) for key, value in node.arguments)
    notes = {**node.notes, "neurons": "cold", "n": "1"}
    after = changed(before, name, shape="bool[9]", operator="x.y", arguments=arguments, notes=notes)
    (change,) = compare(before, after).changed.values()
    assert change == {
        "shape": (node.shape, "bool[9]"),
        "operator": ("picompile.predict", "x.y"),
        "threshold": ("0.0", "0.5"),
        "note neurons": ("hot", "cold"),
        "note n": ("", "1"),
    }
    assert text(compare(before, after))[1].endswith("note neurons: hot → cold; note n: none → 1")
    # A name that was reused is another node.
    name = node_of(before, "add", 1)
    moved = changed(before, name, origin=("shuffle", (name,)))
    assert compare(before, moved).changed == {name: {"from": ("", f"shuffle({name})")}}
    other = compare(before, changed(moved, name, operator="aten.mul.Tensor"))
    assert (other.removed, other.added, other.changed) == ((name,), (name,), {})


# Layers, and which are alike


def test_equal_layers_are_shown_once(stages: dict[str, DumpGraph]) -> None:
    for before, after in pairwise(stages):
        for whole in (True, False):
            (only,) = fold(step(stages, before, after), whole=whole)
            assert (only.shown, only.alike) == (0, (1, 2, 3))
            assert not any(only.sizes.values())


def test_layers_that_differ_in_sizes_show_the_sizes() -> None:
    stages = dumps({0: (1, 5), 1: (3, 4), 2: (1, 2, 3), 3: (7, 8)})
    lines = text(step(stages, "predicted", "partitioned"))
    assert lines[-2:] == ["layers 1, 3: as layer 0", "layer 2: as layer 0, with 3 for 2, 37 for 38"]
    lines = text(step(dumps({1: (1, 5), 2: (3, 4)}), "predicted", "partitioned"))
    assert (lines[0], lines[-2:]) == ("layer 1", ["layer 2: as layer 1", "layers 0, 3: unchanged"])


def rewired(graph: DumpGraph, layer: int, key: str, value: str) -> DumpGraph:
    """The last add of a layer with another argument."""
    name = [
        n for n, place in sections(graph).items() if place == layer and graph.nodes[n].operator == "aten.add.Tensor"
    ][-1]
    arguments = tuple((k, value if k == key else v) for k, v in graph.nodes[name].arguments)
    inputs = tuple(v for _, v in arguments if v in graph.nodes)
    return changed(graph, name, arguments=arguments, inputs=inputs)


# One difference in layer 2 each.
SPOILED: dict[str, Callable[[DumpGraph], DumpGraph]] = {
    "another value of the layer before": lambda g: rewired(g, 2, "self", node_of(g, "sparse_ffn", 1)),
    "a value two layers before": lambda g: rewired(g, 2, "self", node_of(g, "add", 0)),
    "a value of the head": lambda g: rewired(g, 2, "self", "embedding"),
    "another value of the layer": lambda g: rewired(g, 2, "other", node_of(g, "attention", 2)),
    "another number": lambda g: rewired(g, 2, "alpha", "2"),
    "a note": lambda g: changed(g, node_of(g, "sparse_ffn", 2), notes={"layer": "2", "neurons": "hot"}),
    "another pass": lambda g: changed(g, node_of(g, "predict", 2), origin=("other", ("ffn",))),
    "fewer dimensions": lambda g: changed(g, node_of(g, "predict", 2), shape="bool[2]"),
}


def test_a_layer_with_one_difference_is_not_folded(stages: dict[str, DumpGraph]) -> None:
    for name, spoil in SPOILED.items():
        comparison = compare(stages["canonical"], spoil(stages["predicted"]))
        for whole in (True, False):
            groups = [{shown.shown, *shown.alike} for shown in fold(comparison, whole=whole)]
            assert {2} in groups, name
            assert {1, 3} in groups or {0, 1, 3} in groups, name


# The layout


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] < second[1] and second[0] < first[1]


GRAPHS = [
    [],
    [("a", "b")],
    [("a", "b"), ("b", "c"), ("a", "c")],
    [("a", "d"), ("b", "d"), ("c", "d"), ("d", "e"), ("d", "f"), ("a", "f"), ("b", "g"), ("e", "g")],
    [(x, y) for x in "abcd" for y in "efgh"],
]


@pytest.mark.parametrize("edges", GRAPHS, ids=len)
def test_boxes_keep_clear_of_one_another_and_of_edges(edges: list[tuple[str, str]]) -> None:
    sizes = {name: (40.0 + 13 * number, 20.0 + 7 * (number % 3)) for number, name in enumerate("abcdefgh")}
    layout = lay_out(sizes, edges)
    places = list(layout.boxes.values())
    assert [(place.width, place.height) for place in places] == list(sizes.values())
    assert all(p.x >= 0 and p.x + p.width <= layout.width + 0.01 and p.y + p.height <= layout.height for p in places)
    for number, first in enumerate(places):
        for second in places[:number]:
            across = overlap((first.x, first.x + first.width), (second.x, second.x + second.width))
            assert not (across and overlap((first.y, first.y + first.height), (second.y, second.y + second.height)))
    for route in layout.routes:
        source, target = (layout.boxes[name] for name in route.edge)
        assert source.x < route.points[0][0] < source.x + source.width
        assert target.x < route.points[-1][0] < target.x + target.width
        ys = [y for _, y in route.points]
        assert ys == sorted(ys)
        assert (ys[0], ys[-1]) == (source.y + source.height, target.y)
        # After the way out of the source's level come the bends, and last the way into the target.
        bends = route.points[2:-2]
        for (x, top), (_, bottom) in zip(bends[::2], bends[1::2], strict=True):
            assert not [p for p in places if p.x < x < p.x + p.width and overlap((p.y, p.y + p.height), (top, bottom))]


# The page


class GraphPage(Page):
    """A page, and its nodes: side, name and class."""

    def __init__(self, html: str) -> None:
        self.nodes: list[tuple[str, str, str]] = []
        self._side = ""
        super().__init__(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        given = {key: value or "" for key, value in attrs}
        if tag == "figure":
            self._side = given["class"]
        if "data-node" in given:
            self.nodes.append((self._side, given["data-node"], given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        super().handle_endtag(tag)
        if tag == "figure":
            self._side = ""


def page(*comparisons: Comparison) -> GraphPage:
    return GraphPage(render_page([Compared("a.txt", "b.txt", comparison) for comparison in comparisons]))


@pytest.mark.parametrize("shape", [{}, {"gated": False, "window": 3}, {"fused": True, "parallel": True, "layers": 1}])
def test_every_node_is_on_the_page_once_for_each_graph(shape: dict[str, object]) -> None:
    comparison = step(dumps({0: (2,)}, **{"layers": 2, **shape}), "canonical", "quantized")
    found = Counter(name for _, name, _ in page(comparison).nodes)
    assert found == Counter([*comparison.before.nodes, *comparison.after.nodes])


def test_a_page_names_stages_and_changes(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "canonical", "predicted")
    html = render_page([Compared("a.txt", "b.txt", comparison)])
    parsed = GraphPage(html)
    assert parsed.of("title") == ["a.txt → b.txt"]
    titles = parsed.values("title")
    nodes = f"{len(comparison.after.nodes)} nodes"
    for words in ("canonical", "predicted", "4 removed", "8 added", "4 changed", nodes):
        assert words in parsed.text
    assert any("from insert-predictors(ffn)" in title and "kind='exact'" in title for title in titles)
    assert any("changed: other: ffn → sparse_ffn" in title for title in titles)
    assert any("became predict, sparse_ffn" in title for title in titles)
    arrows = re.findall(r'<path class="arrow (\w+)"[^>]*data-from="(\w+)" data-to="(\w+)"', html)
    expected = {("removed", "rms_norm_1", "ffn"), ("added", "rms_norm_1", "predict"), ("same", "attention", "linear_3")}
    assert expected <= set(arrows)
    # It loads nothing; an empty icon, so that browsers do not ask for one.
    assert not re.search(r"https?:|@import|url\((?!#arrow-)", html)
    assert [*parsed.values("src"), *parsed.values("href")] == ["data:,"]
    both = page(comparison, step(stages, "predicted", "partitioned"))
    assert both.values("role").count("img") == 2 * 2 * 3
    assert "No dump differs" in page().text


def test_text_of_dumps_is_escaped() -> None:
    evil = "</title><script>alert('x')</script>"
    before = read_dump(f'# stage <b>, 2 nodes\na"&<i>  i64  = placeholder\nb  i64[<u>]  = f<g>(x=a"&<i>, s="{evil}")\n')
    comparison = compare(before, changed(before, "b", shape=evil))
    html = render_page([Compared(evil, "b & c", comparison)])
    assert html.count("<script>") == 1
    assert "alert('x')" not in html
    for tag in ("<i>", "<u>", "<g>"):
        assert tag not in html
    assert 'data-node="a&#34;&amp;&lt;i&gt;"' in html
