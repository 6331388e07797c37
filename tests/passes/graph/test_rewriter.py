import pytest
import torch
from torch.fx import Graph

from picompile.testing import LLAMA, build
from picompile_passes.errors import PassesError, PropagateError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import (
    argument_position,
    arguments,
    attribute,
    calls,
    constant_nodes,
    has_real_data,
    is_call,
)
from picompile_passes.graph.operands import ADD, EMBEDDING, FFN, INDEX_SELECT, LINEAR, QUANTIZE, TRANSPOSE
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import fake_mode_of, fake_result, same_value, value_text


@pytest.fixture
def graph_module():
    return build(LLAMA)


@pytest.fixture
def rewriter(graph_module):
    return Rewriter(graph_module, "test-pass")


def head(graph_module):
    return graph_module.graph.output_node().args[0]


def test_a_call_gets_its_value_with_the_token_count_left_open(graph_module, rewriter):
    old = head(graph_module)
    x, weight, _ = old.args
    new = rewriter.call(LINEAR, (x, weight, None), before=old, sources=(old, x), neurons="hot")
    assert value_text(new.meta["val"]) == value_text(old.meta["val"])
    assert isinstance(new.meta["val"].shape[0], torch.SymInt)
    assert new.meta["val"].fake_mode is fake_mode_of(graph_module.graph)
    assert new.meta["from"] == ("test-pass", (old.name, x.name))
    assert (new.meta.get("layer"), new.meta["part"], new.meta["neurons"]) == (None, "head", "hot")
    assert new.next is old


def test_a_call_that_does_not_fit_is_refused_with_its_shapes(graph_module, rewriter):
    old = head(graph_module)
    count = len(graph_module.graph.nodes)
    with pytest.raises(PropagateError, match=r"aten.add.Tensor does not accept \(float32\[s\d+, 24\], float32\[50"):
        rewriter.call(ADD, (old.args[0], old.args[1]), before=old, sources=())
    assert len(graph_module.graph.nodes) == count
    assert rewriter.changes == 0
    del old.args[0].meta["val"]
    with pytest.raises(PropagateError, match='has no meta\\["val"\\]'):
        rewriter.call(LINEAR, old.args, before=old, sources=())


def test_constants_get_fresh_names_and_stand_ahead_of_every_call(graph_module, rewriter):
    table = torch.arange(3)
    first = rewriter.constant("layers.0.table", table)
    second = rewriter.constant("layers.0.table", table + 1)
    assert (first.target, second.target) == ("layers_0_table", "layers_0_table_1")
    assert graph_module.layers_0_table is table
    assert "layers_0_table" in dict(graph_module.named_buffers())
    assert value_text(first.meta["val"]) == "int64[3]"
    assert_ahead_of_every_call(second)
    assert rewriter.changes == 2
    graph_module.graph.lint()


def test_a_parameter_has_no_data_and_the_name_it_was_given(graph_module, rewriter):
    block = next(calls(graph_module.graph, FFN))
    node = rewriter.parameter("predictors.layers.0.fc1", (3, 24), sources=(block,))
    assert node.target == "predictors.layers.0.fc1"
    assert value_text(node.meta["val"]) == "float32[3, 24]"
    assert node.meta["from"] == ("test-pass", ("ffn",))
    parameter = dict(graph_module.named_parameters())["predictors.layers.0.fc1"]
    assert parameter.is_meta
    assert not parameter.requires_grad
    rewriter.parameter("predictors.layers.0.fc2", (40, 3), sources=(block,))
    graph_module.graph.lint()
    assert_ahead_of_every_call(node)
    for name in ("model.norm.weight", "model.norm"):
        with pytest.raises(PassesError, match=f"there is a {name} already"):
            rewriter.parameter(name, (2, 2))


def assert_ahead_of_every_call(node):
    ahead = list(node.graph.nodes)[: list(node.graph.nodes).index(node)]
    assert all(other.op in ("placeholder", "get_attr") for other in ahead)


def test_replace_leaves_the_new_node_its_own_use(graph_module, rewriter):
    (first, *_) = calls(graph_module.graph, FFN)
    double = rewriter.call(ADD, (first, first), before=first.next, sources=(first,))
    users = set(first.users) - {double}
    rewriter.replace(first, double)
    assert set(first.users) == {double}
    assert set(double.users) == users
    graph_module.graph.lint()


def test_set_argument_computes_the_value_anew(graph_module, rewriter):
    old = head(graph_module)
    wide = rewriter.constant("wide", torch.zeros(99, LLAMA.hidden))
    rewriter.set_argument(old, "weight", wide)
    assert arguments(old)["weight"] is wide
    assert old.meta["val"].shape[1] == 99


def test_annotate_keeps_what_is_not_given(graph_module, rewriter):
    node = head(graph_module)
    rewriter.annotate(node, layer=4)
    rewriter.annotate(node, neurons="cold")
    assert (node.meta["layer"], node.meta["neurons"]) == (4, "cold")
    assert rewriter.changes == 2
    rewriter.annotate(node)
    assert rewriter.changes == 2


def test_arguments_by_name_with_defaults(graph_module):
    embedding, *_ = calls(graph_module.graph, EMBEDDING)
    assert list(arguments(embedding)) == ["ids", "weight", "offset"]
    (add, *_) = calls(graph_module.graph, ADD)
    assert arguments(add)["alpha"] == 1
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(TRANSPOSE, (x,), {"dim1": 1, "dim0": 0})
    assert arguments(node) == {"self": x, "dim0": 0, "dim1": 1}
    assert argument_position(node, "dim1") == 2
    with pytest.raises(KeyError, match="has no argument 'weight'"):
        argument_position(node, "weight")
    with pytest.raises(TypeError, match="has no schema"):
        arguments(graph.call_function(len, (x,)))
    assert is_call(node, TRANSPOSE)
    assert not is_call(x, TRANSPOSE)
    assert not is_call(3, TRANSPOSE)


def test_constants_are_what_depends_on_no_input(graph_module):
    constants = constant_nodes(graph_module.graph)
    for node in graph_module.graph.nodes:
        assert (node in constants) == (node.op == "get_attr" or is_call(node, TRANSPOSE, INDEX_SELECT, QUANTIZE))


def test_attribute_reads_dotted_names(graph_module):
    weight = attribute(graph_module, "model.layers.1.q_proj.weight")
    assert weight is graph_module.model.layers.get_submodule("1").q_proj.weight
    assert not has_real_data(weight)
    assert has_real_data(attribute(graph_module, "inverse_frequency"))
    with pytest.raises(AttributeError, match=r"model.layers is a Module, not a tensor"):
        attribute(graph_module, "model.layers")
    with pytest.raises(AttributeError, match="nowhere"):
        attribute(graph_module, "model.nowhere")


def test_values_agree_only_with_the_same_symbol():
    node, other = head(build(LLAMA)), head(build(LLAMA)).meta["val"]
    one = node.meta["val"]
    assert same_value(fake_result(node), one)
    assert same_value([one, 3], (one, 3))
    different = [(one, node.args[0].meta["val"]), (one, torch.empty(7, 50)), (one, 3), ([one], [])]
    different += [(other, other.new_empty((7, 50))), (torch.zeros(2), torch.zeros(2, dtype=torch.int64))]
    assert not any(same_value(*pair) for pair in different)


def test_values_of_calls_with_other_arguments_are_told_apart():
    weight = (b := GraphBuilder()).parameter("w", 2, 6)
    sizes, dtypes = [(3, 4), (4, 3), (12,)], [torch.float16, torch.float64]
    assert [b.call(torch.ops.aten.view.default, weight, list(size)).meta["val"].shape for size in sizes] == sizes
    assert [b.call(torch.ops.aten._to_copy.default, weight, dtype=d).meta["val"].dtype for d in dtypes] == dtypes
