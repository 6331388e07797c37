"""Constant subgraphs as JSON, and graphs of them again.

    ["get", "model.norm.weight", [576], "float32"]
    ["numbers", "rows", "eNpjYGBg…", [8], "int64"]
    ["call", "aten.add.Tensor", [["node", 0], 1.0], {}, [576], "float32"]

A `get` reads a parameter, whose values the weights have. `numbers` are a small constant of the graph itself, such as an
order of rows: its bytes, compressed, in base64. A call is one of an operator of PyTorch's or of the dialect.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

import picompile_passes.dialect  # noqa: F401 (its operators are in torch.ops once it is imported)
from picompile_passes.graph.nodes import attribute, has_real_data

# The libraries of operators that a graph of constants may call.
_NAMESPACES = ("aten", "picompile")


# The limit for a constant of the graph itself: an order of a million rows has 8 MB, and compresses well.
_MOST_BYTES = 8 << 20


class NotKeptError(Exception):
    """Something of a structure has no form that can be kept."""


class ConstantsWriter:
    """Writes constants of one graph; `nodes` are those that were written so far, each after what it reads."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.nodes: list[list[Any]] = []
        self.parameters: dict[str, None] = {}
        self._graph_module = graph_module
        self._numbers: dict[Node, int] = {}

    def reads_weights(self, nodes: Sequence[Node]) -> bool:
        """Return whether the value of any of `nodes` depends on a parameter."""
        waiting, seen = list(nodes), set[Node]()
        while waiting:
            node = waiting.pop()
            if node.op == "get_attr" and not has_real_data(attribute(self._graph_module, str(node.target))):
                return True
            waiting += [each for each in node.all_input_nodes if each not in seen]
            seen.update(node.all_input_nodes)
        return False

    def number(self, node: Node) -> int:
        """Return the place of a constant in `nodes`. Raises `NotKeptError` where it has no form."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [each for each in last.all_input_nodes if each not in self._numbers]
            waiting += missing
            if not missing:
                waiting.pop()
                if last not in self._numbers:
                    self.nodes.append(self._record(last))
                    self._numbers[last] = len(self.nodes) - 1
        return self._numbers[node]

    def _record(self, node: Node) -> list[Any]:
        value = node.meta["val"]
        about = [list(map(int, value.shape)), str(value.dtype).removeprefix("torch.")]
        if node.op == "get_attr":
            name = str(node.target)
            own = attribute(self._graph_module, name)
            if has_real_data(own):
                return ["numbers", name, _text_of(own), *about]
            self.parameters[name] = None
            return ["get", name, *about]
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise NotKeptError(f"{node.name} calls {node.target}")
        name = _operator_name(node.target)
        kwargs = {key: self._argument(each) for key, each in node.kwargs.items()}
        return ["call", name, [self._argument(each) for each in node.args], kwargs, *about]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return ["node", self._numbers[value]]
        if isinstance(value, (list, tuple)):
            return ["list", *(self._argument(each) for each in value)]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise NotKeptError(f"an argument is {value!r:.80}")


def _operator_name(target: OpOverload) -> str:
    if target.namespace not in _NAMESPACES:
        raise NotKeptError(f"{target} is an operator of a package")
    return f"{target.namespace}.{target._opname}.{target._overloadname}"


def read_constants(records: Sequence[Sequence[Any]]) -> tuple[GraphModule, list[Node]]:
    """Return a graph of the constants that a `ConstantsWriter` wrote, parameters without data, and its nodes in order.

    Raises `NotKeptError` for an operator that is none of the known ones.
    """
    graph, root, nodes = Graph(), nn.Module(), list[Node]()
    for kind, name, *rest in records:
        *given, shape, dtype = rest
        value = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        if kind == "numbers":
            _set_buffer(root, name, _numbers_of(given[0], value))
            node = graph.get_attr(name)
        elif kind == "get":
            _set_buffer(root, name, value)
            node = graph.get_attr(name)
        else:
            args, kwargs = given
            made = {key: _read_argument(each, nodes) for key, each in kwargs.items()}
            node = graph.call_function(_operator(name), tuple(_read_argument(each, nodes) for each in args), made)
        node.meta["val"] = value
        nodes.append(node)
    graph.output(tuple(nodes))
    return GraphModule(root, graph), nodes


def _read_argument(value: Any, nodes: Sequence[Node]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    return nodes[rest[0]] if kind == "node" else [_read_argument(each, nodes) for each in rest]


def _operator(name: str) -> OpOverload:
    namespace, packet, overload = name.split(".")
    if namespace not in _NAMESPACES:
        raise NotKeptError(f"{name} is an operator of a package")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload):
        raise NotKeptError(f"{name} is no operator")
    return found


def _text_of(values: torch.Tensor) -> str:
    if values.nbytes > _MOST_BYTES:
        raise NotKeptError(f"{values.nbytes} bytes are numbers of the graph")
    content = values.detach().contiguous().view(torch.uint8) if values.dim() else values.view(1).view(torch.uint8)
    return base64.b64encode(zlib.compress(content.numpy().tobytes())).decode()


def _numbers_of(text: str, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers that `_text_of` wrote, in the dtype and shape of `like`. Raises `ValueError` for others."""
    content = zlib.decompress(base64.b64decode(text, validate=True))
    if len(content) != like.nbytes:
        raise ValueError(f"{len(content)} bytes, not {like.nbytes}")
    return torch.frombuffer(bytearray(content), dtype=like.dtype).view(like.shape)


def _set_buffer(root: nn.Module, name: str, value: torch.Tensor) -> None:
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_buffer(last, value)
