from picompile.testing import LLAMA, OPT, build
from picompile_passes.graph.dump import context_text, graph_text
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import EMBEDDING, PREDICT
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition


def line(text, name):
    (found,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return " ".join(found.split())


def test_a_line_says_shape_arguments_and_origin():
    after = Partition({0: (1, 2)})(InsertPredictors()(build(OPT)).graph_module).graph_module
    text = graph_text(after)
    symbol = after.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    assert text.splitlines()[0] == f"# stage partitioned, {len(after.graph.nodes)} nodes"
    assert len(text.splitlines()) == len(after.graph.nodes) + 1
    assert line(text, "tokens") == f"tokens int64[{symbol}] = placeholder"
    assert line(text, "model_norm_weight") == "model_norm_weight float32[24] = weight model.norm.weight"
    assert line(text, "sparse_ffn_1") == (
        f"sparse_ffn_1 float32[{symbol}, 24] = picompile.sparse_ffn(x=layer_norm_3, mask=predict_1, "
        "up=model_layers_1_fc1_weight, down=transpose_1, up_bias=model_layers_1_fc1_bias, "
        "down_bias=model_layers_1_fc2_bias, activation='relu', up_activation='identity', "
        "squares=False) # layer 1, part block, from insert-predictors(ffn_1)"
    )
    hot = next(node for node in calls(after.graph, PREDICT) if node.meta.get("neurons") == "hot")
    assert line(text, hot.name) == (
        f"{hot.name} bool[{symbol}, 2] = picompile.predict(x=layer_norm_1, weights=[index_select, index_select_1], "
        "kind='exact', threshold=0.0) # layer 0, part block, hot, from partition(predict)"
    )
    assert line(text, "output") == "output = output(linear_8)"


def test_context_is_ten_nodes_with_the_one_marked():
    graph = build(LLAMA).graph
    nodes = list(graph.nodes)
    middle = next(iter(calls(graph, EMBEDDING)))
    for node in (nodes[0], middle, nodes[-1]):
        lines = context_text(node).splitlines()
        assert len(lines) == 10
        (marked,) = [line for line in lines if line.startswith(">")]
        assert marked.split()[1] == node.name
    position = nodes.index(middle)
    names = [line[2:].split()[0] for line in context_text(middle).splitlines()]
    assert names == [node.name for node in nodes[position - 5 : position + 5]]
