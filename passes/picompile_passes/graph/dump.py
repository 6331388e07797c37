"""A graph as text, for `--dump-ir`: one line a node, with the shape of its value, its arguments and its provenance."""

from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from picompile_passes.graph.nodes import INHERITED_MARKS, arguments
from picompile_passes.graph.values import value_text

_CONTEXT_NODES = 10


def graph_text(graph_module: GraphModule) -> str:
    """Return the text of the whole graph, headed by its stage and number of nodes."""
    nodes = list(graph_module.graph.nodes)
    stage = graph_module.meta.get("stage", "unknown")
    return "\n".join([f"# stage {stage}, {len(nodes)} nodes", *_lines(nodes)]) + "\n"


def context_text(node: Node) -> str:
    """Return the text of the ten nodes around `node`, which is marked with `>`."""
    nodes = list(node.graph.nodes)
    position = nodes.index(node)
    start = max(0, min(position - _CONTEXT_NODES // 2, len(nodes) - _CONTEXT_NODES))
    around = nodes[start : start + _CONTEXT_NODES]
    return "\n".join(
        f"{'>' if other is node else ' '} {line}" for other, line in zip(around, _lines(around), strict=True)
    )


def _lines(nodes: list[Node]) -> list[str]:
    names = [node.name for node in nodes]
    shapes = [value_text(node.meta["val"]) if "val" in node.meta else "" for node in nodes]
    name_width, shape_width = max(map(len, names), default=0), max(map(len, shapes), default=0)
    return [
        f"{name:{name_width}}  {shape:{shape_width}}  = {_expression(node)}{_notes(node)}"
        for name, shape, node in zip(names, shapes, nodes, strict=True)
    ]


def _expression(node: Node) -> str:
    if node.op == "get_attr":
        return f"weight {node.target}"
    if node.op in ("placeholder", "output"):
        return node.op if node.op == "placeholder" else f"output({', '.join(map(_argument, node.args))})"
    if not isinstance(node.target, OpOverload):
        return f"{node.target}({', '.join(map(_argument, node.args))})"
    given = [f"{name}={_argument(value)}" for name, value in arguments(node).items() if value is not None]
    return f"{str(node.target).removesuffix('.default')}({', '.join(given)})"


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return value.name if isinstance(value, Node) else repr(value)


def _notes(node: Node) -> str:
    notes = [f"{key} {node.meta[key]}" for key in INHERITED_MARKS if key in node.meta]
    if "neurons" in node.meta:
        notes.append(str(node.meta["neurons"]))
    notes += [f"{key} {value!r}" for key, value in node.meta.get("notes", {}).items()]
    if "from" in node.meta:
        pass_name, sources = node.meta["from"]
        notes.append(f"from {pass_name}({', '.join(sources)})")
    return f"  # {', '.join(notes)}" if notes else ""
