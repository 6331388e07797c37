"""Feed-forward blocks that compute every neuron, with matrices in panels: for any number of tokens, to the same bits.

A task computes the neurons of a panel, its rows of gate and then of up. Another step multiplies all of them with down.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_matrix import PanelMatrix
from picompile_codegen.cpu.panel_products import (
    Emit,
    PanelInputs,
    multiply_in_panels,
    multiply_panel,
    panel_inputs,
    panels_of_task,
    quantize_tokens,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop, parallel, select, worth_a_region
from picompile_codegen.cpu.vector import LANES, activate, at
from picompile_codegen.specs import WholeFfnSpec


@dataclass(frozen=True)
class _Projection:
    """A matrix with a row for each neuron, what it is multiplied with, and what takes its products."""

    panels: PanelMatrix
    inputs: PanelInputs
    emit: Emit


@body(WholeFfnSpec)
def ffn_whole(spec: WholeFfnSpec, function: KernelFunction) -> None:
    """Write the body of a `WholeFfnSpec`."""
    x, y, down_bias = function["x"], function["y"], function.get("down_bias")
    gate, up = KernelMatrix.optional(function, "gate_w"), KernelMatrix.argument(function, "up_w")
    down = KernelMatrix.argument(function, "down_w")
    hidden = function.scratch("hidden", "float32", spec.rows, spec.neurons)
    matrices = [matrix for matrix in (gate, up) if matrix is not None]
    # Formats differ in the sums of inputs that they need.
    inputs = {
        matrix.format: panel_inputs(function, f"x{number or ''}", spec.rows, spec.dim, matrix, spec.activation_bytes)
        for number, matrix in enumerate({matrix.format: matrix for matrix in matrices}.values())
    }
    inner = panel_inputs(function, "hidden", spec.rows, spec.neurons, down, spec.activation_bytes)
    tokens = function.tokens(spec.rows)

    for quantized in inputs.values():
        quantize_tokens(x, tokens, spec.dim, quantized)
    emits = _emits(spec, function, hidden)
    projections = [
        _Projection(PanelMatrix(matrix), inputs[matrix.format], emit)
        for matrix, emit in zip(matrices, emits, strict=True)
    ]
    read = sum(matrix.bytes for matrix in matrices)
    panels = projections[0].panels.panels
    count = panels_of_task(panels, spec.rows)
    with parallel(panels // count, when_worth=worth_a_region(read)) as task:
        first = task if count == 1 else bind(task * count)
        for number, each in enumerate(projections):
            is_last = number + 1 == len(projections)
            behind = (projections[0].panels, first + count) if is_last else (projections[number + 1].panels, first)
            multiply_panel(each.panels, (first, count), each.inputs, tokens, each.emit, behind)
    if spec.counts:
        _count(spec, function, hidden, tokens)

    def store(token: Expr, output: Expr, lanes: int, products: Expr) -> None:
        outputs = at(output, lanes)
        y[token, outputs] = products if down_bias is None else products + down_bias[outputs]

    quantize_tokens(hidden, tokens, spec.neurons, inner)
    multiply_in_panels(down, inner, tokens, store)


def _emits(spec: WholeFfnSpec, function: KernelFunction, hidden: KernelTensor) -> list[Emit]:
    """Return what takes the products of each matrix: the last one makes the neurons' outputs."""
    up = _activated(spec.up_activation if spec.gated else spec.activation, function.get("up_bias"))

    def store_up(token: Expr, neuron: Expr, lanes: int, products: Expr) -> None:
        value = up(neuron, lanes, products)
        hidden[token, at(neuron, lanes)] = value * hidden[token, at(neuron, lanes)] if spec.gated else value

    if not spec.gated:
        return [store_up]
    gate = _activated(spec.activation, function.get("gate_bias"))

    def store_gate(token: Expr, neuron: Expr, lanes: int, products: Expr) -> None:
        hidden[token, at(neuron, lanes)] = gate(neuron, lanes, products)

    return [store_gate, store_up]


def _activated(activation: str, bias: KernelTensor | None) -> Callable[[Expr, int, Expr], Expr]:
    """Return what makes activated values of the products of `lanes` neurons, from number `neuron` on."""

    def value(neuron: Expr, lanes: int, products: Expr) -> Expr:
        biased = bind(products if bias is None else products + bias[at(neuron, lanes)])
        if lanes == LANES:
            return bind(activate(activation, biased))
        # Activations are written for eight lanes.
        halves = [
            bind(activate(activation, bind(tirx.Shuffle([biased], list(range(start, start + LANES))))))
            for start in range(0, lanes, LANES)
        ]
        return bind(tirx.Shuffle(halves, list(range(lanes))))

    return value


def _count(spec: WholeFfnSpec, function: KernelFunction, hidden: KernelTensor, tokens: Expr) -> None:
    """Add to `stats` the neurons of all tokens, and those whose output is not zero."""
    stats, fired = function["stats"], counter()
    with loop(0, tokens) as token, loop(0, spec.neurons) as neuron:
        fired[0] = fired[0] + tirx.Cast("int32", select(hidden[token, neuron] != 0.0, 1, 0))
    stats[0] = stats[0] + tirx.Cast("int64", tokens * spec.neurons)
    stats[1] = stats[1] + tirx.Cast("int64", fired[0])
