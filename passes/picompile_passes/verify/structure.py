"""Rules of all graphs (form, operators, values, arguments, layer numbers, provenance) and of packed matrices."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from picompile_passes.dialect import Call, operator_of
from picompile_passes.dialect.operator import Form
from picompile_passes.errors import PropagateError
from picompile_passes.formats import FORMATS
from picompile_passes.graph.layers import PARTS, layer_of, operator_part, token_calls
from picompile_passes.graph.nodes import arguments, attribute, calls, constant_nodes, is_call
from picompile_passes.graph.operands import (
    DEQUANTIZE,
    ELEMENTWISE,
    LINEAR,
    PREDICT,
    QUANTIZE,
    dequantized,
    makes_constants,
    matrix_operands,
)
from picompile_passes.graph.stamps import stamps_of
from picompile_passes.graph.values import fake_result, same_shape, same_value, value_text
from picompile_passes.verify.rule import Fault, Rule

_INPUTS = ("tokens", "positions")


def check_well_formed(graph_module: GraphModule) -> Iterator[Fault]:
    """`graph.lint()` accepts the graph, and every weight it names is a tensor of the module."""
    try:
        graph_module.graph.lint()
    except RuntimeError as error:
        yield Fault(None, str(error))
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            try:
                attribute(graph_module, str(node.target))
            except AttributeError as error:
                yield Fault(node, str(error))


def check_placeholders(graph_module: GraphModule) -> Iterator[Fault]:
    """The inputs are `tokens` and `positions`, int64 of one length."""
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if tuple(node.name for node in inputs) != _INPUTS:
        yield Fault(None, f"the inputs are {', '.join(n.name for n in inputs) or 'none'}, not {', '.join(_INPUTS)}")
        return
    for node in inputs:
        value, first = node.meta.get("val"), inputs[0].meta.get("val")
        if not (isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 1):
            yield Fault(node, f"is {value_text(value)}, not int64[tokens]")
        elif isinstance(first, Tensor) and not same_shape(value.shape, first.shape):
            yield Fault(node, f"is {value_text(value)}, of another length than {value_text(first)}")


def check_values(graph_module: GraphModule) -> Iterator[Fault]:
    """`meta["val"]` of a weight has the weight's shape and dtype; that of a call is what the operator computes."""
    for node in graph_module.graph.nodes:
        if node.op in ("output", "placeholder"):
            continue
        if "val" not in node.meta:
            if node.op == "get_attr" or isinstance(node.target, OpOverload):
                yield Fault(node, 'has no meta["val"]')
            continue
        # Capture leaves calls besides operators (symbolic arithmetic, getitem), which have no fake implementation.
        if node.op != "get_attr" and not isinstance(node.target, OpOverload):
            continue
        try:
            expected = attribute(graph_module, str(node.target)) if node.op == "get_attr" else fake_result(node)
        except PropagateError as error:
            yield Fault(node, str(error))
            continue
        if not same_value(expected, node.meta["val"]):
            yield Fault(node, f'meta["val"] is {value_text(node.meta["val"])}, but the value {value_text(expected)}')


def operators_rule(on_tokens: Form, on_constants: Form | None = None) -> Rule:
    """Return the rule that every call is of an operator that graphs of the form `on_tokens` may call.

    Where it depends on no input it is one for `on_constants`, or moves elements, or computes each by itself.
    """

    def check(graph_module: GraphModule) -> Iterator[Fault]:
        """Every call is one of the operators that the stage allows, on tokens or on what depends on no input."""
        constants = constant_nodes(graph_module.graph)
        for node in graph_module.graph.nodes:
            if node.op in ("call_module", "call_method"):
                yield Fault(node, f"{node.op} {node.target} is no operator")
            if node.op != "call_function":
                continue
            if node in constants:
                allowed = _is_for(node, on_constants) or makes_constants(node.target)
            else:
                allowed = _is_for(node, on_tokens)
            if not allowed:
                side = "constants" if node in constants else "tokens"
                yield Fault(node, f"{node.target} is not allowed on {side} at this stage")

    return Rule("operators", check)


def _is_for(node: Node, form: Form | None) -> bool:
    operator = operator_of(node.target)
    return operator is not None and form in operator.forms


def check_token_path(graph_module: GraphModule) -> Iterator[Fault]:
    """Every value that depends on the tokens is float32 [tokens, dim], or bool [tokens, neurons] for a mask."""
    constants = constant_nodes(graph_module.graph)
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node in constants:
            continue
        value, dtype = node.meta["val"], torch.bool if is_call(node, PREDICT) else torch.float32
        if value.dim() != 2 or not same_shape(value.shape[:1], _tokens(graph_module)) or value.dtype != dtype:
            yield Fault(node, f"is {value_text(value)}, not {str(dtype).removeprefix('torch.')}[tokens, dim]")


def _tokens(graph_module: GraphModule) -> Any:
    return next(iter(graph_module.graph.find_nodes(op="placeholder"))).meta["val"].shape


def check_arguments(graph_module: GraphModule) -> Iterator[Fault]:
    """The dimensions of each call's arguments agree with one another, and its operator's own checks hold."""
    constants = constant_nodes(graph_module.graph)
    for node in graph_module.graph.nodes:
        operator = operator_of(node.target)
        # Sums of constants have shapes of their own.
        if operator is None or node in constants:
            continue
        sizes: dict[str, tuple[str, Any]] = {"T": ("tokens", _tokens(graph_module)[0])}
        values = arguments(node)
        for name, letters in operator.dimensions.items():
            if isinstance(values[name], Node):
                yield from _check_argument(node, name, value=values[name].meta["val"], letters=letters, sizes=sizes)
        for check in operator.checks:
            yield from (Fault(node, message) for message in check(Call(node, values, constants)))


def _check_argument(
    node: Node, name: str, value: Tensor, letters: str, sizes: dict[str, tuple[str, Any]]
) -> Iterator[Fault]:
    if value.dim() != len(letters):
        yield Fault(node, f"{name} is {value_text(value)}, which has not {len(letters)} dimensions")
        return
    for letter, size in zip(letters, value.shape, strict=True):
        first, expected = sizes.setdefault(letter, (name, size))
        if not same_shape((size,), (expected,)):
            yield Fault(node, f"{name} is {value_text(value)}, but {first} makes that {size} a {expected}")


def check_unused(graph_module: GraphModule) -> Iterator[Fault]:
    """Every weight the module holds is read, and every node's value is used."""
    graph = graph_module.graph
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    held = [*graph_module.named_parameters(remove_duplicate=False), *graph_module.named_buffers(remove_duplicate=False)]
    for name, _ in held:
        if name not in read:
            yield Fault(None, f"weight {name} is read by no node")
    for node in graph.nodes:
        if not node.users and node.op not in ("placeholder", "output"):
            yield Fault(node, "its value is not used")


def check_layers(graph_module: GraphModule) -> Iterator[Fault]:
    """Every value has the marks of its layer and part, and none reads one of a later layer.

    Layers are numbered 0, 1, …: each has a mixer or a block, and at most one mixer of each operator, whose argument
    `layer` is this number.
    """
    nodes = token_calls(graph_module.graph)
    mixers: set[tuple[object, int | None]] = set()
    numbers: set[int] = set()
    for node in nodes:
        yield from _check_marks(node)
        layer, part = node.meta.get("layer"), operator_part(node)
        if part in ("mixer", "block"):
            numbers.add(layer or 0)
        if part == "mixer":
            number = arguments(node).get("layer", layer)
            if number != layer:
                yield Fault(node, f"keeps its state as layer {number}, but {_place(node)}")
            if (node.target, layer) in mixers:
                yield Fault(node, f"is a second {node.target} of layer {layer}")
            mixers.add((node.target, layer))
    if missing := set(range(len(numbers))) - numbers:
        yield Fault(None, f"no mixer and no block is of layer {min(missing)}, but one is of layer {max(numbers)}")


def _check_marks(node: Node) -> Iterator[Fault]:
    layer, part = node.meta.get("layer"), node.meta.get("part")
    expected = own if (own := operator_part(node)) in ("mixer", "block") else part
    in_layer = part not in ("embedding", "head")
    if part not in PARTS or part != expected or in_layer != (isinstance(layer, int) and layer >= 0):
        yield Fault(node, _place(node))
    for read in node.all_input_nodes:
        if layer_of(read) > layer_of(node):
            yield Fault(node, f"{_place(node)}, but reads {read.name}, which {_place(read)}")


def _place(node: Node) -> str:
    return f"is of the part {node.meta.get('part')} and of layer {node.meta.get('layer')}"


def check_all_layers(graph_module: GraphModule) -> Iterator[Fault]:
    """No layer waits for the pass `stamp-layers`."""
    stamps = stamps_of(graph_module)
    if stamps is not None:
        yield Fault(None, f"has {stamps.captured} of the model's {len(stamps.sources)} layers")


def check_head(graph_module: GraphModule) -> Iterator[Fault]:
    """The graph returns one value, the logits. A `linear` computes it, or an `elementwise` of one."""
    output = graph_module.graph.output_node()
    head = output.args[0]
    inputs = arguments(head)["inputs"] if isinstance(head, Node) and is_call(head, ELEMENTWISE) else [head]
    if not any(is_call(value, LINEAR) for value in inputs):
        yield Fault(output, f"returns {head}, which is not one linear")


def check_provenance(graph_module: GraphModule) -> Iterator[Fault]:
    """A node that only a pass can have made names the pass and its sources."""
    for node in graph_module.graph.nodes:
        operator = operator_of(node.target)
        # Capture makes operators of dense graphs alone.
        if operator is not None and "dense" not in operator.forms and "from" not in node.meta:
            yield Fault(node, 'has no meta["from"]')


# Rules of packed matrices.


def check_packed(graph_module: GraphModule) -> Iterator[Fault]:
    """Every matrix is `dequantize(quantize(w, format), format, columns)` with one known format and the columns of w."""
    for node in graph_module.graph.nodes:
        for weight in matrix_operands(node):
            if not is_call(dequantized(weight), DEQUANTIZE):
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
