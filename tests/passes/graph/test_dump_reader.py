import operator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from picompile.testing import LLAMA, build, captured_decoders, shapes
from picompile_passes.base import copy_graph_module
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.dump_reader import DumpError, DumpGraph, read_dump
from picompile_passes.graph.operands import EMBEDDING
from picompile_passes.graph.values import value_text
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

# What can go wrong here does so in the first graphs; `make fuzz` draws more.
FEW = settings(max_examples=4, phases=(Phase.explicit, Phase.generate)) if settings.default.derandomize else settings()
HEADER = "# stage canonical, 1 nodes\n"


def read(*lines: str) -> DumpGraph:
    return read_dump("\n".join([f"# stage canonical, {len(lines)} nodes", *lines]) + "\n")


@FEW
@given(shapes(), st.sampled_from([(), (0,)]))
def test_a_written_dump_is_read_back(shape, hot):
    canonical = build(shape)
    predicted = InsertPredictors(kinds={0: "learned"}, ranks={0: 2}, thresholds={0: -1e-07})(canonical).graph_module
    partitioned = Partition({0: hot})(predicted).graph_module
    for graph_module in (canonical, predicted, partitioned, Quantize("q8")(partitioned).graph_module):
        assert_read_back(graph_module)


@FEW
@given(captured_decoders())
def test_written_dumps_of_captured_graphs_are_read_back(graph_module):
    assert_read_back(graph_module)


def assert_read_back(graph_module):
    text = graph_text(graph_module)
    dump = read_dump(text)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    assert dump.stage == graph_module.meta["stage"]
    assert list(dump.nodes) == list(nodes)
    for line, found in zip(text.splitlines()[1:], dump.nodes.values(), strict=True):
        node = nodes[found.name]
        assert found.shape == (value_text(node.meta["val"]) if "val" in node.meta else "")
        assert found.inputs == tuple(other.name for other in node.all_input_nodes)
        assert found.weight == (str(node.target) if node.op == "get_attr" else "")
        assert found.notes.get("layer") == (str(node.meta["layer"]) if "layer" in node.meta else None)
        assert found.notes.get("part") == node.meta.get("part")
        assert found.notes.get("neurons") == node.meta.get("neurons")
        assert found.origin == (tuple(node.meta["from"]) if "from" in node.meta else None)
        assert line.partition("  = ")[2].partition("  # ")[0] == found.expression


def test_notes_of_all_kinds():
    graph_module = copy_graph_module(build(LLAMA))
    node = next(iter(graph_module.graph.find_nodes(op="call_function", target=EMBEDDING)))
    node.meta.update(layer=3, neurons="cold", notes={"weight_bytes": 4096, "share": 0.5, "why": "rare, and\nlarge"})
    notes = {
        "layer": "3",
        "part": "embedding",
        "neurons": "cold",
        "weight_bytes": "4096",
        "share": "0.5",
        "why": r"'rare, and\nlarge'",
    }
    assert read_dump(graph_text(graph_module)).nodes[node.name].notes == notes


def test_what_is_no_node_and_no_note():
    """Text in quotes, and words that look like nodes."""
    nodes = read(
        "a        i64  = placeholder",
        "b        i64  = f(x=a, s='a, (b)  # layer 7', t=\"it's\")  # layer 1, hot, from partition(predict)",
        "e        i64  = placeholder",
        "torch    i64  = placeholder",
        "call     i64  = f(a=1e-06, b=torch.float32, c=[e, 2e3, e], d=device(type='cpu'), f=call)",
    ).nodes
    assert nodes["b"].arguments == (("x", "a"), ("s", "'a, (b)  # layer 7'"), ("t", '"it\'s"'))
    assert (nodes["b"].operator, nodes["b"].inputs) == ("f", ("a",))
    assert (nodes["b"].notes, nodes["b"].origin) == ({"layer": "1", "neurons": "hot"}, ("partition", ("predict",)))
    assert nodes["call"].inputs == ("e",)


def test_calls_of_other_functions_than_operators_are_read():
    graph_module = copy_graph_module(build(LLAMA))
    graph = graph_module.graph
    with graph.inserting_before(graph.output_node()):
        size = graph.call_function(torch.ops.aten.sym_size.int, (next(iter(graph.nodes)), 0))
        product = graph.call_function(operator.mul, (size, 2))
    found = read_dump(graph_text(graph_module)).nodes[product.name]
    assert found.operator == "<built-in function mul>"
    assert found.arguments == (("", size.name), ("", "2"))
    assert found.inputs == (size.name,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a dump: its first line"),
        ("hello\n", "not a dump: its first line"),
        ("# stage canonical, some nodes\n", "not a dump: its first line"),
        ("# stage canonical, 2 nodes\na  i64  = placeholder\n", "not a whole dump: it says 2 nodes and has 1"),
        (HEADER + "a i64 placeholder\n", "line 2 is not 'name  shape  = expression'"),
        (HEADER + "a  i64  = nothing\n", "line 2 calls nothing"),
        (HEADER + "a  i64  = f(b\n", "line 2 calls nothing"),
        ("# stage x, 2 nodes\na  i  = placeholder\na  i  = placeholder\n", "line 3 has node a a second time"),
        (HEADER + "\n", "line 2 is not"),
    ],
)
def test_text_that_is_no_dump_is_refused(text, says):
    with pytest.raises(DumpError) as caught:
        read_dump(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_reading_needs_no_torch():
    import subprocess
    import sys

    code = "import picompile_passes.graph.dump_reader, picompile.report.graph, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
