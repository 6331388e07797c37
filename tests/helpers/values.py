"""Values of the nodes of a graph that a test has built or changed by hand."""

from torch.fx import GraphModule

from picompile_passes.graph.nodes import attribute
from picompile_passes.graph.values import fake_like, fake_result


def recompute(graph_module: GraphModule) -> None:
    """Compute the value of every parameter and call again, in order, from the values of the placeholders."""
    graph = graph_module.graph
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = fake_like(graph, attribute(graph_module, str(node.target)))
        elif node.op == "call_function":
            node.meta["val"] = fake_result(node)
