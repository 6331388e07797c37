"""The one way a pass changes a graph: nodes made here carry their value and say where they came from."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from picompile_passes.errors import PassesError
from picompile_passes.graph.nodes import argument_position
from picompile_passes.graph.values import fake_call, fake_like, fake_result


class Provenance(NamedTuple):
    """Where a node came from: the pass that made it, and the names of its sources in the graph before that pass."""

    pass_name: str
    sources: tuple[str, ...]


# What torch.export says of the module a node was traced in; new nodes take it over from their first source.
_INHERITED_META = ("nn_module_stack", "stack_trace")


class Rewriter:
    """Changes one graph on behalf of one pass. `changes` counts what was done; `place` is where it was done last."""

    def __init__(self, graph_module: GraphModule, pass_name: str) -> None:
        self.graph_module = graph_module
        self.pass_name = pass_name
        self.changes = 0
        self.place: Node | None = None
        self._made: set[Node] = set()

    @property
    def graph(self) -> Graph:
        """The graph under change."""
        return self.graph_module.graph

    def call(
        self,
        op: OpOverload,
        args: Sequence[Any],
        *,
        before: Node,
        sources: Sequence[Node],
        layer: int | None = None,
        device: str | None = None,
    ) -> Node:
        """A new call of `op` in front of `before`. Its value comes from running `op` on the values of `args`.

        `sources` are the nodes it stands for. Raises `PropagateError` where `op` does not accept `args`.
        """
        self.place = before
        value = fake_call(self.graph, op, args)
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", op, tuple(args), {}, name=op._opname)
        self._describe(node, value, sources)
        self.annotate(node, layer=layer, device=device)
        return node

    def constant(self, name_hint: str, tensor: Tensor, *, sources: Sequence[Node] = ()) -> Node:
        """A `get_attr` of `tensor`, registered as a buffer under a fresh name, ahead of every computing node.

        `tensor` must be real and on the CPU: it is a small thing computed at compile time, not a parameter.
        """
        if tensor.device.type != "cpu":
            raise ValueError(f"constant {name_hint} is on {tensor.device}, not on the CPU")
        name = self._fresh_attribute(name_hint)
        self.graph_module.register_buffer(name, tensor)
        return self._read(name, tensor, sources)

    def parameter(self, name: str, shape: Sequence[int], *, sources: Sequence[Node] = ()) -> Node:
        """A `get_attr` of a new float32 parameter called `name` (dotted), ahead of every computing node.

        It is on the meta device: its values come from the weight source, which must know it by that name. Raises
        `PassesError` where the module has something of that name.
        """
        path, _, leaf = name.rpartition(".")
        owner: nn.Module = self.graph_module
        for part in filter(None, path.split(".")):
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if hasattr(owner, leaf):
            raise PassesError(f"there is a {name} already")
        tensor = nn.Parameter(torch.empty(tuple(shape), device="meta"), requires_grad=False)
        owner.register_parameter(leaf, tensor)
        return self._read(name, tensor, sources)

    def replace(self, old: Node, new: Node) -> None:
        """Uses of `old`, but for those by `new` itself, become uses of `new`. Unused nodes go when the pass ends."""
        self.place = new
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.changes += 1

    def set_argument(self, node: Node, name: str, value: Any) -> None:
        """Passes `value` for the argument `name` of the call `node`, and computes the call's value anew."""
        self.place = node
        position = argument_position(node, name)
        if position < len(node.args):
            node.update_arg(position, value)
        else:
            node.update_kwarg(name, value)
        node.meta["val"] = fake_result(node)
        self.changes += 1

    def annotate(
        self, node: Node, *, layer: int | None = None, device: str | None = None, **notes: int | float | str
    ) -> None:
        """Writes layer number, device and `notes` of any name on `node`; what is None stays as it is.

        Notes are in `node.meta["notes"]` and in dumps. What was written so before is no change.
        """
        given = {key: value for key, value in (("layer", layer), ("device", device)) if value is not None}
        known = node.meta.get("notes", {})
        if all(node.meta.get(key) == value for key, value in given.items()) and known == known | notes:
            return
        self.place = node
        node.meta.update(given)
        if notes:
            # A new dict: copies of a graph share what their nodes' metadata hold.
            node.meta["notes"] = known | notes
        self.changes += 1

    def _read(self, target: str, tensor: Tensor, sources: Sequence[Node]) -> Node:
        first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        with self.graph.inserting_before(first):
            node = self.graph.create_node("get_attr", target, (), {}, name=target.replace(".", "_"))
        self._describe(node, fake_like(self.graph, tensor), sources)
        return node

    def _describe(self, node: Node, value: Any, sources: Sequence[Node]) -> None:
        node.meta["val"] = value
        node.meta["from"] = Provenance(self.pass_name, tuple(dict.fromkeys(self._origins(sources))))
        self._made.add(node)
        for key in _INHERITED_META:
            if sources and key in sources[0].meta:
                node.meta[key] = sources[0].meta[key]
        self.changes += 1

    def _origins(self, sources: Sequence[Node]) -> Iterator[str]:
        """The names of `sources`; of one that this pass made, those that it was made from."""
        for source in sources:
            yield from source.meta["from"].sources if source in self._made else (source.name,)

    def _fresh_attribute(self, name_hint: str) -> str:
        base = name_hint.replace(".", "_")
        name, number = base, 0
        while hasattr(self.graph_module, name):
            number += 1
            name = f"{base}_{number}"
        return name
