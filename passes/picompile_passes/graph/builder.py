"""`GraphBuilder`, which builds a graph call by call: for tests of passes, and for the reproducers of failures."""

from collections.abc import Callable
from typing import Any

import torch

# A FakeTensorMode imports this. Here it comes with all else that is imported, while nothing looks for garbage.
import torch._dynamo.config
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from picompile_passes.base import Stage, set_stage
from picompile_passes.graph.layers import mark_layers
from picompile_passes.graph.nodes import MARKS
from picompile_passes.graph.rewriter import Provenance
from picompile_passes.graph.values import fake_call, fake_like

# Any count but 0 and 1, which torch would not keep a symbol for.
_SAMPLE_TOKENS = 7


class GraphBuilder:
    """Builds the graph of a decoder: forward(tokens int64 [T], positions int64 [T]) → logits float32 [T, V].

    Every node carries its value as a fake tensor, in which T is a symbol. Parameters are on the meta device, under the
    names they would have in a checkpoint; constants are real.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self._module = nn.Module()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        self.tokens = self.graph.placeholder("tokens")
        self.positions = self.graph.placeholder("positions")
        self._end = self.graph.output(self.tokens)
        symbolic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        sample = torch.zeros(_SAMPLE_TOKENS, dtype=torch.int64)
        self.tokens.meta["val"] = mode.from_tensor(sample, symbolic_context=symbolic)
        with mode:
            self.positions.meta["val"] = torch.empty(self.tokens.meta["val"].shape, dtype=torch.int64)

    def parameter(self, name: str, *shape: int) -> Node:
        """Read a new float32 parameter of `shape`, without data, called `name` (dotted, as in a checkpoint)."""
        return self._read(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))

    def constant(self, name: str, tensor: Tensor) -> Node:
        """Read a new buffer that holds `tensor`, which must be real and on the CPU."""
        return self._read(name, tensor)

    def read(self, name: str) -> Node:
        """Read an existing parameter or buffer again."""
        tensor: Any = self._module
        for part in name.split("."):
            tensor = getattr(tensor, part)
        return self._read_node(name, tensor)

    def call(
        self,
        op: Callable[..., Any],
        *args: Any,
        layer: int | None = None,
        part: str | None = None,
        neurons: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node:
        """Call `op` and return the node; nodes among the arguments stand for their values.

        `layer`, `part` and `neurons` are written on the node. `name` is the name of the node where that is free. Raises
        `PropagateError` where `op` does not accept the arguments.
        """
        value = fake_call(self.graph, op, args, kwargs)
        hint = name or (op._opname if isinstance(op, OpOverload) else getattr(op, "__name__", "call"))
        with self.graph.inserting_before(self._end):
            node = self.graph.create_node("call_function", op, args, kwargs, name=hint)
        node.meta["val"] = value
        node.meta["from"] = Provenance("builder", ())
        for key, given in zip(MARKS, (layer, part, neurons), strict=True):
            if given is not None:
                node.meta[key] = given
        return node

    def finish(self, logits: Node, stage: Stage = Stage.CANONICAL) -> GraphModule:
        """Return the graph module that computes `logits`, at `stage`. Unused nodes and parameters are kept.

        From the canonical stage on, calls without a layer and a part get them, as in any graph of these stages.
        """
        self._end.args = (logits,)
        if stage >= Stage.CANONICAL:
            mark_layers(self.graph)
        if stage <= Stage.CANONICAL:
            # What capture gives comes from no pass; later stages hold nodes that must say where they come from.
            for node in self.graph.nodes:
                node.meta.pop("from", None)
        result = GraphModule(self._module, self.graph)
        set_stage(result, stage)
        return result

    def _read(self, name: str, tensor: Tensor) -> Node:
        path, _, leaf = name.rpartition(".")
        owner = self._module
        for part in filter(None, path.split(".")):
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
        return self._read_node(name, tensor)

    def _read_node(self, name: str, tensor: Tensor) -> Node:
        with self.graph.inserting_before(self.tokens):
            # Not `get_attr`, which warns of what the graph's module, not yet made, does not have.
            node = self.graph.create_node("get_attr", name, (), {}, name=name.replace(".", "_"))
        node.meta["val"] = fake_like(self.graph, tensor)
        return node
