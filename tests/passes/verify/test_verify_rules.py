"""Each rule of each stage, shown to fail on a graph that breaks it and nothing a rule before it asks for."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from picompile.testing import LLAMA, OPT, GraphShape, build
from picompile_passes.base import Stage
from picompile_passes.errors import VerifyError
from picompile_passes.graph.nodes import argument_position, arguments, attribute, calls
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
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.stamps import Stamps, set_stamps
from picompile_passes.graph.values import fake_like, fake_result
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.verify import RULES, verify
from picompile_passes.verify.structure import check_packed

NORMED = GraphShape(gated=False, ffn_norm=True)


def at_stage(stage: Stage, shape: GraphShape = OPT) -> GraphModule:
    """A sound graph of `stage` that may be changed, its first layer partitioned where that stage has been reached."""
    return copy.deepcopy(made_at_stage(stage, shape))


@cache
def made_at_stage(stage: Stage, shape: GraphShape) -> GraphModule:
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


def change(op: object, **values: object) -> Callable[[GraphModule], None]:
    """Change arguments of the first call of `op`. A list becomes a constant; a function is given graph and call."""

    def apply(g: GraphModule) -> None:
        node = first(g, op)
        for name, value in values.items():
            made = constant(g, value) if isinstance(value, list) else value
            put(node, name, value(g, node) if callable(value) else made)
        sweep(g)

    return apply


def make(graph_module: GraphModule, op: object, *args: object, before: Node) -> Node:
    sources = [*(value for value in tree_leaves(args) if isinstance(value, Node)), before]
    return Rewriter(graph_module, "breaker").call(op, args, before=before, sources=sources)


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


def positions(graph_module: GraphModule) -> Node:
    return graph_module.graph.find_nodes(op="placeholder")[1]


def revalue(node: Node, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    node.meta["val"] = change(node.meta["val"])


def output(graph_module: GraphModule) -> Node:
    return graph_module.graph.output_node()


def head(graph_module: GraphModule) -> Node:
    return output(graph_module).args[0]


def parts(graph_module: GraphModule) -> list[Node]:
    return list(calls(graph_module.graph, SPARSE_FFN))[:2]


def input_is_missing(g: GraphModule) -> None:
    tokens, positions = g.graph.find_nodes(op="placeholder")
    positions.replace_all_uses_with(tokens)
    g.graph.erase_node(positions)


def weight_changed_size(g: GraphModule) -> None:
    g.model.norm.weight = torch.nn.Parameter(torch.empty(OPT.hidden + 1, device="meta"))


def through(g: GraphModule, op: object, *rest: object) -> None:
    """Put a call of `op` before the head."""
    end = head(g)
    put(end, "x", make(g, op, end.args[0], *rest, before=end))


def calls_a_module(g: GraphModule) -> None:
    end = head(g)
    with g.graph.inserting_before(end):
        node = g.graph.call_module("model.norm", (end.args[0],))
    node.meta["val"] = end.args[0].meta["val"]
    put(end, "x", node)


def sparse_block_before_predictors(g: GraphModule) -> None:
    block = first(g, FFN)
    x, *rest = arguments(block).values()
    mask = make(g, PREDICT, x, [rest[1]], "none", 0.0, before=block)
    block.replace_all_uses_with(make(g, SPARSE_FFN, x, mask, None, *rest, before=block))
    g.graph.erase_node(block)


def dense_block_is_left(g: GraphModule) -> None:
    block = first(g, SPARSE_FFN)
    x, _, _, *rest = list(arguments(block).values())[:11]
    block.replace_all_uses_with(make(g, FFN, x, *rest, before=block))
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
    for node in g.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = fake_like(g.graph, attribute(g, str(node.target)))
        elif node.op == "call_function":
            node.meta["val"] = fake_result(node)


def key_of_width(g: GraphModule, width: int) -> None:
    key = arguments(first(g, ATTENTION))["k"]
    put(key, "bias", None)
    put(key, "weight", constant(g, [[0.0] * OPT.hidden] * width))
    key.meta["val"] = fake_result(key)
    sweep(g)


def two_key_heads(g: GraphModule) -> None:
    """For three heads of queries: each of a width that fits, but no two may share one."""
    key_of_width(g, 16)
    attention = first(g, ATTENTION)
    put(attention, "v", arguments(attention)["k"])
    change(ATTENTION, kv_heads=2)(g)


def calculate(g: GraphModule, expression: str, *inputs: Node) -> None:
    """Puts an `elementwise` of the head's input and `inputs` before the head."""
    end = head(g)
    put(end, "x", make(g, ELEMENTWISE, [end.args[0], *inputs], "mul(x0, 2.0)", before=end))
    put(end.args[0], "expression", expression)


def vector_of_an_expression_is_too_short(g: GraphModule) -> None:
    norm = first(g, LAYER_NORM)
    calculate(g, "mul(x0, x1)", arguments(norm)["x"], constant(g, [0.5] * (OPT.hidden - 1)))


def attention_counts_from_one(g: GraphModule) -> None:
    for node in calls(g.graph, ATTENTION):
        put(node, "layer", arguments(node)["layer"] + 1)
    for node in g.graph.nodes:
        if "layer" in node.meta:
            node.meta["layer"] += 1


def layers_are_one(g: GraphModule) -> None:
    for node in g.graph.nodes:
        if "layer" in node.meta:
            node.meta["layer"] = 0
    for node in calls(g.graph, ATTENTION):
        put(node, "layer", 0)


def blocks_are_out_of_order(g: GraphModule) -> None:
    one, other = calls(g.graph, FFN)
    one.meta["layer"], other.meta["layer"] = 1, 0


def ends_in_arithmetic_on_no_linear(g: GraphModule) -> None:
    end = head(g)
    total = make(g, ADD, end, end, before=output(g))
    output(g).args = (make(g, ELEMENTWISE, [total], "tanh(x0)", before=output(g)),)


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


def mask_is_too_short(g: GraphModule) -> None:
    mask = first(g, PREDICT)
    put(mask, "weights", [constant(g, [[0.0] * OPT.hidden] * (OPT.ffn - 1))])
    mask.meta["val"] = mask.meta["val"][:, 1:]


def table_is_computed(g: GraphModule) -> None:
    block = first(g, SPARSE_FFN)
    rows = constant(g, list(range(OPT.ffn)))
    put(block, "neurons", make(g, INDEX_SELECT, rows, 0, rows, before=block))


def early_down(g: GraphModule, mask: Node) -> Node:
    """Return the block's down, moved before its predictor."""
    down = arguments(first(g, SPARSE_FFN))["down"]
    mask.prepend(down)
    return down


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


def bias_is_divided(g: GraphModule) -> None:
    division = first(g, DIVIDE_BY_RMS)
    put(arguments(division)["x"], "down_bias", arguments(division)["bias"])
    put(division, "bias", None)


def down_is_selected_by_the_other_table(g: GraphModule) -> None:
    put(arguments(parts(g)[0])["down"], "index", constant(g, g.layer_0_hot_neurons.tolist()))


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


def parts_are_not_added(g: GraphModule) -> None:
    hot, cold = parts(g)
    total = next(iter(hot.users))
    total.args = (hot, arguments(next(iter(total.users)))["self"])
    put(next(iter(total.users)), "self", cold)


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


def one_part_has_limits(g: GraphModule) -> None:
    table = arguments(arguments(parts(g)[1])["up"])["index"]
    whole = Rewriter(g, "breaker").constant("breaker", torch.zeros(OPT.ffn))
    put(parts(g)[1], "output_limits", make(g, INDEX_SELECT, whole, 0, table, before=parts(g)[1]))


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
    change: Callable[[GraphModule], object]
    message: str
    shape: GraphShape = OPT


C0, C1, C2, C3, C4 = Stage
FAULTS: dict[tuple[Stage, str], list[tuple[Any, ...]]] = {
    (C0, "well-formed"): [
        (lambda g: first(g, ATTENTION).append(first(g, EMBEDDING)), "used before it has been defined"),
        (lambda g: delattr(g.model.norm, "weight"), "weight"),
        (
            lambda g: setattr(g.graph.find_nodes(op="get_attr", target="model.norm.weight")[0], "target", "model.norm"),
            "model.norm is a Module, not a tensor",
        ),
    ],
    (C0, "placeholders"): [
        (lambda g: setattr(positions(g), "name", "places"), "the inputs are tokens, places, not tokens, positions"),
        (input_is_missing, "the inputs are tokens, not tokens, positions"),
        (lambda g: revalue(positions(g), lambda value: value.float()), "not int64[tokens]"),
        (lambda g: revalue(positions(g), lambda value: value.new_empty(7)), "of another length"),
    ],
    (C0, "values"): [
        (
            lambda g: revalue(first(g, ADD), lambda value: value.new_empty((7, OPT.hidden))),
            "is float32[7, 24], but the value float32[",
        ),
        (lambda g: revalue(head(g), lambda value: value.double()), "is float64["),
        (lambda g: first(g, LAYER_NORM).meta.pop("val"), 'at layer_norm: has no meta["val"]'),
        (weight_changed_size, "is float32[24], but the value float32[25]"),
        (lambda g: put(first(g, ADD), "other", head(g).args[1]), "does not accept"),
    ],
    (C1, "operators"): [
        (lambda g: through(g, torch.ops.aten.relu.default), "aten.relu.default is not allowed on tokens"),
        (
            lambda g: through(g, INDEX_SELECT, 1, constant(g, list(range(OPT.hidden)))),
            "aten.index_select.default is not allowed on tokens",
        ),
        (
            change(LAYER_NORM, weight=lambda g, norm: make(g, LAYER_NORM, norm.args[1], None, None, 1e-5, before=norm)),
            "picompile.layer_norm.default is not allowed on constants",
        ),
        (
            change(LAYER_NORM, weight=lambda g, norm: make(g, torch.ops.prims.abs.default, norm.args[1], before=norm)),
            "prims.abs.default is not allowed on constants",
        ),
        (calls_a_module, "call_module model.norm is no operator"),
        (sparse_block_before_predictors, "picompile.predict.default is not allowed"),
    ],
    (C2, "operators"): [(dense_block_is_left, "picompile.ffn.default is not allowed")],
    (C3, "operators"): [(lambda g: through(g, torch.ops.aten.abs.default), "aten.abs.default is not allowed")],
    (C4, "operators"): [(lambda g: through(g, torch.ops.aten.neg.default), "aten.neg.default is not allowed")],
    (C1, "token-path"): [(value_is_a_vector, "not float32[tokens, dim]"), (value_is_an_integer, "is int64[")],
    (C1, "arguments"): [
        (change(LINEAR, bias=[0.0] * (OPT.hidden + 1)), "bias is float32[25], but weight makes that 25 a 24"),
        (
            lambda g: put(head(g), "weight", constant(g, [[0.0] * (OPT.hidden + 3)] * OPT.vocab)),
            "weight is float32[50, 27], but x makes that 27 a 24",
        ),
        (change(FFN, gate=[[0.0] * OPT.hidden] * (OPT.ffn - 1)), "up is float32[40, 24], but gate makes that 40 a 39"),
        (change(LINEAR, bias=[[0.0] * OPT.hidden]), "bias is float32[1, 24], which has not 1 dimensions"),
        (change(ATTENTION, sinks=[[0.5] * OPT.heads]), "sinks is float32[1, 3], which has not 1 dimensions"),
        (lambda g: key_of_width(g, 25), "3 heads and 3 key heads do not fit q, k, v of 24, 25, 24"),
        (lambda g: key_of_width(g, 36), "3 heads and 3 key heads do not fit q, k, v of 24, 36, 24"),
        (two_key_heads, "3 heads and 2 key heads do not fit q, k, v of 24, 16, 16"),
        (change(ROTARY, inverse_frequency=[0.5, 0.25]), "3 heads of 2 frequencies do not fit 24", LLAMA),
        (change(ATTENTION, slopes=[0.5] * (OPT.heads - 1)), "its slopes are float32[2], not one for each of 3"),
        (change(LAYER_NORM, groups=5), "5 groups do not divide 24 features"),
        (change(LAYER_NORM, groups=0), "0 groups do not divide 24 features"),
        (lambda g: calculate(g, "twice(x0)"), "there is no function twice of 1 operands"),
        (lambda g: calculate(g, "mul(x0, x1)"), "step 0 reads x1, which there is not"),
        (vector_of_an_expression_is_too_short, "float32[23], which does not fit 24 columns"),
        (
            lambda g: calculate(g, "mul(x0, x1)", constant(g, [[0.5] * OPT.hidden])),
            "float32[1, 24], which does not fit 24 columns",
        ),
        (change(ATTENTION, window=-1), "its window is -1"),
        (change(ATTENTION, softcap=-30.0), "its soft cap is -30.0"),
        (change(ATTENTION, softcap=float("inf")), "its soft cap is inf"),
        (
            change(FFN, gate=lambda g, block: arguments(block)["up"], up_activation="relu", activation="identity"),
            "at ffn: its up has the activation relu, its gate none",
        ),
    ],
    (C1, "unused"): [
        (lambda g: g.register_buffer("left_over", torch.zeros(3)), "weight left_over is read by no node"),
        (lambda g: make(g, ADD, head(g).args[0], head(g).args[0], before=head(g)), "its value is not used"),
    ],
    (C1, "layers"): [
        (attention_counts_from_one, "no mixer and no block is of layer 0, but one is of layer 2"),
        (layers_are_one, "is a second picompile.attention.default of layer 0"),
        (change(ATTENTION, layer=1), "keeps its state as layer 1, but is of the part mixer and of layer 0"),
        (
            lambda g: first(g, ATTENTION).meta.update(layer=1),
            "keeps its state as layer 0, but is of the part mixer and of",
        ),
        (lambda g: first(g, FFN).meta.pop("layer"), "is of the part block and of layer None"),
        (lambda g: first(g, FFN).meta.update(part="mixer"), "is of the part mixer and of layer 0"),
        (lambda g: first(g, ADD).meta.pop("part"), "is of the part None and of layer"),
        (lambda g: head(g).meta.update(layer=1), "is of the part head and of layer 1"),
        (
            lambda g: first(g, FFN).meta.update(layer=1),
            "reads ffn, which is of the part block and of layer 1",
        ),
        (blocks_are_out_of_order, "reads ffn, which is of the part block and of layer 1"),
    ],
    (C1, "head"): [
        (lambda g: setattr(output(g), "args", (make(g, ADD, head(g), head(g), before=output(g)),)), "returns add_"),
        (ends_in_arithmetic_on_no_linear, "returns elementwise"),
        (lambda g: setattr(output(g), "args", ((head(g), head(g)),)), "which is not one linear"),
    ],
    (C2, "provenance"): [(lambda g: first(g, PREDICT).meta.pop("from"), 'at predict: has no meta["from"]')],
    (C4, "provenance"): [(lambda g: first(g, DEQUANTIZE).meta.pop("from"), 'has no meta["from"]')],
    (C2, "masks"): [
        (mask_comes_from_elsewhere, "comes from no predict"),
        (mask_is_of_another_layer, "its mask predict is of layer 0"),
        (lambda g: put(first(g, PREDICT), "x", first(g, LAYER_NORM)), "is predicted from another input"),
        (mask_is_too_short, "has 40 neurons, but its mask 39"),
        (change(SPARSE_FFN, neurons=[OPT.ffn] * OPT.ffn), "its neurons are 40 to 40, but its mask has 40"),
        (table_is_computed, "its neurons are no table of the module"),
        (change(PREDICT, x=lambda g, mask: arguments(arguments(mask)["x"])["x"]), "is predicted from another input"),
        (
            lambda g: learn(g, 2, (3, 24), (40, 3), (40,), source=arguments(first(g, PREDICT))["x"]),
            "from another input",
            GraphShape(layers=3),
        ),
        (
            lambda g: learn(g, 0, (3, 24), (40, 3), (40,), source=first(g, LAYER_NORM)),
            "is predicted from another input",
        ),
    ],
    (C2, "predictors"): [
        (
            change(PREDICT, weights=lambda g, mask: [early_down(g, mask), *arguments(mask)["weights"][1:]]),
            "its predictor exact reads",
        ),
        (
            lambda g: put(first(g, PREDICT), "weights", arguments(first(g, PREDICT))["weights"][:1]),
            "its predictor exact reads",
        ),
        (change(PREDICT, threshold=0.5), "its threshold is 0.5, relu's 0.0"),
        (change(SPARSE_FFN, activation="silu"), "its predictor is exact, but silu is never silent"),
        (
            change(PREDICT, kind="none", weights=lambda g, mask: [early_down(g, mask)]),
            "its predictor none does not read its up",
        ),
        (change(PREDICT, kind="sign"), "its predictor sign reads"),
        (lambda g: learn(g, 0, (3, 24), (40, 3), (1,)), "bias of its predictor is float32[1], not [40]"),
        (lambda g: learn(g, 0, (3, 24), (40, 3), (40, 1)), "float32[40, 1], not of 1 dimensions"),
        (lambda g: learn(g, 0, (3, 23), (40, 3), (40,)), "fc1 of its predictor is float32[3, 23], not [3, 24]"),
        (lambda g: learn(g, 0, (2, 24), (40, 3), (40,)), "fc2 of its predictor is float32[40, 3], not [40, 2]"),
        (lambda g: learn(g, 0, (3, 24), (40, 3)), "its predictor learned has 2 weights, not fc1, fc2, bias"),
    ],
    (C2, "all-layers"): [
        (lambda g: set_stamps(g, Stamps("model.layers.", (0, 1, 1), 2)), "has 2 of the model's 3 layers"),
    ],
    (C2, "squares"): [
        (change(DIVIDE_BY_RMS, neurons=39), "divides by 39 neurons, but there are 40", NORMED),
        (bias_is_divided, "has squares, so that its down_bias would be divided", NORMED),
        (
            change(DIVIDE_BY_RMS, x=lambda g, division: make(g, ADD, *[arguments(division)["x"]] * 2, before=division)),
            "has squares, but what reads it is no divide_by_rms",
            NORMED,
        ),
        (change(DIVIDE_BY_RMS, bias=[0.0]), "its bias has 1 elements, not 24", NORMED),
    ],
    (C2, "arguments"): [
        (lambda g: limited(g, "gate_limits"), "has gate_limits, but no gate"),
        (lambda g: limited(g, "output_limits", torch.float64), "its output_limits are float64[40], not float32"),
        (change(SPARSE_FFN, output_limits=[0.0, 1.0]), "output_limits is float32[2], but"),
    ],
    (C3, "parts"): [
        (one_part_has_limits, "output_limits is not selected from the same weight as in"),
        (lambda g: table(g, 0)[:1].fill_(2), "neuron 2 is in the layer's parts more than once"),
        (lambda g: table(g, 0)[1:2].fill_(1), "neuron 1 is in the layer's parts more than once"),
        (lambda g: table(g, 1)[-1:].fill_(OPT.ffn), "a table names a neuron outside 0 to 39"),
        (lambda g: table(g, 1).add_(1), "a table names a neuron outside 0 to 39"),
        (down_is_selected_by_the_other_table, "down is selected by breaker, but up by layer_0_hot"),
        (bias_is_of_the_first_rows, "up_bias is selected by None"),
        (parts_are_of_different_wholes, "up is not selected from the same weight as in"),
        (lambda g: put(parts(g)[1], "down_bias", arguments(parts(g)[0])["down_bias"]), "down_bias is here and in"),
        (
            lambda g: parts(g)[1].meta.update(neurons="hot"),
            "the layer's parts are ['hot', 'hot'], not one hot and one cold",
        ),
        (lambda g: parts(g)[0].meta.pop("neurons"), "the layer's parts are [None, 'cold']"),
        (parts_are_not_added, "are not added"),
        (lambda g: put(parts(g)[0], "neurons", constant(g, [0, 1, 2])), "its neurons are breaker, not None"),
        (one_side_is_not_selected, "is selected by None, but up by None"),
    ],
    (C4, "packed"): [
        (
            change(LINEAR, weight=lambda g, node: arguments(arguments(node)["weight"].args[0])["weight"]),
            "is not dequantized",
        ),
        (change(DEQUANTIZE, format="q4"), "reads format q4, but"),
        (packed_is_not_from_quantize, "is not quantized"),
    ],
    (C4, "packed-once"): [(weight_is_packed_twice, "is packed here and in quantize")],
}
CASES = [Case(*place, *row) for place, rows in FAULTS.items() for row in rows]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.message}")
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
        assert error.value.context in str(error.value)


def test_every_rule_is_seen_to_fail_and_holds_at_every_later_stage():
    assert {rule.name for rules in RULES.values() for rule in rules} == {case.rule for case in CASES}
    names = [{rule.name for rule in RULES[stage]} for stage in Stage]
    assert all(earlier <= later for earlier, later in pairwise(names))


def test_columns_of_a_packed_matrix():
    """The values and arguments rules see this too, wherever a graph can hold it: here the rule by itself."""
    graph_module = at_stage(Stage.QUANTIZED)
    node = first(graph_module, DEQUANTIZE)
    put(node, "columns", OPT.hidden + 1)
    (fault,) = check_packed(graph_module)
    assert fault.node is node
    assert fault.message == f"reads 25 columns, but {node.args[0].args[0].name} has 24"
