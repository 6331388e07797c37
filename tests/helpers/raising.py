"""Captured graphs of a few operators, and what a pass makes of them."""

from collections import Counter
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from picompile.testing import assert_equivalent
from picompile_passes.base import Pass, Stage
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.operands import EMBEDDING, LINEAR
from picompile_passes.graph.values import fake_mode_of
from picompile_passes.verify import verify

VOCAB, HIDDEN = 31, 24
aten = torch.ops.aten
Write = Callable[[GraphBuilder, Node], Node]


def captured(write: Write) -> GraphModule:
    """The graph of `write(builder, x)`, where x [T, HIDDEN] are embeddings of the tokens."""
    builder = GraphBuilder()
    x = builder.call(EMBEDDING, builder.tokens, builder.parameter("embed.weight", VOCAB, HIDDEN), 0)
    graph_module = builder.finish(write(builder, x), Stage.CAPTURED)
    verify(graph_module, Stage.CAPTURED)
    return graph_module


def bounded(b: GraphBuilder, tokens: int) -> None:
    """Let the graph take no more tokens: what masks and tables hold is compared for all of them."""
    with fake_mode_of(b.graph):
        torch._check(b.tokens.meta["val"].shape[0] <= tokens)  # type: ignore[no-untyped-call]


def linear(b: GraphBuilder, x: Node, name: str, rows: int = HIDDEN, *, bias: bool = False) -> Node:
    """Multiply `x` by a parameter of so many rows."""
    weight = b.parameter(name, rows, int(x.meta["val"].shape[-1]))
    return b.call(LINEAR, x, weight, b.parameter(f"{name}_bias", rows) if bias else None)


def raised(graph_module: GraphModule, *passes: Pass) -> GraphModule:
    """The graph after `passes`. It must compute the same, and running the last pass again must change nothing."""
    result = graph_module
    for pass_ in passes:
        result = pass_(result).graph_module
    stage = Stage.CAPTURED if passes[-1].ensures == Stage.CAPTURED else Stage.CANONICAL
    if stage == Stage.CAPTURED:
        verify(result, stage)
    for seed in (0, 1):
        assert_equivalent(graph_module, result, seed=seed)
    assert not passes[-1](result).modified
    return result


def operators(graph_module: GraphModule) -> dict[str, int]:
    """How often each operator is called, embeddings of the tokens left out."""
    names = Counter(node.target._opname for node in graph_module.graph.nodes if node.op == "call_function")
    return dict(names - Counter(["embedding"]))


def only(graph_module: GraphModule, op: object) -> Node:
    """The one call of `op`."""
    (node,) = graph_module.graph.find_nodes(op="call_function", target=op)
    return node
