"""Captured graphs of a few operators, and what a pass makes of them."""

from collections import Counter
from collections.abc import Callable

import torch
from graphs import Builder, assert_close, random_weights
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.infra import Pass
from picompile_passes.materialize import materialize
from picompile_passes.operands import EMBEDDING
from picompile_passes.stages import Stage, set_stage
from picompile_passes.verify import verify

VOCAB, HIDDEN = 31, 24
aten = torch.ops.aten


def captured(write: Callable[[Builder, Node], Node]) -> GraphModule:
    """The graph of `write(builder, x)`, where x [T, HIDDEN] are embeddings of the tokens."""
    builder = Builder()
    x = builder.call(EMBEDDING, builder.tokens, builder.parameter("embed.weight", VOCAB, HIDDEN), 0)
    graph_module = builder.finish(write(builder, x))
    set_stage(graph_module, Stage.CAPTURED)
    verify(graph_module, Stage.CAPTURED)
    return graph_module


def raised(graph_module: GraphModule, *passes: Pass) -> GraphModule:
    """The graph after `passes`. It must compute the same, and running the last pass again must change nothing."""
    result = graph_module
    for pass_ in passes:
        result = pass_(result).graph_module
    stage = Stage.CAPTURED if passes[-1].ensures == Stage.CAPTURED else Stage.CANONICAL
    if stage == Stage.CAPTURED:
        verify(result, stage)
    for tokens in (1, 2, 9):
        assert_close(run(result, tokens), run(graph_module, tokens))
    assert not passes[-1](result).modified
    return result


def run(graph_module: GraphModule, tokens: int = 9) -> Tensor:
    real = materialize(graph_module, random_weights(graph_module))
    with torch.no_grad():
        return real(torch.arange(tokens) * 5 % VOCAB, torch.arange(tokens))


def operators(graph_module: GraphModule) -> dict[str, int]:
    """How often each operator is called, embeddings of the tokens left out."""
    names = Counter(node.target._opname for node in graph_module.graph.nodes if node.op == "call_function")
    return dict(names - Counter(["embedding"]))


def only(graph_module: GraphModule, op: object) -> Node:
    """The one call of `op`."""
    (node,) = graph_module.graph.find_nodes(op="call_function", target=op)
    return node
