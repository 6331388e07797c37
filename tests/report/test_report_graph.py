"""Differences between two dumps, layers that are alike, and the page that shows them."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from picompile.report.graph import Compared, Comparison, compare, counts_text, graph_summary, listing, render_page
from picompile.report.graph.changes import HEAD, TAIL, sections
from picompile.report.graph.layout import lay_out
from picompile.report.graph.listing import fold, layers_text
from picompile.report.graph.picture import path_text, short_operator, short_shape, short_weight
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
    assert text(comparison) == []
    assert counts_text(comparison) == "no difference"


def test_removed_added_and_changed(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "canonical", "predicted")
    assert comparison.removed == ("ffn", "ffn_1", "ffn_2", "ffn_3")
    assert comparison.added[:2] == ("predict", "sparse_ffn")
    assert comparison.became["ffn_1"] == ("predict_1", "sparse_ffn_1")
    assert next(iter(comparison.changed.values())) == {"other": ("ffn", "sparse_ffn")}
    assert len(comparison.changed) == LAYERS
    lines = text(comparison)
    assert lines[0] == "layer 0"
    assert re.fullmatch(r"  - ffn +picompile\.ffn float32\[\w+, 24\]  became predict, sparse_ffn", lines[1])
    assert lines[2].startswith("  + predict ")
    assert lines[2].endswith("kind='exact', threshold=0.0)  from insert-predictors(ffn)")
    assert lines[-1] == "layers 1-3: as layer 0"


def test_every_kind_of_change(stages: dict[str, DumpGraph]) -> None:
    before = stages["partitioned"]
    name = node_of(before, "predict", 2)
    node = before.nodes[name]
    arguments = tuple((key, "0.5" if key == "threshold" else value) for key, value in node.arguments)
    after = changed(
        before,
        name,
        shape="bool[9]",
        operator="x.y",
        arguments=arguments,
        notes={**node.notes, "device": "cold", "n": "1"},
    )
    (change,) = compare(before, after).changed.values()
    assert change == {
        "shape": (node.shape, "bool[9]"),
        "operator": ("picompile.predict", "x.y"),
        "threshold": ("0.0", "0.5"),
        "note device": ("hot", "cold"),
        "note n": ("", "1"),
    }
    assert text(compare(before, after))[1].endswith("note device: hot → cold; note n: none → 1")


def test_a_name_that_was_reused_is_another_node(stages: dict[str, DumpGraph]) -> None:
    before = stages["predicted"]
    name = node_of(before, "add", 1)
    moved = changed(before, name, origin=("shuffle", (name,)))
    assert compare(before, moved).changed == {name: {"from": ("", f"shuffle({name})")}}
    other = compare(before, changed(moved, name, operator="aten.mul.Tensor"))
    assert (other.removed, other.added, other.changed) == ((name,), (name,), {})


def test_symbols_of_two_captures_are_the_same_tokens(stages: dict[str, DumpGraph]) -> None:
    lines = graph_text(build(GraphShape(layers=1)))
    symbol = re.search(r"s\d+", lines)
    assert symbol is not None
    assert compare(read_dump(lines), read_dump(lines.replace(symbol[0], "s991"))).equal


def test_weights_are_counted(stages: dict[str, DumpGraph]) -> None:
    graph = stages["partitioned"]
    weights = sum(node.operator == "weight" for node in graph.nodes.values())
    assert graph_summary(graph) == f"stage partitioned, {len(graph.nodes)} nodes, {weights} of them weights"


# Layers, and which are alike


def test_every_node_is_of_its_layer(stages: dict[str, DumpGraph]) -> None:
    for graph in stages.values():
        places = sections(graph)
        counts = Counter(places.values())
        assert {counts[layer] for layer in range(LAYERS)} == {counts[0]}
        assert places["tokens"] == places["embedding"] == HEAD
        assert places["output"] == places[node_of(graph, "rms_norm", TAIL)] == TAIL
        assert all(places[n.name] == int(n.notes["layer"]) for n in graph.nodes.values() if "layer" in n.notes)


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


def test_layers_without_changes_are_said_to_be_unchanged() -> None:
    stages = dumps({1: (1, 5), 2: (3, 4)})
    lines = text(step(stages, "predicted", "partitioned"))
    assert lines[0] == "layer 1"
    assert lines[-2:] == ["layer 2: as layer 1", "layers 0, 3: unchanged"]


def test_layers_that_are_not_alike_are_all_drawn() -> None:
    stages = dumps({}, window=3)
    comparison = step(stages, "canonical", "predicted")
    assert [(shown.shown, shown.alike) for shown in fold(comparison, whole=True)] == [(0, (2,)), (1, (3,))]
    # The windows are what differs between them, and insert-predictors did not touch those.
    assert [(shown.shown, shown.alike) for shown in fold(comparison, whole=False)] == [(0, (1, 2, 3))]


def rewired(graph: DumpGraph, layer: int, key: str, value: str) -> DumpGraph:
    """The last add of a layer with another argument."""
    name = [
        n for n, place in sections(graph).items() if place == layer and graph.nodes[n].operator == "aten.add.Tensor"
    ][-1]
    arguments = tuple((k, value if k == key else v) for k, v in graph.nodes[name].arguments)
    inputs = tuple(v for _, v in arguments if v in graph.nodes)
    return changed(graph, name, arguments=arguments, inputs=inputs)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(
            lambda g: rewired(g, 2, "self", node_of(g, "sparse_ffn", 1)), id="another value of the layer before"
        ),
        pytest.param(lambda g: rewired(g, 2, "self", node_of(g, "add", 0)), id="a value two layers before"),
        pytest.param(lambda g: rewired(g, 2, "self", "embedding"), id="a value of the head"),
        pytest.param(lambda g: rewired(g, 2, "other", node_of(g, "attention", 2)), id="another value of the layer"),
        pytest.param(lambda g: rewired(g, 2, "alpha", "2"), id="another number"),
        pytest.param(
            lambda g: changed(g, node_of(g, "sparse_ffn", 2), notes={"layer": "2", "device": "hot"}), id="a note"
        ),
        pytest.param(lambda g: changed(g, node_of(g, "predict", 2), origin=("other", ("ffn",))), id="another pass"),
        pytest.param(lambda g: changed(g, node_of(g, "predict", 2), shape="bool[2]"), id="fewer dimensions"),
    ],
)
def test_a_layer_with_one_difference_is_not_folded(
    stages: dict[str, DumpGraph], spoil: Callable[[DumpGraph], DumpGraph]
) -> None:
    comparison = compare(stages["canonical"], spoil(stages["predicted"]))
    for whole in (True, False):
        groups = [{shown.shown, *shown.alike} for shown in fold(comparison, whole=whole)]
        assert {2} in groups
        assert {1, 3} in groups or {0, 1, 3} in groups


def test_ranges_of_layers() -> None:
    assert layers_text([3]) == "layer 3"
    assert layers_text([5, 1, 2, 3]) == "layers 1-3, 5"
    assert layers_text([0, 2]) == "layers 0, 2"


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


def test_a_chain_is_straight() -> None:
    layout = lay_out({name: (50.0 + 10 * number, 20.0) for number, name in enumerate("abcd")}, pairwise("abcd"))
    assert len({round(place.x + place.width / 2, 1) for place in layout.boxes.values()}) == 1
    assert path_text(layout.routes[0].points).count("C") == 0


# The page


@dataclass
class Page(HTMLParser):
    """The content of a page: elements by their attributes, and the text of titles and headings."""

    nodes: list[tuple[str, str, str]] = field(default_factory=list)
    attributes: list[tuple[str, str]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    text: str = ""
    _side: str = ""
    _stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.attributes += given.items()
        if tag not in ("meta", "input", "link"):
            self._stack.append(tag)
        if tag == "figure":
            self._side = given["class"]
        if "data-node" in given:
            self.nodes.append((self._side, given["data-node"], given.get("class", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag
        if tag == "figure":
            self._side = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._stack[-1:] == ["title"]:
            self.titles.append(data)


def page(*comparisons: Comparison) -> Page:
    parsed = Page()
    parsed.feed(render_page([Compared("a.txt", "b.txt", comparison) for comparison in comparisons]))
    parsed.close()
    assert parsed._stack == []
    return parsed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("canonical", "predicted"),
        ("predicted", "partitioned"),
        ("partitioned", "quantized"),
        ("canonical", "quantized"),
    ],
)
def test_every_node_is_on_the_page_once_for_each_graph(stages: dict[str, DumpGraph], before: str, after: str) -> None:
    comparison = step(stages, before, after)
    found = Counter(name for _, name, _ in page(comparison).nodes)
    assert found == Counter([*comparison.before.nodes, *comparison.after.nodes])


@pytest.mark.parametrize("shape", [{"gated": False}, {"fused": True}, {"parallel": True}, {"window": 3}, {"layers": 1}])
def test_every_kind_of_model_can_be_shown(shape: dict[str, object]) -> None:
    stages = dumps({0: (2,)}, **{"layers": 2, **shape})
    comparison = step(stages, "canonical", "quantized")
    found = Counter(name for _, name, _ in page(comparison).nodes)
    assert found == Counter([*comparison.before.nodes, *comparison.after.nodes])


def test_colours_show_the_changes(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "predicted", "partitioned")
    boxes = {(side, name): kind for side, name, kind in page(comparison).nodes if kind.startswith("node ") and side}
    assert boxes["before", "sparse_ffn"] == "node removed"
    assert ("after", "sparse_ffn") not in boxes
    assert boxes["after", comparison.became["sparse_ffn"][-1]] == "node added"
    (name,) = [name for name in comparison.changed if sections(comparison.after)[name] == 0]
    assert boxes["before", name] == boxes["after", name] == "node changed"
    assert boxes["before", "attention"] == boxes["after", "attention"] == "node same"
    for (side, name), kind in boxes.items():
        assert kind == f"node {comparison.status(name, after=side == 'after')}"


def test_arrows_show_the_changes(stages: dict[str, DumpGraph]) -> None:
    html = render_page([Compared("a", "b", step(stages, "canonical", "predicted"))])
    arrows = re.findall(r'<path class="arrow (\w+)"[^>]*data-from="(\w+)" data-to="(\w+)"', html)
    assert ("removed", "rms_norm_1", "ffn") in arrows
    assert ("added", "rms_norm_1", "predict") in arrows
    assert ("same", "attention", "linear_3") in arrows


def test_layers_that_are_alike_are_drawn_once(stages: dict[str, DumpGraph]) -> None:
    parsed = page(step(stages, "canonical", "quantized"))
    drawn = [name for side, name, kind in parsed.nodes if side and kind.startswith("node ")]
    assert "attention" in drawn
    assert "attention_1" not in drawn
    assert "layers 1-3: as layer 0" in parsed.text


def test_weights_are_rows_of_the_box_that_reads_them(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "partitioned", "quantized")
    parsed = page(comparison)
    kinds = {(side, name): kind for side, name, kind in parsed.nodes}
    read = [name for name, place in sections(comparison.before).items() if place == 0 and name.endswith("_weight")]
    assert {kinds["before", name] for name in read} == {kinds["after", name] for name in read} == {"row"}
    assert "step added" in [kind for (side, name), kind in kinds.items() if side == "after" and "quantize" in name]
    assert not [name for (_, name), kind in kinds.items() if kind.startswith("node") and name.endswith("_weight")]


def test_a_page_names_stages_and_counts_of_changes(stages: dict[str, DumpGraph]) -> None:
    comparison = step(stages, "canonical", "predicted")
    parsed = page(comparison)
    assert parsed.titles[0] == "a.txt → b.txt"
    for words in (
        "canonical",
        "predicted",
        "4 removed",
        "8 added",
        "4 changed",
        f"{len(comparison.after.nodes)} nodes",
    ):
        assert words in parsed.text
    assert any("from insert-predictors(ffn)" in title and "kind='exact'" in title for title in parsed.titles)
    assert any("changed: other: ffn → sparse_ffn" in title for title in parsed.titles)
    assert any("became predict, sparse_ffn" in title for title in parsed.titles)


def test_a_page_loads_nothing(stages: dict[str, DumpGraph]) -> None:
    html = render_page([Compared("a", "b", step(stages, "canonical", "quantized"))])
    assert not re.search(r"https?:|@import|url\((?!#arrow-)", html)
    values = [value for key, value in page(step(stages, "canonical", "quantized")).attributes if key in ("src", "href")]
    # An empty icon, so that browsers do not ask for one.
    assert values == ["data:,"]
    assert "prefers-color-scheme: dark" in html
    assert '<meta name="viewport" content="width=device-width' in html


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


def test_several_comparisons_on_one_page(stages: dict[str, DumpGraph]) -> None:
    both = page(step(stages, "canonical", "predicted"), step(stages, "predicted", "partitioned"))
    assert [value for key, value in both.attributes if key == "role"].count("img") == 2 * 2 * 3
    assert "No dump differs" in page().text


def test_a_graph_without_layers_is_one_picture() -> None:
    graph = read_dump("# stage x, 2 nodes\na  i64  = placeholder\nb  i64  = f(x=a)\n")
    parsed = page(compare(graph, graph))
    assert [(side, name) for side, name, _ in parsed.nodes] == [(s, n) for s in ("before", "after") for n in "ab"]
    assert "layer" not in "".join(parsed.titles)


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (short_operator, "picompile.linear", "linear"),
        (short_operator, "aten.add.Tensor", "add"),
        (short_operator, "other.thing.x", "other.thing.x"),
        (short_shape, "float32[s0, 9]", "[s0, 9]"),
        (short_shape, "int64[9]", "i64[9]"),
        (short_shape, "uint8[9]", "u8[9]"),
        (short_shape, "bool[9]", "bool[9]"),
        (short_shape, "s0", "s0"),
        (short_shape, "[float32[9], s0]", "[float32[9], s0]"),
        (short_weight, "model.layers.11.mlp.gate.weight", "mlp.gate"),
        (short_weight, "layer_3_hot_neurons", "hot_neurons"),
        (short_weight, "lm_head.bias", "lm_head.bias"),
    ],
)
def test_short_forms(function: Callable[[str], str], given: str, expected: str) -> None:
    assert function(given) == expected
