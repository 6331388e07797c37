"""Each rule of each stage, shown to fail on a graph that breaks it and nothing a rule before it asks for."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.fx import GraphModule, Node

from helpers.values import recompute
from picompile.testing import LLAMA, OPT, GraphShape, build
from picompile_passes.base import Stage
from picompile_passes.errors import VerifyError
from picompile_passes.graph.nodes import argument_position, arguments, calls
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    DEQUANTIZE,
    DIVIDE_BY_RMS,
    ELEMENTWISE,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LAYER_NORM,
    LINEAR,
    PREDICT,
    QUANTIZE,
    ROTARY,
    SPARSE_FFN,
    SPARSE_LINEAR,
    TRANSPOSE,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import fake_result
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.verify import RULES, verify
from picompile_passes.verify.structure import check_packed

NORMED = GraphShape(gated=False, ffn_norm=True)


def at_stage(stage: Stage, shape: GraphShape = OPT) -> GraphModule:
    """A sound graph of `stage`, its first layer partitioned where that stage has been reached."""
    graph_module = build(shape)
    for pass_ in (InsertPredictors(), Partition({0: (1, 7, 30)}), Quantize("q8")):
        if pass_.ensures <= stage:
            graph_module = pass_(graph_module).graph_module
    return graph_module


def first(graph_module: GraphModule, op: object) -> Node:
    return next(iter(calls(graph_module.graph, op)))


def put(node: Node, name: str, value: object) -> None:
    """Changes an argument and nothing else."""
    position = argument_position(node, name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def make(graph_module: GraphModule, op: object, *args: object, before: Node, layer: int | None = None) -> Node:
    return Rewriter(graph_module, "breaker").call(op, args, before=before, sources=(), layer=layer)


def constant(graph_module: GraphModule, values: list) -> Node:
    return Rewriter(graph_module, "breaker").constant("breaker", torch.tensor(values))


def sweep(g: GraphModule) -> None:
    """Removes what a change has left unused, so that nothing but the change is wrong."""
    g.graph.eliminate_dead_code()
    read = {node.target for node in g.graph.nodes if node.op == "get_attr"}
    held = [*g.named_parameters(remove_duplicate=False), *g.named_buffers(remove_duplicate=False)]
    for name in {name for name, _ in held} - read:
        path, _, leaf = name.rpartition(".")
        delattr(g.get_submodule(path), leaf)


def table(graph_module: GraphModule, part: int) -> torch.Tensor:
    """The neuron table of layer 0's hot (0) or cold (1) part."""
    return graph_module.get_buffer(("layer_0_hot_neurons", "layer_0_cold_neurons")[part])


def output(graph_module: GraphModule) -> Node:
    return graph_module.graph.output_node()


def head(graph_module: GraphModule) -> Node:
    return output(graph_module).args[0]


def parts(graph_module: GraphModule) -> list[Node]:
    return list(calls(graph_module.graph, SPARSE_FFN))[:2]


# --- what breaks the rules of every stage


def uses_before_definition(g: GraphModule) -> None:
    first(g, ATTENTION).append(first(g, EMBEDDING))


def weight_is_missing(g: GraphModule) -> None:
    del g.model.norm.weight


def weight_is_a_module(g: GraphModule) -> None:
    next(node for node in g.graph.nodes if node.target == "model.norm.weight").target = "model.norm"


def input_has_another_name(g: GraphModule) -> None:
    inputs = g.graph.find_nodes(op="placeholder")
    inputs[1].name = "places"


def input_is_missing(g: GraphModule) -> None:
    tokens, positions = g.graph.find_nodes(op="placeholder")
    positions.replace_all_uses_with(tokens)
    g.graph.erase_node(positions)


def input_is_float(g: GraphModule) -> None:
    positions = g.graph.find_nodes(op="placeholder")[1]
    positions.meta["val"] = positions.meta["val"].float()


def inputs_differ_in_length(g: GraphModule) -> None:
    positions = g.graph.find_nodes(op="placeholder")[1]
    positions.meta["val"] = positions.meta["val"].new_empty(7)


def value_has_another_shape(g: GraphModule) -> None:
    node = first(g, ADD)
    node.meta["val"] = node.meta["val"].new_empty((7, OPT.hidden))


def value_has_another_dtype(g: GraphModule) -> None:
    node = head(g)
    node.meta["val"] = node.meta["val"].double()


def value_is_missing(g: GraphModule) -> None:
    del first(g, LAYER_NORM).meta["val"]


def weight_changed_size(g: GraphModule) -> None:
    g.model.norm.weight = torch.nn.Parameter(torch.empty(OPT.hidden + 1, device="meta"))


def operator_rejects_its_arguments(g: GraphModule) -> None:
    put(first(g, ADD), "other", head(g).args[1])


# --- from canonical on


def foreign_operator(g: GraphModule) -> None:
    end = head(g)
    put(end, "x", make(g, torch.ops.aten.relu.default, end.args[0], before=end))


def constant_operator_on_tokens(g: GraphModule) -> None:
    end = head(g)
    rows = constant(g, list(range(OPT.hidden)))
    put(end, "x", make(g, INDEX_SELECT, end.args[0], 1, rows, before=end))


def token_operator_on_constants(g: GraphModule) -> None:
    norm = first(g, LAYER_NORM)
    weight = arguments(norm)["weight"]
    ones = make(g, LAYER_NORM, weight, None, None, 1e-5, before=norm)
    put(norm, "weight", ones)


def calls_a_module(g: GraphModule) -> None:
    end = head(g)
    with g.graph.inserting_before(end):
        node = g.graph.call_module("model.norm", (end.args[0],))
    node.meta["val"] = end.args[0].meta["val"]
    put(end, "x", node)


def sparse_block_before_predictors(g: GraphModule) -> None:
    block = first(g, FFN)
    x, *rest = arguments(block).values()
    mask = make(g, PREDICT, x, [rest[1]], "none", 0.0, before=block, layer=0)
    block.replace_all_uses_with(make(g, SPARSE_FFN, x, mask, None, *rest, before=block, layer=0))
    g.graph.erase_node(block)


def dense_block_is_left(g: GraphModule) -> None:
    block = first(g, SPARSE_FFN)
    x, _, _, *rest = list(arguments(block).values())[:11]
    block.replace_all_uses_with(make(g, FFN, x, *rest, before=block, layer=0))
    sweep(g)


def value_is_a_vector(g: GraphModule) -> None:
    end = head(g)
    positions = g.graph.find_nodes(op="placeholder")[1]
    output(g).args = (make(g, LINEAR, positions, *end.args[1:], before=output(g)),)
    g.graph.erase_node(end)


def value_is_an_integer(g: GraphModule) -> None:
    for node in calls(g.graph, EMBEDDING):
        put(node, "weight", constant(g, [[1] * OPT.hidden] * 70))
    put(head(g), "weight", constant(g, [[0.0] * OPT.hidden] * OPT.vocab))
    sweep(g)
    recompute(g)


def bias_is_too_long(g: GraphModule) -> None:
    put(first(g, LINEAR), "bias", constant(g, [0.0] * (OPT.hidden + 1)))


def weight_is_transposed(g: GraphModule) -> None:
    end = head(g)
    wide = constant(g, [[0.0] * (OPT.hidden + 3)] * OPT.vocab)
    put(end, "weight", wide)


def gate_and_up_differ(g: GraphModule) -> None:
    block = first(g, FFN)
    put(block, "gate", constant(g, [[0.0] * OPT.hidden] * (OPT.ffn - 1)))


def bias_is_a_matrix(g: GraphModule) -> None:
    put(first(g, LINEAR), "bias", constant(g, [[0.0] * OPT.hidden]))


def key_of_width(g: GraphModule, width: int) -> None:
    key = arguments(first(g, ATTENTION))["k"]
    put(key, "bias", None)
    put(key, "weight", constant(g, [[0.0] * OPT.hidden] * width))
    key.meta["val"] = fake_result(key)
    sweep(g)


def key_heads_do_not_divide(g: GraphModule) -> None:
    key_of_width(g, 25)


def key_heads_are_of_another_size(g: GraphModule) -> None:
    key_of_width(g, 36)


def too_few_frequencies(g: GraphModule) -> None:
    put(first(g, ROTARY), "inverse_frequency", constant(g, [0.5, 0.25]))


def groups_do_not_divide(g: GraphModule) -> None:
    put(first(g, LAYER_NORM), "groups", 5)


def there_are_no_groups(g: GraphModule) -> None:
    put(first(g, LAYER_NORM), "groups", 0)


def calculate(g: GraphModule, expression: str, *inputs: Node) -> None:
    """Puts an `elementwise` of the head's input and `inputs` before the head."""
    end = head(g)
    put(end, "x", make(g, ELEMENTWISE, [end.args[0], *inputs], "mul(x0, 2.0)", before=end))
    put(end.args[0], "expression", expression)


def expression_is_none(g: GraphModule) -> None:
    calculate(g, "twice(x0)")


def expression_reads_a_missing_input(g: GraphModule) -> None:
    calculate(g, "mul(x0, x1)")


def vector_of_an_expression_is_too_short(g: GraphModule) -> None:
    norm = first(g, LAYER_NORM)
    calculate(g, "mul(x0, x1)", arguments(norm)["x"], constant(g, [0.5] * (OPT.hidden - 1)))


def constant_of_an_expression_is_a_matrix(g: GraphModule) -> None:
    calculate(g, "mul(x0, x1)", constant(g, [[0.5] * OPT.hidden]))


def window_is_negative(g: GraphModule) -> None:
    put(first(g, ATTENTION), "window", -1)


def soft_cap_is_negative(g: GraphModule) -> None:
    put(first(g, ATTENTION), "softcap", -30.0)


def soft_cap_is_infinite(g: GraphModule) -> None:
    put(first(g, ATTENTION), "softcap", float("inf"))


def a_slope_too_few(g: GraphModule) -> None:
    put(first(g, ATTENTION), "slopes", constant(g, [0.5] * (OPT.heads - 1)))


def sinks_are_a_matrix(g: GraphModule) -> None:
    put(first(g, ATTENTION), "sinks", constant(g, [[0.5] * OPT.heads]))


def gate_and_up_are_swapped(g: GraphModule) -> None:
    block = first(g, FFN)
    put(block, "gate", arguments(block)["up"])
    put(block, "up_activation", "relu")
    put(block, "activation", "identity")


def weight_is_not_read(g: GraphModule) -> None:
    g.register_parameter("left_over", torch.nn.Parameter(torch.empty(3, device="meta")))


def buffer_is_not_read(g: GraphModule) -> None:
    g.register_buffer("left_over", torch.zeros(3))


def value_is_not_used(g: GraphModule) -> None:
    end = head(g)
    make(g, ADD, end.args[0], end.args[0], before=end)


def attention_counts_from_one(g: GraphModule) -> None:
    for node in calls(g.graph, ATTENTION):
        put(node, "layer", arguments(node)["layer"] + 1)
        node.meta["layer"] += 1


def attention_repeats_a_number(g: GraphModule) -> None:
    *_, last = calls(g.graph, ATTENTION)
    put(last, "layer", 0)
    last.meta["layer"] = 0


def attention_metadata_differs(g: GraphModule) -> None:
    first(g, ATTENTION).meta["layer"] = 1


def block_is_of_no_layer(g: GraphModule) -> None:
    del first(g, FFN).meta["layer"]


def block_is_of_a_layer_too_many(g: GraphModule) -> None:
    *_, last = calls(g.graph, FFN)
    last.meta["layer"] = 2


def blocks_are_out_of_order(g: GraphModule) -> None:
    one, other = calls(g.graph, FFN)
    one.meta["layer"], other.meta["layer"] = 1, 0


def ends_in_an_add(g: GraphModule) -> None:
    end = head(g)
    output(g).args = (make(g, ADD, end, end, before=output(g)),)


def ends_in_arithmetic_on_no_linear(g: GraphModule) -> None:
    end = head(g)
    total = make(g, ADD, end, end, before=output(g))
    output(g).args = (make(g, ELEMENTWISE, [total], "tanh(x0)", before=output(g)),)


def gives_back_two_values(g: GraphModule) -> None:
    output(g).args = ((head(g), head(g)),)


def origin_is_lost(g: GraphModule) -> None:
    del first(g, PREDICT).meta["from"]


def origin_of_packing_is_lost(g: GraphModule) -> None:
    del first(g, DEQUANTIZE).meta["from"]


# --- from predicted on


def mask_comes_from_elsewhere(g: GraphModule) -> None:
    block = first(g, SPARSE_FFN)
    x, weights, *_ = arguments(arguments(block)["mask"]).values()
    put(block, "mask", make(g, LINEAR, x, weights[0], None, before=block))
    sweep(g)


def mask_is_of_another_layer(g: GraphModule) -> None:
    one, other = calls(g.graph, PREDICT)
    block = next(iter(other.users))
    put(block, "mask", one)
    g.graph.erase_node(other)


def mask_is_of_another_input(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    put(mask, "x", first(g, LAYER_NORM))


def mask_is_too_short(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    put(mask, "weights", [constant(g, [[0.0] * OPT.hidden] * (OPT.ffn - 1))])
    mask.meta["val"] = mask.meta["val"][:, 1:]


def table_points_beyond_the_mask(g: GraphModule) -> None:
    put(first(g, SPARSE_FFN), "neurons", constant(g, [OPT.ffn] * OPT.ffn))


def table_is_computed(g: GraphModule) -> None:
    block = first(g, SPARSE_FFN)
    rows = constant(g, list(range(OPT.ffn)))
    put(block, "neurons", make(g, INDEX_SELECT, rows, 0, rows, before=block))


def predictor_reads_another_matrix(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    down = arguments(first(g, SPARSE_FFN))["down"]
    mask.prepend(down)
    put(mask, "weights", [down, *arguments(mask)["weights"][1:]])


def predictor_lacks_the_bias(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    put(mask, "weights", arguments(mask)["weights"][:1])


def threshold_has_the_wrong_sign(g: GraphModule) -> None:
    put(first(g, PREDICT), "threshold", 0.5)


def exact_on_silu(g: GraphModule) -> None:
    put(first(g, SPARSE_FFN), "activation", "silu")


def sign_reads_the_bias_too(g: GraphModule) -> None:
    put(first(g, PREDICT), "kind", "sign")


def predictor_without_weights_of_its_own_reads_the_stream(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    put(mask, "x", arguments(arguments(mask)["x"])["x"])


def learn(g: GraphModule, layer: int, *shapes: tuple[int, ...], source: Node | None = None) -> None:
    """Gives a layer a learned predictor whose weights have `shapes`."""
    mask = list(calls(g.graph, PREDICT))[layer]
    rewriter = Rewriter(g, "breaker")
    weights = [rewriter.parameter(f"learned.{i}", shape, sources=(mask,)) for i, shape in enumerate(shapes)]
    put(mask, "weights", weights)
    put(mask, "kind", "learned")
    if source is not None:
        put(mask, "x", source)
    sweep(g)


def learned_reads_the_block_two_layers_before(g: GraphModule) -> None:
    masks = list(calls(g.graph, PREDICT))
    learn(g, 2, (3, 24), (40, 3), (40,), source=arguments(masks[0])["x"])


def learned_reads_the_input_of_attention(g: GraphModule) -> None:
    learn(g, 0, (3, 24), (40, 3), (40,), source=first(g, LAYER_NORM))


def learned_has_a_bias_of_another_length(g: GraphModule) -> None:
    learn(g, 0, (3, 24), (40, 3), (1,))


def learned_has_a_bias_of_two_dimensions(g: GraphModule) -> None:
    learn(g, 0, (3, 24), (40, 3), (40, 1))


def learned_reads_another_width(g: GraphModule) -> None:
    learn(g, 0, (3, 23), (40, 3), (40,))


def learned_has_two_ranks(g: GraphModule) -> None:
    learn(g, 0, (2, 24), (40, 3), (40,))


def learned_has_no_bias(g: GraphModule) -> None:
    learn(g, 0, (3, 24), (40, 3))


def none_reads_something_else(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    put(mask, "kind", "none")
    down = arguments(first(g, SPARSE_FFN))["down"]
    mask.prepend(down)
    put(mask, "weights", [down])


def squares_are_divided_by_another_number(g: GraphModule) -> None:
    put(first(g, DIVIDE_BY_RMS), "neurons", 39)


def bias_is_divided(g: GraphModule) -> None:
    division = first(g, DIVIDE_BY_RMS)
    put(arguments(division)["x"], "down_bias", arguments(division)["bias"])
    put(division, "bias", None)


def squares_are_doubled(g: GraphModule) -> None:
    division = first(g, DIVIDE_BY_RMS)
    block = arguments(division)["x"]
    put(division, "x", make(g, ADD, block, block, before=division))


def bias_of_a_division_is_too_long(g: GraphModule) -> None:
    bias = constant(g, [0.0])
    put(first(g, DIVIDE_BY_RMS), "bias", bias)
    sweep(g)


def skip(g: GraphModule, **changed: object) -> Node:
    """Makes the projection behind the first attention one that leaves out inputs, and passes what is `changed`."""
    linear = next(iter(first(g, ATTENTION).users))
    x, weight, bias = arguments(linear).values()
    operands = {
        "x": x,
        "weight": make(g, TRANSPOSE, weight, 0, 1, before=linear),
        "limits": constant(g, [0.5] * 24),
        "bias": bias,
    }
    sparse = make(g, SPARSE_LINEAR, *(operands | changed).values(), before=linear, layer=0)
    linear.replace_all_uses_with(sparse)
    sweep(g)
    return sparse


def projection_is_of_no_layer(g: GraphModule) -> None:
    del skip(g).meta["layer"]


def projection_is_of_a_layer_too_many(g: GraphModule) -> None:
    skip(g).meta["layer"] = 2


def a_limit_too_few(g: GraphModule) -> None:
    skip(g, limits=constant(g, [0.5] * 23))


def weight_has_a_row_for_each_output(g: GraphModule) -> None:
    skip(g, weight=arguments(first(g, FFN))["up"])


def projection_has_lost_its_origin(g: GraphModule) -> None:
    del skip(g).meta["from"]


# --- from partitioned on


def neuron_is_in_both_parts(g: GraphModule) -> None:
    table(g, 0)[0] = 2


def neuron_is_in_a_part_twice(g: GraphModule) -> None:
    table(g, 0)[1] = 1


def neuron_is_outside(g: GraphModule) -> None:
    table(g, 1)[-1] = OPT.ffn


def tables_are_shifted_by_one(g: GraphModule) -> None:
    table(g, 1)[:] += 1


def down_is_selected_by_the_other_table(g: GraphModule) -> None:
    hot, _ = parts(g)
    same = g.layer_0_hot_neurons.clone()
    down = arguments(hot)["down"]
    put(down, "index", constant(g, same.tolist()))


def bias_is_of_the_first_rows(g: GraphModule) -> None:
    hot, _ = parts(g)
    bias = constant(g, [0.0] * 3)
    put(hot, "up_bias", bias)
    mask = arguments(hot)["mask"]
    put(mask, "weights", [arguments(mask)["weights"][0], bias])
    sweep(g)


def parts_are_of_different_wholes(g: GraphModule) -> None:
    _, cold = parts(g)
    up = arguments(cold)["up"]
    put(up, "self", arguments(list(calls(g.graph, SPARSE_FFN))[2])["up"])


def down_bias_is_added_twice(g: GraphModule) -> None:
    hot, cold = parts(g)
    put(cold, "down_bias", arguments(hot)["down_bias"])


def both_parts_are_hot(g: GraphModule) -> None:
    parts(g)[1].meta["device"] = "hot"


def part_says_no_device(g: GraphModule) -> None:
    del parts(g)[0].meta["device"]


def parts_are_not_added(g: GraphModule) -> None:
    hot, cold = parts(g)
    total = next(iter(hot.users))
    total.args = (hot, arguments(next(iter(total.users)))["self"])
    put(next(iter(total.users)), "self", cold)


def row_local_part_has_a_table_too(g: GraphModule) -> None:
    put(parts(g)[0], "neurons", constant(g, [0, 1, 2]))


def one_side_is_not_selected(g: GraphModule) -> None:
    hot, _ = parts(g)
    small = constant(g, [[0.0] * OPT.hidden] * 3)
    put(hot, "up", small)
    mask = arguments(hot)["mask"]
    put(mask, "weights", [small, *arguments(mask)["weights"][1:]])
    sweep(g)


def limited(g: GraphModule, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Gives the first block limits."""
    put(first(g, SPARSE_FFN), name, Rewriter(g, "breaker").constant("breaker", torch.zeros(OPT.ffn, dtype=dtype)))


def limits_of_no_gate(g: GraphModule) -> None:
    limited(g, "gate_limits")


def limits_are_of_double_precision(g: GraphModule) -> None:
    limited(g, "output_limits", torch.float64)


def limits_are_too_few(g: GraphModule) -> None:
    put(first(g, SPARSE_FFN), "output_limits", constant(g, [0.0, 1.0]))


def one_part_has_limits(g: GraphModule) -> None:
    table = arguments(arguments(parts(g)[1])["up"])["index"]
    whole = Rewriter(g, "breaker").constant("breaker", torch.zeros(OPT.ffn))
    put(parts(g)[1], "output_limits", make(g, INDEX_SELECT, whole, 0, table, before=parts(g)[1]))


# --- quantized


def matrix_is_not_packed(g: GraphModule) -> None:
    node = first(g, LINEAR)
    put(node, "weight", arguments(arguments(node)["weight"].args[0])["weight"])
    sweep(g)


def formats_differ(g: GraphModule) -> None:
    node = first(g, DEQUANTIZE)
    put(node, "format", "q4")


def packed_is_not_from_quantize(g: GraphModule) -> None:
    node = first(g, DEQUANTIZE)
    packed = node.args[0]
    zeros = torch.zeros(packed.meta["val"].shape, dtype=torch.uint8)
    put(node, "packed", Rewriter(g, "breaker").constant("breaker", zeros))
    sweep(g)


def weight_is_packed_twice(g: GraphModule) -> None:
    end = head(g)
    weight = arguments(end.args[1].args[0])["weight"]
    packed = make(g, QUANTIZE, weight, "q8", before=end)
    put(end, "weight", make(g, DEQUANTIZE, packed, "q8", OPT.hidden, before=end))


@dataclass(frozen=True)
class Case:
    """A change that must be found by `rule` at `stage`, with `message` in the text."""

    stage: Stage
    rule: str
    change: Callable[[GraphModule], None]
    message: str
    shape: GraphShape = OPT


C0, C1, C2, C3, C4 = Stage
CASES = [
    Case(C0, "well-formed", uses_before_definition, "used before it has been defined"),
    Case(C0, "well-formed", weight_is_missing, "weight"),
    Case(C0, "well-formed", weight_is_a_module, "model.norm is a Module, not a tensor"),
    Case(C0, "placeholders", input_has_another_name, "the inputs are tokens, places, not tokens, positions"),
    Case(C0, "placeholders", input_is_missing, "the inputs are tokens, not tokens, positions"),
    Case(C0, "placeholders", input_is_float, "not int64[tokens]"),
    Case(C0, "placeholders", inputs_differ_in_length, "of another length"),
    Case(C0, "values", value_has_another_shape, "is float32[7, 24], but the value float32["),
    Case(C0, "values", value_has_another_dtype, "is float64["),
    Case(C0, "values", value_is_missing, 'at layer_norm: has no meta["val"]'),
    Case(C0, "values", weight_changed_size, "is float32[24], but the value float32[25]"),
    Case(C0, "values", operator_rejects_its_arguments, "does not accept"),
    Case(C1, "operators", foreign_operator, "aten.relu.default is not allowed on tokens"),
    Case(C1, "operators", constant_operator_on_tokens, "aten.index_select.default is not allowed on tokens"),
    Case(C1, "operators", token_operator_on_constants, "picompile.layer_norm.default is not allowed on constants"),
    Case(C1, "operators", calls_a_module, "call_module model.norm is no operator"),
    Case(C1, "operators", sparse_block_before_predictors, "picompile.predict.default is not allowed"),
    Case(C2, "operators", dense_block_is_left, "picompile.ffn.default is not allowed"),
    Case(C1, "token-path", value_is_a_vector, "not float32[tokens, dim]"),
    Case(C1, "token-path", value_is_an_integer, "is int64["),
    Case(C1, "arguments", bias_is_too_long, "bias is float32[25], but weight makes that 25 a 24"),
    Case(C1, "arguments", weight_is_transposed, "weight is float32[50, 27], but x makes that 27 a 24"),
    Case(C1, "arguments", gate_and_up_differ, "up is float32[40, 24], but gate makes that 40 a 39"),
    Case(C1, "arguments", bias_is_a_matrix, "bias is float32[1, 24], which has not 1 dimensions"),
    Case(C1, "heads", key_heads_do_not_divide, "3 heads and 3 key heads do not fit q, k, v of 24, 25, 24"),
    Case(C1, "heads", key_heads_are_of_another_size, "3 heads and 3 key heads do not fit q, k, v of 24, 36, 24"),
    Case(C1, "heads", too_few_frequencies, "3 heads of 2 frequencies do not fit 24", shape=LLAMA),
    Case(C1, "heads", a_slope_too_few, "its slopes are float32[2], not one for each of 3"),
    Case(C1, "arguments", sinks_are_a_matrix, "sinks is float32[1, 3], which has not 1 dimensions"),
    Case(C1, "groups", groups_do_not_divide, "5 groups do not divide 24 features"),
    Case(C1, "groups", there_are_no_groups, "0 groups do not divide 24 features"),
    Case(C1, "expressions", expression_is_none, "there is no function twice of 1 operands"),
    Case(C1, "expressions", expression_reads_a_missing_input, "step 0 reads x1, which there is not"),
    Case(C1, "expressions", vector_of_an_expression_is_too_short, "float32[23], which does not fit 24 columns"),
    Case(C1, "expressions", constant_of_an_expression_is_a_matrix, "float32[1, 24], which does not fit 24 columns"),
    Case(C1, "windows", window_is_negative, "its window is -1"),
    Case(C1, "windows", soft_cap_is_negative, "its soft cap is -30.0"),
    Case(C1, "windows", soft_cap_is_infinite, "its soft cap is inf"),
    Case(C1, "gates", gate_and_up_are_swapped, "at ffn: its up has the activation relu, its gate none"),
    Case(C1, "unused", weight_is_not_read, "weight left_over is read by no node"),
    Case(C1, "unused", buffer_is_not_read, "weight left_over is read by no node"),
    Case(C1, "unused", value_is_not_used, "its value is not used"),
    Case(C1, "layers", attention_counts_from_one, "is layer 1, and 1 by its metadata; it should be 0"),
    Case(C1, "layers", attention_repeats_a_number, "is layer 0, and 0 by its metadata; it should be 1"),
    Case(C1, "layers", attention_metadata_differs, "is layer 0, and 1 by its metadata; it should be 0"),
    Case(C1, "layers", block_is_of_no_layer, "is of layer None, where 0 to 1 may stand"),
    Case(C1, "layers", block_is_of_a_layer_too_many, "is of layer 2, where 0 to 1 may stand"),
    Case(C1, "layers", blocks_are_out_of_order, "is of layer 0, where 1 to 1 may stand"),
    Case(C1, "layers", projection_is_of_no_layer, "is of layer None, where 0 to 1 may stand"),
    Case(C1, "layers", projection_is_of_a_layer_too_many, "is of layer 2, where 0 to 1 may stand"),
    Case(C1, "arguments", a_limit_too_few, "limits is float32[23], but x makes that 23 a 24"),
    Case(C1, "arguments", weight_has_a_row_for_each_output, "weight is float32[40, 24], but x makes that 40 a 24"),
    Case(C1, "provenance", projection_has_lost_its_origin, 'at sparse_linear: has no meta["from"]'),
    Case(C1, "head", ends_in_an_add, "returns add_"),
    Case(C1, "head", ends_in_arithmetic_on_no_linear, "returns elementwise"),
    Case(C1, "head", gives_back_two_values, "which is not one linear"),
    Case(C2, "provenance", origin_is_lost, 'at predict: has no meta["from"]'),
    Case(C4, "provenance", origin_of_packing_is_lost, 'has no meta["from"]'),
    Case(C2, "masks", mask_comes_from_elsewhere, "comes from no predict"),
    Case(C2, "masks", mask_is_of_another_layer, "its mask predict is of layer 0"),
    Case(C2, "masks", mask_is_of_another_input, "is predicted from another input"),
    Case(C2, "masks", mask_is_too_short, "has 40 neurons, but its mask 39"),
    Case(C2, "masks", table_points_beyond_the_mask, "its neurons are 40 to 40, but its mask has 40"),
    Case(C2, "masks", table_is_computed, "its neurons are no table of the module"),
    Case(C2, "predictors", predictor_reads_another_matrix, "its predictor exact reads"),
    Case(C2, "predictors", predictor_lacks_the_bias, "its predictor exact reads"),
    Case(C2, "predictors", threshold_has_the_wrong_sign, "its threshold is 0.5, relu's 0.0"),
    Case(C2, "predictors", exact_on_silu, "its predictor is exact, but silu is never silent"),
    Case(C2, "predictors", none_reads_something_else, "its predictor none does not read its up"),
    Case(C2, "predictors", sign_reads_the_bias_too, "its predictor sign reads"),
    Case(C2, "masks", predictor_without_weights_of_its_own_reads_the_stream, "is predicted from another input"),
    Case(C2, "masks", learned_reads_the_block_two_layers_before, "from another input", shape=GraphShape(layers=3)),
    Case(C2, "masks", learned_reads_the_input_of_attention, "is predicted from another input"),
    Case(C2, "predictors", learned_has_a_bias_of_another_length, "bias of its predictor is float32[1], not [40]"),
    Case(C2, "predictors", learned_has_a_bias_of_two_dimensions, "float32[40, 1], not of 1 dimensions"),
    Case(C2, "predictors", learned_reads_another_width, "fc1 of its predictor is float32[3, 23], not [3, 24]"),
    Case(C2, "predictors", learned_has_two_ranks, "fc2 of its predictor is float32[40, 3], not [40, 2]"),
    Case(C2, "predictors", learned_has_no_bias, "its predictor learned has 2 weights, not fc1, fc2, bias"),
    Case(C2, "squares", squares_are_divided_by_another_number, "divides by 39 neurons, but there are 40", NORMED),
    Case(C2, "squares", bias_is_divided, "has squares, so that its down_bias would be divided", NORMED),
    Case(C2, "squares", squares_are_doubled, "has squares, but what reads it is no divide_by_rms", NORMED),
    Case(C2, "squares", bias_of_a_division_is_too_long, "its bias has 1 elements, not 24", NORMED),
    Case(C2, "limits", limits_of_no_gate, "has gate_limits, but no gate"),
    Case(C2, "limits", limits_are_of_double_precision, "its output_limits are float64[40], not float32"),
    Case(C2, "arguments", limits_are_too_few, "output_limits is float32[2], but"),
    Case(C3, "parts", one_part_has_limits, "output_limits is not selected from the same weight as in"),
    Case(C3, "parts", neuron_is_in_both_parts, "neuron 2 is in the layer's parts more than once"),
    Case(C3, "parts", neuron_is_in_a_part_twice, "neuron 1 is in the layer's parts more than once"),
    Case(C3, "parts", neuron_is_outside, "a table names a neuron outside 0 to 39"),
    Case(C3, "parts", tables_are_shifted_by_one, "a table names a neuron outside 0 to 39"),
    Case(C3, "parts", down_is_selected_by_the_other_table, "down is selected by breaker, but up by layer_0_hot"),
    Case(C3, "parts", bias_is_of_the_first_rows, "up_bias is selected by None"),
    Case(C3, "parts", parts_are_of_different_wholes, "up is not selected from the same weight as in"),
    Case(C3, "parts", down_bias_is_added_twice, "down_bias is here and in"),
    Case(C3, "parts", both_parts_are_hot, "the layer's parts are on ['hot', 'hot'], not one hot and one cold"),
    Case(C3, "parts", part_says_no_device, "the layer's parts are on [None, 'cold']"),
    Case(C3, "parts", parts_are_not_added, "are not added"),
    Case(C3, "parts", row_local_part_has_a_table_too, "its neurons are breaker, not None"),
    Case(C3, "parts", one_side_is_not_selected, "is selected by None, but up by None"),
    Case(C4, "packed", matrix_is_not_packed, "is not dequantized"),
    Case(C4, "packed", formats_differ, "reads format q4, but"),
    Case(C4, "packed", packed_is_not_from_quantize, "is not quantized"),
    Case(C4, "packed-once", weight_is_packed_twice, "is packed here and in quantize"),
]


@pytest.mark.parametrize(
    "shape", [LLAMA, OPT, GraphShape(activation="silu", kv_heads=1), GraphShape(fused=True, layers=1)]
)
@pytest.mark.parametrize("stage", Stage)
def test_sound_graphs_pass(stage, shape):
    verify(at_stage(stage, shape), stage)


@pytest.mark.parametrize(("source", "layer"), [("block", 0), ("stream", 0), ("stream", 2), ("previous", 2)])
def test_sound_learned_predictors_pass(source, layer):
    shape = GraphShape(layers=3, hidden=18, ffn=11)
    pass_ = InsertPredictors("learned", ranks={0: 1, 1: 5, 2: 3}, inputs={layer: source})
    graph_module = build(shape)
    for each in (pass_, Partition({layer: (1, 7)}), Quantize("q8")):
        graph_module = each(graph_module).graph_module
        verify(graph_module, each.ensures)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.change.__name__}")
def test_a_broken_graph_fails_by_the_rule_it_breaks(case):
    graph_module = at_stage(max(case.stage, Stage.CANONICAL), case.shape)
    case.change(graph_module)
    with pytest.raises(VerifyError) as error:
        verify(graph_module, case.stage)
    assert error.value.rule == case.rule
    assert case.message in str(error.value)
    assert f"rule {case.rule!r} broken" in str(error.value)
    if error.value.node is not None:
        assert f"at {error.value.node.name}:" in str(error.value)
        (marked,) = [line for line in error.value.context.splitlines() if line.startswith(">")]
        assert marked.split()[1] == error.value.node.name
        assert len(error.value.context.splitlines()) == 10
        assert error.value.context in str(error.value)


def test_every_rule_is_seen_to_fail():
    assert {rule.name for rules in RULES.values() for rule in rules} == {case.rule for case in CASES}


def test_a_later_stage_has_every_rule_of_an_earlier_one():
    for earlier, later in zip(Stage, list(Stage)[1:], strict=False):
        names = [[rule.name for rule in RULES[stage]] for stage in (earlier, later)]
        assert set(names[0]) <= set(names[1])


def test_columns_of_a_packed_matrix():
    """The values and arguments rules see this too, wherever a graph can hold it: here the rule by itself."""
    graph_module = at_stage(Stage.QUANTIZED)
    node = first(graph_module, DEQUANTIZE)
    put(node, "columns", OPT.hidden + 1)
    (fault,) = check_packed(graph_module)
    assert fault.node is node
    assert fault.message == f"reads 25 columns, but {node.args[0].args[0].name} has 24"
