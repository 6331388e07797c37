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
from picompile.report.graph.listing import fold
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
    named = (f"picompile.{operator}", f"aten.{operator}.Tensor")
    return next(n.name for n in graph.nodes.values() if n.operator in named and places[n.name] == layer)


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


# The page


class GraphPage(Page):
    """A page, and its rows: for each graph the name of a node and what became of it, or None."""

    def __init__(self, html: str) -> None:
        self.rows: list[list[tuple[str, str] | None]] = []
        super().__init__(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        given = {key: value or "" for key, value in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append((given["data-node"], given["class"]) if "data-node" in given else None)


def page(*comparisons: Comparison) -> GraphPage:
    return GraphPage(render_page([Compared("a.txt", "b.txt", comparison) for comparison in comparisons]))


@pytest.mark.parametrize("shape", [{"gated": False, "window": 3}, {"fused": True, "parallel": True}])
def test_every_node_is_on_the_page_once_for_each_graph(shape: dict[str, object]) -> None:
    comparison = step(dumps({0: (2,)}, layers=2, **shape), "canonical", "quantized")
    rows = [row for row in page(comparison).rows if row]
    for side, graph in enumerate((comparison.before, comparison.after)):
        assert Counter(row[side][0] for row in rows if row[side]) == Counter([*graph.nodes])
    kept = [row for row in rows if any(cell and cell[1].split()[0] in ("same", "changed") for cell in row)]
    assert len(kept) == comparison.same + len(comparison.changed)
    assert all(row[0] == row[1] for row in kept)


def test_a_page_names_stages_and_changes(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "canonical", "predicted")
    html = render_page([Compared("a.txt", "b.txt", comparison)])
    parsed = GraphPage(html)
    assert parsed.of("title") == ["a.txt → b.txt"]
    nodes = f"{len(comparison.after.nodes)} nodes"
    for words in ("canonical", "predicted", "− 4 removed", "+ 8 added", "~ 4 changed", nodes, "layers 1-3: as layer 0"):
        assert words in parsed.text
    texts = parsed.of("td")
    assert any("from insert-predictors(ffn)" in text and "kind='exact'" in text for text in texts)
    assert parsed.of("em") == ["became predict, sparse_ffn", *["other: ffn → sparse_ffn"] * 2]
    assert [("ffn", "removed"), ("predict", "added")] in parsed.rows
    # It loads nothing; an empty icon, so that browsers do not ask for one.
    assert not re.search(r"https?:|@import|url\(|<script", html)
    assert [*parsed.values("src"), *parsed.values("href")] == ["data:,"]
    assert page(comparison, step(stages, "predicted", "partitioned")).of("h1").count("→") == 2
    assert "No dump differs" in page().text


def test_text_of_dumps_is_escaped() -> None:
    evil = "</title><script>alert('x')</script>"
    before = read_dump(f'# stage <b>, 2 nodes\na"&<i>  i64  = placeholder\nb  i64[<u>]  = f<g>(x=a"&<i>, s="{evil}")\n')
    comparison = compare(before, changed(before, "b", shape=evil))
    html = render_page([Compared(evil, "b & c", comparison)])
    assert "<script" not in html
    for tag in ("<i>", "<u>", "<g>"):
        assert tag not in html
    assert 'data-node="a&#34;&amp;&lt;i&gt;"' in html
