"""Which parameters of a graph are looked up by ids, in whatever way that is written, and which are predictors'."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from picompile_passes.nodes import arguments, calls, constant_nodes
from picompile_passes.operands import PREDICT
from picompile_passes.predictors import predictor_kind


def vocabulary(graph_module: GraphModule) -> int:
    """How many token ids there are: rows of the matrix that tokens are looked up in. Without one, as many as logits."""
    graph = graph_module.graph
    tokens, *_ = graph.find_nodes(op="placeholder")
    of_tokens = _reached_from(tokens)
    rows = [int(matrix.meta["val"].shape[0]) for ids, matrix in _lookups(graph) if ids in of_tokens]
    return min(rows, default=int(graph.output_node().args[0].meta["val"].shape[-1]))  # type: ignore[union-attr]


def embedding_names(graph_module: GraphModule) -> frozenset[str]:
    """The names of the parameters whose rows are looked up: for tokens, and for positions where those are learned."""
    return _parameters_of(matrix for _, matrix in _lookups(graph_module.graph))


def predictor_names(graph_module: GraphModule) -> frozenset[str]:
    """The names of the parameters that predictors have of their own."""
    predictors = (arguments(node) for node in calls(graph_module.graph, PREDICT))
    own = [values for values in predictors if predictor_kind(values["kind"]).parameters is not None]
    return _parameters_of(weight for values in own for weight in values["weights"])


def _parameters_of(weights: Iterable[Node]) -> frozenset[str]:
    """The names of all parameters that `weights` are made of."""
    names: set[str] = set()
    stack = list(weights)
    while stack:
        node = stack.pop()
        names.update([str(node.target)] if node.op == "get_attr" else [])
        stack.extend(node.all_input_nodes)
    return frozenset(names)


def _lookups(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Ids (integers that depend on the input) and matrix (constant floats) of each."""
    constants = constant_nodes(graph)
    for node in graph.nodes:
        ids = [read for read in node.all_input_nodes if _is_tensor(read, floats=False) and read not in constants]
        matrices = [read for read in node.all_input_nodes if _is_tensor(read, floats=True) and read in constants]
        if len(ids) == len(matrices) == 1 and _is_tensor(node, floats=True) and matrices[0].meta["val"].dim() == 2:
            yield ids[0], matrices[0]


def _reached_from(start: Node) -> set[Node]:
    reached, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.users)
    return reached


def _is_tensor(node: Node, *, floats: bool) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() == floats
