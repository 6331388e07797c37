"""Rules of packed weights."""

from collections.abc import Iterator

from torch.fx import GraphModule

from picompile_passes.dialect import FORMATS
from picompile_passes.nodes import arguments, calls, is_call
from picompile_passes.operands import DEQUANTIZE, QUANTIZE, matrix_operands
from picompile_passes.verify.rule import Fault


def check_packed(graph_module: GraphModule) -> Iterator[Fault]:
    """Every matrix is `dequantize(quantize(w, format), format, columns)` of one known format and w's own columns."""
    for node in graph_module.graph.nodes:
        for weight in matrix_operands(node):
            if not is_call(weight, DEQUANTIZE):
                yield Fault(node, f"its matrix {weight.name} is not dequantized")
    for node in calls(graph_module.graph, DEQUANTIZE):
        packed, form, columns = arguments(node).values()
        if not is_call(packed, QUANTIZE):
            yield Fault(node, f"{packed} is not quantized")
            continue
        weight, packed_form = arguments(packed).values()
        if form != packed_form or form not in FORMATS:
            yield Fault(node, f"reads format {form}, but {packed.name} is {packed_form}")
        if columns != weight.meta["val"].shape[1]:
            yield Fault(node, f"reads {columns} columns, but {weight.name} has {weight.meta['val'].shape[1]}")


def check_packed_once(graph_module: GraphModule) -> Iterator[Fault]:
    """A matrix that several nodes use is packed once."""
    first: dict[object, str] = {}
    for node in calls(graph_module.graph, QUANTIZE):
        weight = arguments(node)["weight"]
        key = weight.target if weight.op == "get_attr" else weight
        if key in first:
            yield Fault(node, f"{weight.name} is packed here and in {first[key]}")
        first[key] = node.name
