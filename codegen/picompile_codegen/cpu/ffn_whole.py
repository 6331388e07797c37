"""Feed-forward blocks that compute every neuron, with matrices in panels: for any number of tokens, to the same bits.

A task computes the neurons of a panel, its rows of gate and then of up. Another step multiplies all of them with down.
"""

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_neurons import PanelNeurons
from picompile_codegen.cpu.panel_products import (
    TokenRun,
    multiply_in_panels,
    panel_inputs,
    panels_of_task,
    quantize_tokens,
)
from picompile_codegen.cpu.tensor import Expr, bind, parallel, worth_a_region
from picompile_codegen.cpu.vector import at
from picompile_codegen.specs import WholeFfnSpec


@body(WholeFfnSpec)
def ffn_whole(spec: WholeFfnSpec, function: KernelFunction) -> None:
    """Write the body of a `WholeFfnSpec`."""
    y, down_bias, down = function["y"], function.get("down_bias"), KernelMatrix.argument(function, "down_w")
    neurons = PanelNeurons.declare(spec, function, spec.rows, spec.neurons)
    inner = panel_inputs(function, "hidden", spec.rows, spec.neurons, down, spec.activation_bytes)
    tokens = function.tokens(spec.rows)

    neurons.quantize(function["x"], tokens)
    count = panels_of_task(neurons.panels, spec.rows)
    with parallel(neurons.panels // count, when_worth=worth_a_region(neurons.bytes)) as task:
        first = task if count == 1 else bind(task * count)
        neurons.compute((first, count), TokenRun(tokens), lambda neuron: neuron, behind=first + count)
    if spec.counts:
        neurons.count(function["stats"], tokens)

    def store(token: Expr, output: Expr, lanes: int, products: Expr) -> None:
        outputs = at(output, lanes)
        y[token, outputs] = products if down_bias is None else products + down_bias[outputs]

    quantize_tokens(neurons.hidden, tokens, spec.neurons, inner)
    multiply_in_panels(down, inner, tokens, store)
