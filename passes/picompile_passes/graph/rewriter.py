"""`Rewriter`, through which passes change a graph: new nodes get their value and their provenance here."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from picompile_passes.errors import RewriteError
from picompile_passes.graph.nodes import INHERITED_MARKS, MARKS, argument_position
from picompile_passes.graph.values import fake_call, fake_like, fake_result


class Provenance(NamedTuple):
    """The pass that made a node, and the names of the node's sources in the graph before that pass."""

    pass_name: str
    sources: tuple[str, ...]


# Where torch.export notes the module that a node was traced in; a new node inherits it from its first source.
_INHERITED_META = ("nn_module_stack", "stack_trace")


class Rewriter:
    """Changes one graph on behalf of one pass.

    Attributes:
        graph_module: The graph module under change, a copy of the one that the pass was given.
        pass_name: The `name` of the pass, for the provenance of new nodes.
        method: What error messages call the code of the pass, as in `Partition.rewrite`.
        changes: How many changes there were so far; the pass has modified the graph where it is above 0.
        place: The node at which the latest change was, for error messages.
    """

    def __init__(self, graph_module: GraphModule, pass_name: str, method: str = "rewrite") -> None:
        self.graph_module = graph_module
        self.pass_name = pass_name
        self.method = method
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
        neurons: str | None = None,
    ) -> Node:
        """Create a call of `op` in front of the node `before`, and return it.

        Its value comes from running the fake implementation of `op` on the values of `args`. If it depends on the
        tokens, it is of the layer and the part that the first marked one of `sources` is of.

        Args:
            op: The operator.
            args: Its arguments by position; nodes stand for their values.
            before: The node in front of which the call goes.
            sources: The nodes that it stands for, at least one: its provenance.
            neurons: "hot" or "cold", where the layer is partitioned.

        Raises:
            PropagateError: `op` does not accept `args`.
            RewriteError: A node is of another graph.
        """
        self._check_own("call", before, *sources, *_nodes_in(args))
        self.place = before
        value = fake_call(self.graph, op, args)
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", op, tuple(args), {}, name=op._opname)
        self._describe(node, value, sources)
        if any(read.op == "placeholder" or "part" in read.meta for read in node.all_input_nodes):
            marked = next((source for source in sources if "part" in source.meta), None)
            node.meta.update(
                {} if marked is None else {key: marked.meta[key] for key in INHERITED_MARKS if key in marked.meta}
            )
        self.annotate(node, neurons=neurons)
        return node

    def constant(self, name_hint: str, tensor: Tensor, *, sources: Sequence[Node] = ()) -> Node:
        """Register `tensor` as a buffer and return a `get_attr` of it, ahead of every computing node.

        `tensor` must be real and on the CPU: a constant is small and computed at compile time, unlike a parameter. The
        buffer's name is `name_hint`, with a number where that is taken. Raises `RewriteError` for a tensor elsewhere.
        """
        if tensor.device.type != "cpu":
            raise RewriteError(
                f"{self.method} gave rewriter.constant the tensor {name_hint} on {tensor.device}: a constant is real "
                f"and on the CPU; a parameter without data is made by rewriter.parameter"
            )
        name = self._fresh_attribute(name_hint)
        self.graph_module.register_buffer(name, tensor)
        return self._read(name, tensor, sources)

    def parameter(self, name: str, shape: Sequence[int], *, sources: Sequence[Node] = ()) -> Node:
        """Register a float32 parameter called `name` (dotted) and return a `get_attr` of it, ahead of computing nodes.

        The parameter is on the meta device: its values come from the weight source, which must know it by that name.
        Raises `RewriteError` where the module has an attribute of that name.
        """
        path, _, leaf = name.rpartition(".")
        owner: nn.Module = self.graph_module
        for part in filter(None, path.split(".")):
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if hasattr(owner, leaf):
            raise RewriteError(
                f"{self.method} made the parameter {name}, but there is a {name} already: choose another name"
            )
        tensor = nn.Parameter(torch.empty(tuple(shape), device="meta"), requires_grad=False)
        owner.register_parameter(leaf, tensor)
        return self._read(name, tensor, sources)

    def replace(self, old: Node, new: Node) -> None:
        """Make every user of `old`, except `new` itself, use `new`. Unused nodes are removed when the pass ends.

        Raises `RewriteError` where a node is of another graph, or `old` is `new`.
        """
        self._check_own("replace", old, new)
        if old is new:
            raise RewriteError(f"{self.method} replaced {old.name} by itself: leave out the call of rewriter.replace")
        self.place = new
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.changes += 1

    def set_argument(self, node: Node, name: str, value: Any) -> None:
        """Pass `value` as the argument `name` of the call `node`, and compute the call's value again.

        Raises `RewriteError` where the operator has no such argument, or a node is of another graph, and
        `PropagateError` where the operator does not accept the value.
        """
        self._check_own("set_argument", node, *_nodes_in(value))
        self.place = node
        try:
            position = argument_position(node, name)
        except (KeyError, TypeError) as error:
            raise RewriteError(f"{self.method} set an argument of {node.name}: {error.args[0]}") from error
        if position < len(node.args):
            node.update_arg(position, value)
        else:
            node.update_kwarg(name, value)
        node.meta["val"] = fake_result(node)
        self.changes += 1

    def annotate(
        self,
        node: Node,
        *,
        layer: int | None = None,
        part: str | None = None,
        neurons: str | None = None,
        **notes: int | float | str,
    ) -> None:
        """Write layer number, part, neurons and `notes` of any name on `node`; what is None stays as it is.

        Notes are in `node.meta["notes"]` and appear in dumps. Writing what is there already is not a change.
        """
        self._check_own("annotate", node)
        given = {key: value for key, value in zip(MARKS, (layer, part, neurons), strict=True) if value is not None}
        known = node.meta.get("notes", {})
        if all(node.meta.get(key) == value for key, value in given.items()) and known == known | notes:
            return
        self.place = node
        node.meta.update(given)
        if notes:
            # A new dict: copies of a graph share what their nodes' metadata hold.
            node.meta["notes"] = known | notes
        self.changes += 1

    def changed(self, node: Node) -> None:
        """Count a change that the pass has made at `node` without the rewriter, as on `node.args` or `node.meta`.

        Without this call the change would not count, and the pass would fail.
        """
        self.place = node
        self.changes += 1

    def _check_own(self, method: str, *nodes: Node) -> None:
        for node in nodes:
            if node.graph is not self.graph:
                raise RewriteError(
                    f"{self.method} gave rewriter.{method} the node {node.name} of another graph: take nodes from "
                    f"rewriter.graph, which is a copy of the graph that the pass was given"
                )

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
        """Yield the names of `sources`; for a source that this pass made, the names of its own sources."""
        for source in sources:
            yield from source.meta["from"].sources if source in self._made else (source.name,)

    def _fresh_attribute(self, name_hint: str) -> str:
        base = name_hint.replace(".", "_")
        name, number = base, 0
        while hasattr(self.graph_module, name):
            number += 1
            name = f"{base}_{number}"
        return name


def _nodes_in(value: Any) -> Iterator[Node]:
    """Yield the nodes in an argument, however deep in lists and tuples they are."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)
