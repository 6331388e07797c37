"""`graph_source` and `pass_source`, which write a graph and a pass as Python source that builds them again."""

import base64
import builtins
import keyword
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from picompile_passes.base import stage_of
from picompile_passes.graph.nodes import MARKS, arguments, attribute, calls, has_real_data
from picompile_passes.graph.operands import PREDICT
from picompile_passes.predictors import PREDICTOR_KINDS, predictor_kind

# A longer constant is written compressed.
_LITERAL_ELEMENTS = 64

_HEAD = """import base64
import operator
import zlib

import numpy
import torch

from picompile_passes.base import Stage
from picompile_passes.graph.builder import GraphBuilder
"""

_UNPACK = """

def unpacked(text, dtype, *shape):
    data = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.from_numpy(numpy.frombuffer(data, dtype=dtype).copy()).reshape(shape)
"""


def graph_source(graph_module: GraphModule, imports: Sequence[str] = ()) -> str:
    """Source of a function `graph()` that builds `graph_module`; `imports` are lines that go to its imports."""
    writer = _SourceWriter(graph_module)
    lines = [writer.line(node) for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]
    result = writer.text(graph_module.graph.output_node().args[0])
    body = ["b = GraphBuilder()", *lines, f"return b.finish({result}, Stage.{stage_of(graph_module).name})"]
    head = _HEAD + "".join(f"{line}\n" for line in [*imports, *_kind_imports(graph_module)]) + _UNPACK
    return f"{head}\n\ndef graph():\n" + "\n".join(f"    {line}" for line in body) + "\n"


def _kind_imports(graph_module: GraphModule) -> list[str]:
    """Lines that make known the predictor kinds of the graph that a program has added."""
    names = {str(arguments(node)["kind"]) for node in calls(graph_module.graph, PREDICT)}
    modules = {predictor_kind(name).evaluate.__module__ for name in names.difference(PREDICTOR_KINDS.builtin)}
    return [f"import {module}  # a predictor kind" for module in sorted(modules - {"__main__"})]


def pass_source(pass_: Any) -> tuple[str, list[str], str]:
    """Return the code that makes `pass_`, its import lines, and its package if that is not picompile's own."""
    inner = getattr(pass_, "passes", None)
    if inner is not None:
        parts = [pass_source(part) for part in inner]
        packages = [package for _, _, package in parts if package]
        lines = [line for _, imports, _ in parts for line in imports]
        return f"Pipeline(({''.join(f'{text}, ' for text, _, _ in parts)}))", lines, ", ".join(packages)
    kind = type(pass_)
    if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
        lines = [f"# {kind.__qualname__} was defined in a script: put its definition here."]
        return _construct(pass_, kind.__name__), lines, ""
    outer = kind.__qualname__.partition(".")[0]
    package = kind.__module__.partition(".")[0]
    line = f"from {kind.__module__} import {outer}"
    return _construct(pass_, kind.__qualname__), [line], "" if package == "picompile_passes" else package


def _construct(pass_: Any, name: str) -> str:
    given = [field for field in fields(pass_) if field.init] if is_dataclass(pass_) else []
    return f"{name}({', '.join(f'{field.name}={getattr(pass_, field.name)!r}' for field in given)})"


class _SourceWriter:
    """Writes nodes, each as a variable of its own name where Python allows it."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._read: set[str] = set()
        taken = {"b", "graph", "unpacked", "base64", "numpy", "operator", "torch", "zlib", "GraphBuilder", "Stage"}
        taken |= {*keyword.kwlist, *dir(builtins)}
        self._names: dict[Node, str] = {}
        for node in graph_module.graph.nodes:
            name = f"b.{node.target}" if node.op == "placeholder" else node.name
            while name in taken:
                name += "_"
            taken.add(name)
            self._names[node] = name

    def line(self, node: Node) -> str:
        """The statement that makes `node`."""
        if node.op == "get_attr":
            return f"{self._names[node]} = {self._reading(str(node.target))}"
        if node.op != "call_function":
            raise ValueError(f"{node.name} is a {node.op}")
        given = [_target(node.target), *map(self.text, node.args)]
        given += [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        given += [f"{key}={node.meta[key]!r}" for key in MARKS if key in node.meta]
        return f"{self._names[node]} = b.call({', '.join(given)}, name={node.name!r})"

    def text(self, value: Any) -> str:
        """An argument."""
        if isinstance(value, Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self.text(item)}, " for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)

    def _reading(self, target: str) -> str:
        if target in self._read:
            return f"b.read({target!r})"
        self._read.add(target)
        tensor = attribute(self._graph_module, target)
        if has_real_data(tensor):
            return f"b.constant({target!r}, {_literal(tensor)})"
        return f"b.parameter({', '.join([repr(target), *map(str, tensor.shape)])})"


def _target(target: Callable[..., Any] | str) -> str:
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", str(target))
    return f"operator.{name}" if module == "_operator" else f"{module}.{name}"


def _literal(tensor: Tensor) -> str:
    tensor = tensor.detach()
    small = tensor.numel() <= _LITERAL_ELEMENTS and (not tensor.is_floating_point() or bool(tensor.isfinite().all()))
    if small:
        return f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"
    values: numpy.ndarray[Any, Any] = tensor.contiguous().numpy()
    text = base64.b85encode(zlib.compress(values.tobytes())).decode()
    shape = "".join(f", {size}" for size in tensor.shape)
    return f"unpacked({text!r}, {values.dtype.name!r}{shape})"
