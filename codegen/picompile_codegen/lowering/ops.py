"""Operators without state as kernel calls, and what the host chooses a token from.

Where the output head runs on the accelerator, logits stay there, and the runtime copies them when the step is over: a
chunk's logits are megabytes, which the copy engine of a GPU moves at the speed of the bus. Where the next token may be
asked for, the highest of them go to the host within the step, which reads the others only if it needs them.
"""

from dataclasses import replace

from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.linear import is_returned, linear_call, norm_call
from picompile_codegen.lowering.operators import lowers
from picompile_codegen.lowering.program import Arg, TopLogitsBuffers
from picompile_codegen.lowering.streaming import stream_linear, streams
from picompile_codegen.specs import (
    MOST_TOP_LOGITS,
    AddSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    TopLogitsSpec,
)
from picompile_passes.graph import operands as op
from picompile_passes.graph.nodes import arguments, constant_nodes

# A token is chosen after each of these functions.
CHOOSING = ("decode", "prefill_last", "batch")


def hand_over(node: Node, logits: Arg, function: Function) -> None:
    """Append the call that lets the host choose from `logits`, which the head `node` has made on the accelerator."""
    if function.name not in CHOOSING:
        return
    function.top_logits = top_logits_buffers(function.logits)
    # The end of the step, which the host waits for, is all the order that these need.
    scores, ids = (Arg("buffer", name) for name in (function.top_logits.scores, function.top_logits.ids))
    function.call(TopLogitsSpec(dimension(node), function.rows), {"logits": logits, "scores": scores, "ids": ids})


def top_logits_buffers(logits: str) -> TopLogitsBuffers:
    """Return the names of the buffers for the highest of the logits in the buffer `logits`."""
    name = logits.replace("logits", "leading", 1)
    return TopLogitsBuffers(f"{name}.scores", f"{name}.ids")


def top_logits_shapes(logits: str, rows: int, vocab: int) -> list[tuple[str, str, tuple[int, int]]]:
    """Return name, dtype and shape of each of these buffers, for `rows` rows of logits."""
    names, shape = top_logits_buffers(logits), (rows, min(MOST_TOP_LOGITS, vocab))
    return [(names.scores, "float32", shape), (names.ids, "int32", shape)]


@lowers(op.EMBEDDING)
def _embedding(node: Node, function: Function) -> None:
    values = arguments(node)
    (matrix,) = function.shared.weights.whole_matrices([values["weight"]])
    spec = EmbeddingSpec(
        format=matrix.format,
        vocab=matrix.rows,
        dim=dimension(node),
        rows=function.rows,
        offset=values["offset"],
        panels=matrix.panels,
    )
    ids = replace(function.input(values["ids"].name), shape=(function.rows,))
    bindings: Bindings = {"ids": ids, "w": matrix, "y": function.result(node)}
    # A lookup reads one row a token, not the table.
    function.call(spec, bindings, weight_bytes=matrix.row_bytes * function.rows)


@lowers(op.LINEAR)
def _linear(node: Node, function: Function) -> None:
    spec, bindings = linear_call(node, function)
    is_output = is_returned(node)
    y = Arg("buffer", function.logits) if is_output else function.result(node)
    if streams(node, bindings["w"], function):
        stream_linear(spec, bindings, y, function)
        return
    function.call(spec, bindings | {"y": y}, op="head" if op.makes_logits(node) else "linear")
    if is_output and function.device == "accelerator":
        hand_over(node, y, function)


@lowers(op.RMS_NORM, op.LAYER_NORM)
def _norm(node: Node, function: Function) -> None:
    spec, vectors = norm_call(node, function)
    function.call(spec, {"x": function.value(arguments(node)["x"]), "y": function.result(node), **vectors})


@lowers(op.ELEMENTWISE)
def _elementwise(node: Node, function: Function) -> None:
    values = arguments(node)
    dim, constants = dimension(node), constant_nodes(node.graph)
    kinds, bindings = "", Bindings()
    for number, value in enumerate(values["inputs"]):
        one, is_constant = dimension(value) == 1 and dim > 1, value in constants
        kinds += ("n" if one else "v") if is_constant else ("t" if one else "r")
        bindings[f"x{number}"] = function.shared.weights.vector(value) if is_constant else function.value(value)
    spec = ElementwiseSpec(dim=dim, rows=function.rows, inputs=kinds, expression=values["expression"])
    is_output = is_returned(node)
    bindings["y"] = Arg("buffer", function.logits) if is_output else function.result(node)
    function.call(spec, bindings)
    if is_output and function.device == "accelerator":
        hand_over(node, bindings["y"], function)  # type: ignore[arg-type]


@lowers(op.DIVIDE_BY_RMS)
def _divide_by_rms(node: Node, function: Function) -> None:
    values = arguments(node)
    bias = values["bias"] is not None
    spec = DivideByRmsSpec(
        dim=dimension(node), rows=function.rows, neurons=values["neurons"], eps=values["eps"], bias=bias
    )
    bindings: Bindings = {"x": function.value(values["x"]), "y": function.result(node)}
    function.call(spec, bindings | function.vectors(values, "bias"))


@lowers(op.ADD)
def _add(node: Node, function: Function) -> None:
    values = arguments(node)
    a, b = function.value(values["self"]), function.value(values["other"])
    function.call(AddSpec(dimension(node), function.rows), {"a": a, "b": b, "y": function.result(node)})
