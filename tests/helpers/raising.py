"""Captured graphs of a few operators, and what a pass makes of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from picompile.testing import assert_equivalent
from picompile_passes.base import Pass, Stage
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.operands import EMBEDDING, LINEAR
from picompile_passes.graph.values import fake_mode_of
from picompile_passes.verify import verify

VOCAB, HIDDEN = 31, 24
aten = torch.ops.aten


class Value(Node):
    """A node with which a graph goes on as in PyTorch: `-x * y`, and x.name(...) for any other operator of aten."""

    builder: "Builder"

    def __getattr__(self, name: str) -> Callable[..., "Value"]:
        if name.startswith("__") or not hasattr(aten, name):
            raise AttributeError(name)
        return lambda *args, **options: self.builder.aten(name, self, *args, **options)

    def __add__(self, other: object) -> "Value":
        return self.builder.aten("add", self, other)

    def __sub__(self, other: object) -> "Value":
        return self.builder.aten("sub", self, other)

    def __mul__(self, other: object) -> "Value":
        return self.builder.aten("mul", self, other)

    def __truediv__(self, other: object) -> "Value":
        return self.builder.aten("div", self, other)

    def __matmul__(self, other: object) -> "Value":
        return self.builder.aten("matmul", self, other)

    def __pow__(self, exponent: float) -> "Value":
        return self.builder.aten("pow", self, exponent)

    def __neg__(self) -> "Value":
        return self.builder.aten("neg", self)


class Builder(GraphBuilder):
    """A builder whose nodes are values."""

    tokens: Value
    positions: Value

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = self._value(self.tokens), self._value(self.positions)

    def parameter(self, name: str, *shape: int) -> Value:
        return self._value(super().parameter(name, *shape))

    def constant(self, name: str, tensor: Tensor) -> Value:
        return self._value(super().constant(name, tensor))

    def call(self, *args: Any, **options: Any) -> Value:
        return self._value(super().call(*args, **options))

    def linear(self, x: Value, name: str, rows: int = HIDDEN, *, bias: bool = False) -> Value:
        """Multiply `x` by a new parameter of so many rows."""
        weight = self.parameter(name, rows, int(x.meta["val"].shape[-1]))
        return self.call(LINEAR, x, weight, self.parameter(f"{name}_bias", rows) if bias else None)

    def bounded(self, tokens: int) -> None:
        """Let the graph take no more tokens: what masks and tables hold is compared for all of them."""
        with fake_mode_of(self.graph):
            torch._check(self.tokens.meta["val"].shape[0] <= tokens)  # type: ignore[no-untyped-call]

    def aten(self, name: str, *args: Any, **options: Any) -> Value:
        """Call the overload of an operator that PyTorch chooses for the arguments."""
        given, named = map_arg((args, options), lambda node: node.meta["val"])
        with fake_mode_of(self.graph):
            overload = torch._C._jit_resolve_packet(f"aten::{name}", *given, **named)
        return self.call(getattr(getattr(aten, name), overload), *args, **options)

    def _value(self, node: Node) -> Value:
        node.__class__, node.builder = Value, self
        return node


Write = Callable[[Builder, Value], Value]


def captured(write: Write) -> GraphModule:
    """The graph of `write(builder, x)`, where x [T, HIDDEN] are embeddings of the tokens."""
    builder = Builder()
    x = builder.call(EMBEDDING, builder.tokens, builder.parameter("embed.weight", VOCAB, HIDDEN), 0)
    graph_module = builder.finish(write(builder, x), Stage.CAPTURED)
    verify(graph_module, Stage.CAPTURED)
    return graph_module


def raised(given: GraphModule | Write, *passes: Pass) -> GraphModule:
    """The graph after `passes`. It must compute the same, and running the last pass again must change nothing."""
    graph_module = result = given if isinstance(given, GraphModule) else captured(given)
    for pass_ in passes:
        result = pass_(result).graph_module
    stage = Stage.CAPTURED if passes[-1].ensures == Stage.CAPTURED else Stage.CANONICAL
    if stage == Stage.CAPTURED:
        verify(result, stage)
    for seed in (0, 1):
        assert_equivalent(graph_module, result, seed=seed)
    assert not passes[-1](result).modified
    return result


def stays(write: Write, pass_: Pass) -> bool:
    """Whether a pass leaves a graph as it is."""
    return not pass_(captured(write)).modified


def refused(write: Write, pass_: Pass, match: str) -> None:
    """Check that a pass refuses a graph, in one line."""
    with pytest.raises(UnsupportedGraphError, match=match) as caught:
        pass_(captured(write))
    assert "\n" not in str(caught.value)


def operators(graph_module: GraphModule) -> dict[str, int]:
    """How often each operator is called, embeddings of the tokens left out."""
    names = Counter(node.target._opname for node in graph_module.graph.nodes if node.op == "call_function")
    return dict(names - Counter(["embedding"]))


def only(graph_module: GraphModule, op: object) -> Node:
    """The one call of `op`."""
    (node,) = graph_module.graph.find_nodes(op="call_function", target=op)
    return node
