"""Repeats layers that were captured once a kind, until the model has all of its layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from picompile_passes.base import Pass, Stage
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.layers import layer_of, token_calls
from picompile_passes.graph.nodes import argument_position, attribute, constant_nodes, has_real_data
from picompile_passes.graph.rewriter import Provenance, Rewriter
from picompile_passes.graph.stamps import Stamps, set_stamps, stamps_of


def check_stamps(graph_module: GraphModule) -> None:
    """Check that layers of a canonical graph can be stamped.

    Raises `UnsupportedGraphError` unless each layer reads one value of the layer before, and parameters of its own, and
    two captured layers that are said to be equal are equal node by node.
    """
    stamps = stamps_of(graph_module)
    if stamps is not None:
        _Layers(graph_module, stamps).check()


@dataclass(frozen=True)
class StampLayers(Pass):
    """Repeats layers that were captured once a kind, until the model has all of its layers.

    1. The calls of a captured layer are copied for each later layer that equals it. The copy reads the layer before in
       place of its source's, and parameters with the layer's number in their names. What layers share stays shared.
    2. The head reads the last copy.
    3. A graph that has all of its layers stays as it is.
    """

    name: ClassVar[str] = "stamp-layers"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage | None] = None

    def rewrite(self, rewriter: Rewriter) -> None:
        """Apply the rules. Raises `UnsupportedGraphError` where `check_stamps` does."""
        stamps = stamps_of(rewriter.graph_module)
        if stamps is None:
            return
        layers = _Layers(rewriter.graph_module, stamps)
        layers.check()
        layers.stamp(self.name)
        set_stamps(rewriter.graph_module, None)
        rewriter.changed(rewriter.graph.output_node())


class _Layers:
    """The captured layers of a graph: the calls of each, and the value that each hands on to the next."""

    def __init__(self, graph_module: GraphModule, stamps: Stamps) -> None:
        self._graph_module, self._stamps = graph_module, stamps
        self._constant = constant_nodes(graph_module.graph)
        calls = token_calls(graph_module.graph)
        self._calls = [[node for node in calls if layer_of(node) == layer] for layer in range(stamps.captured)]
        if not all(self._calls) or any(layer_of(node) in range(stamps.captured, len(stamps.sources)) for node in calls):
            raise _unsupported("it has other layers than the model")
        self._handed = [self._handed_on(layer) for layer in range(stamps.captured)]

    def _handed_on(self, layer: int) -> Node:
        """Return the one value of a layer that anything behind it reads, which must be the next layer."""
        read = {node: {layer_of(user) for user in node.users} - {layer} for node in self._calls[layer]}
        behind = {node: places for node, places in read.items() if places}
        if len(behind) != 1:
            raise _unsupported(f"{len(behind)} values of layer {layer} are read behind it")
        (node, places), last = next(iter(behind.items())), layer == self._stamps.captured - 1
        if len(places) != 1 or (not last and places != {layer + 1}) or (last and max(places) != float("inf")):
            raise _unsupported(f"{node.name} is read by others than the layer behind it")
        return node

    def check(self) -> None:
        """Compare the two captured layers of each kind that is stamped."""
        stamps = self._stamps
        for source in sorted(set(stamps.sources[stamps.captured :])):
            if not any(self._equals(layer, source) for layer in range(source)):
                raise _unsupported(f"no captured layer before layer {source} equals it")

    def _equals(self, one: int, other: int) -> bool:
        handed = [self._handed[one - 1]] if one else self._of_embedding(one)
        expected = list(self._described(other, self._handed[other - 1]))
        return any(list(self._described(one, value)) == expected for value in handed)

    def _of_embedding(self, layer: int) -> list[Node]:
        """Return the values of the embedding part that a layer reads: one of them is what it is handed."""
        read = {value for node in self._calls[layer] for value in node.all_input_nodes}
        return [value for value in read if value not in self._constant and layer_of(value) < 0]

    def _described(self, layer: int, handed: Node) -> Iterator[Any]:
        """Yield what each call of a layer computes, without the layer's number and the names of its values."""
        places = {node: place for place, node in enumerate(self._calls[layer])}

        def described(value: Node) -> Any:
            if value in places:
                return _Text(f"call {places[value]}")
            if value is handed:
                return _Text("handed")
            return _Text(f"constant {self._constant_text(value, layer)}" if value in self._constant else value.name)

        for node in self._calls[layer]:
            args = list(map_arg(node.args, described))
            if (number := _layer_position(node)) is not None:
                args[number] = "layer"
            marks = (node.meta["part"], node.meta.get("neurons"), str(node.meta["val"]))
            yield node.target, str(args), str(map_arg(node.kwargs, described)), marks

    def _constant_text(self, node: Node, layer: int) -> str:
        if node.op != "get_attr":
            args = map_arg((node.args, node.kwargs), lambda value: _Text(self._constant_text(value, layer)))
            return f"{node.target}{args}"
        tensor = attribute(self._graph_module, str(node.target))
        if has_real_data(tensor):
            return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.numpy().tobytes().hex()}"
        name, own = str(node.target), f"{self._stamps.prefix}{layer}."
        if name.startswith(own):
            return f"own {name.removeprefix(own)} {tuple(tensor.shape)}"
        if name.startswith(self._stamps.prefix):
            raise _unsupported(f"layer {layer} reads {name}")
        return name

    def stamp(self, pass_name: str) -> None:
        """Add the layers that the graph has not."""
        stamps, last = self._stamps, self._handed[-1]
        head = [user for user in last.users if layer_of(user) == float("inf")]
        before = next(node for node in self._graph_module.graph.nodes if layer_of(node) == float("inf"))
        handed = last
        for number in range(stamps.captured, len(stamps.sources)):
            handed = self._copy(number, handed, before, pass_name)
        for user in head:
            user.replace_input_with(last, handed)

    def _copy(self, number: int, handed: Node, before: Node, pass_name: str) -> Node:
        """Add the layer `number`, which reads the value `handed`, and return what it hands on."""
        graph, source = self._graph_module.graph, self._stamps.sources[number]
        made: dict[Node, Node] = {self._handed[source - 1]: handed}
        own = self._own_constants(source)
        with graph.inserting_before(before):
            for node in (*own, *self._calls[source]):
                made[node] = copy = graph.node_copy(node, lambda value: made.get(value, value))
                copy.meta["from"] = Provenance(pass_name, (node.name,))
                if node.op == "get_attr":
                    copy.target = self._parameter(str(node.target), source, number)
                    copy._rename(copy.target.replace(".", "_"))
                elif node not in self._constant:
                    copy.meta["layer"] = number
                    if (place := _layer_position(copy)) is not None:
                        copy.update_arg(place, number)
        return made[self._handed[source]]

    def _own_constants(self, layer: int) -> list[Node]:
        """Return the parameters of a layer, and what is computed from them, in order."""
        needed: set[Node] = set()
        waiting = [value for node in self._calls[layer] for value in node.all_input_nodes if value in self._constant]
        while waiting:
            value = waiting.pop()
            if value not in needed:
                needed.add(value)
                waiting += value.all_input_nodes
        prefix, own = f"{self._stamps.prefix}{layer}.", list[Node]()
        for node in self._graph_module.graph.nodes:
            # Buffers of equal layers are equal.
            is_parameter = node.op == "get_attr" and not has_real_data(attribute(self._graph_module, str(node.target)))
            named = is_parameter and str(node.target).startswith(prefix)
            if node in needed and (named or any(value in own for value in node.all_input_nodes)):
                own.append(node)
        return own

    def _parameter(self, name: str, source: int, number: int) -> str:
        """Register the parameter of the layer `number` that is like `name`, one of the layer `source`."""
        shape = attribute(self._graph_module, name).shape
        own = f"{self._stamps.prefix}{number}.{name.removeprefix(f'{self._stamps.prefix}{source}.')}"
        path, _, leaf = own.rpartition(".")
        owner: nn.Module = self._graph_module
        for part in path.split("."):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if leaf not in owner._parameters:
            owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
        return own


class _Text(str):
    """A text that is written without quotes, and so is told from a string among the arguments."""

    def __repr__(self) -> str:
        return f"<{self}>"


def _layer_position(node: Node) -> int | None:
    """Return the place of the argument `layer` among those of a call; None where it has none."""
    try:
        position = argument_position(node, "layer")
    except (KeyError, TypeError):
        return None
    return position if position < len(node.args) else None


def _unsupported(why: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(f"the layers of the graph cannot be repeated: {why}")
