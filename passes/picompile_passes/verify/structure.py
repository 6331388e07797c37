"""Rules of all graphs (form, operators, values, arguments, layer numbers, provenance) and of packed matrices."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from picompile_passes.dialect.expressions import parse_expression
from picompile_passes.errors import PropagateError
from picompile_passes.formats import FORMATS
from picompile_passes.graph.nodes import arguments, attribute, calls, constant_nodes, is_call
from picompile_passes.graph.operands import (
    ATTENTION,
    DEQUANTIZE,
    DIMENSIONS,
    DIVIDE_BY_RMS,
    ELEMENTWISE,
    FFN,
    LAYER_NORM,
    LINEAR,
    PREDICT,
    QUANTIZE,
    RMS_NORM,
    ROTARY,
    SPARSE_FFN,
    makes_constants,
    matrix_operands,
)
from picompile_passes.graph.values import fake_result, same_shape, same_value, value_text
from picompile_passes.verify.rule import Fault, Rule

_INPUTS = ("tokens", "positions")

# Capture never creates these operators: a pass did, and must have noted its provenance.
_MADE_BY_PASSES = (PREDICT, SPARSE_FFN, DIVIDE_BY_RMS, QUANTIZE, DEQUANTIZE)


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


def operators_rule(on_tokens: frozenset[OpOverload], on_constants: frozenset[OpOverload] = frozenset()) -> Rule:
    """Return the rule that every call is one of `on_tokens`.

    Where it depends on no input it is one of `on_constants`, or moves elements, or computes each by itself.
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
                allowed = node.target in on_constants or makes_constants(node.target)
            else:
                allowed = node.target in on_tokens
            if not allowed:
                side = "constants" if node in constants else "tokens"
                yield Fault(node, f"{node.target} is not allowed on {side} at this stage")

    return Rule("operators", check)


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
    """The dimensions of each call's arguments agree with one another, as `operands.DIMENSIONS` has them."""
    constants = constant_nodes(graph_module.graph)
    for node in graph_module.graph.nodes:
        # Sums of constants have shapes of their own.
        for_operator = DIMENSIONS.get(node.target, {}) if node.op == "call_function" and node not in constants else {}
        sizes: dict[str, tuple[str, Any]] = {"T": ("tokens", _tokens(graph_module)[0])}
        values = arguments(node) if for_operator else {}
        for name, letters in for_operator.items():
            if isinstance(values[name], Node):
                yield from _check_argument(node, name, values[name].meta["val"], letters, sizes)


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


def check_heads(graph_module: GraphModule) -> Iterator[Fault]:
    """Heads divide q, k and v, and equally many query heads share each key head; slopes and sinks have one of each."""
    for node in calls(graph_module.graph, ATTENTION):
        values = arguments(node)
        heads, kv_heads = values["heads"], values["kv_heads"]
        q, k, v = (int(values[name].meta["val"].shape[1]) for name in "qkv")
        if heads % kv_heads or q % heads or k % kv_heads or v % kv_heads or q // heads != k // kv_heads:
            yield Fault(node, f"{heads} heads and {kv_heads} key heads do not fit q, k, v of {q}, {k}, {v}")
        for name in ("slopes", "sinks"):
            if values[name] is not None and tuple(values[name].meta["val"].shape) != (heads,):
                yield Fault(node, f"its {name} are {value_text(values[name].meta['val'])}, not one for each of {heads}")
    for node in calls(graph_module.graph, ROTARY):
        values = arguments(node)
        frequencies, dim = (int(values[name].meta["val"].shape[-1]) for name in ("inverse_frequency", "x"))
        if 2 * frequencies * values["heads"] != dim:
            yield Fault(node, f"{values['heads']} heads of {frequencies} frequencies do not fit {dim}")


def check_groups(graph_module: GraphModule) -> Iterator[Fault]:
    """The groups of a norm divide its features."""
    for node in calls(graph_module.graph, RMS_NORM, LAYER_NORM):
        groups, dim = arguments(node)["groups"], int(node.meta["val"].shape[-1])
        if groups < 1 or dim % groups:
            yield Fault(node, f"{groups} groups do not divide {dim} features")


def check_expressions(graph_module: GraphModule) -> Iterator[Fault]:
    """The expression of an `elementwise` can be read, and its inputs have a number for each element or token."""
    constants = constant_nodes(graph_module.graph)
    for node in calls(graph_module.graph, ELEMENTWISE):
        inputs, expression = arguments(node).values()
        try:
            parse_expression(expression, len(inputs))
        except ValueError as error:
            yield Fault(node, f"its expression: {error}")
        dim = int(node.meta["val"].shape[-1])
        for value in inputs:
            shape = value.meta["val"].shape
            fits = shape[-1] in (1, dim) and len(shape) == (1 if value in constants else 2)
            if not fits:
                yield Fault(node, f"{value.name} is {value_text(value.meta['val'])}, which does not fit {dim} columns")


def check_windows(graph_module: GraphModule) -> Iterator[Fault]:
    """The window of an attention is a number of tokens, or 0 for all; its soft cap is positive, or 0 for none."""
    for node in calls(graph_module.graph, ATTENTION):
        values = arguments(node)
        if values["window"] < 0:
            yield Fault(node, f"its window is {values['window']}")
        if not 0 <= values["softcap"] < math.inf:
            yield Fault(node, f"its soft cap is {values['softcap']}")


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
    """Attentions are numbered 0, 1, … in order; each block has the number of one of these layers, also in order."""
    count = 0
    for node in calls(graph_module.graph, ATTENTION):
        number = arguments(node)["layer"]
        if number != count or node.meta.get("layer") != count:
            yield Fault(node, f"is layer {number}, and {node.meta.get('layer')} by its metadata; it should be {count}")
        count += 1
    last = 0
    for node in calls(graph_module.graph, FFN, PREDICT, SPARSE_FFN):
        number = node.meta.get("layer")
        if not isinstance(number, int) or not last <= number < count:
            yield Fault(node, f"is of layer {number}, where {last} to {count - 1} may stand")
            return
        last = number


def check_gates(graph_module: GraphModule) -> Iterator[Fault]:
    """A gated block has its activation on the gate; otherwise no predictor could tell which neurons are silent."""
    for node in calls(graph_module.graph, FFN, SPARSE_FFN):
        values = arguments(node)
        if values["gate"] is not None and values["activation"] == "identity" != values["up_activation"]:
            yield Fault(node, f"its up has the activation {values['up_activation']}, its gate none")


def check_head(graph_module: GraphModule) -> Iterator[Fault]:
    """The graph returns one value, the logits. A `linear` computes it, or an `elementwise` of one."""
    output = graph_module.graph.output_node()
    head = output.args[0]
    inputs = arguments(head)["inputs"] if isinstance(head, Node) and is_call(head, ELEMENTWISE) else [head]
    if not any(is_call(value, LINEAR) for value in inputs):
        yield Fault(output, f"returns {head}, which is not one linear")


def check_provenance(graph_module: GraphModule) -> Iterator[Fault]:
    """A node that only a pass can have made names the pass and its sources."""
    for node in calls(graph_module.graph, *_MADE_BY_PASSES):
        if "from" not in node.meta:
            yield Fault(node, 'has no meta["from"]')


# Rules of packed matrices.


def check_packed(graph_module: GraphModule) -> Iterator[Fault]:
    """Every matrix is `dequantize(quantize(w, format), format, columns)` with one known format and the columns of w."""
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
