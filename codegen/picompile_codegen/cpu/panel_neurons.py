"""Neurons of feed-forward blocks whose matrices lie in panels: their outputs, from the panels of gate and up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_matrix import PanelMatrix
from picompile_codegen.cpu.panel_products import (
    Emit,
    PanelInputs,
    TokenRun,
    multiply_panel,
    panel_inputs,
    quantize_tokens,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop, select
from picompile_codegen.cpu.vector import LANES, activate, at
from picompile_codegen.specs import WholeFfnSpec

# Returns the column of `PanelNeurons.hidden` that a neuron has.
Column = Callable[[Expr], Expr]


@dataclass(frozen=True)
class PanelNeurons:
    """The neurons of a block: `matrices` gate and up, or up alone, and what they are multiplied with, by format.

    Outputs of neurons, float32, go into a row of `hidden` for each token.
    """

    spec: WholeFfnSpec
    matrices: Sequence[PanelMatrix]
    inputs: dict[str, PanelInputs]
    gate_bias: KernelTensor | None
    up_bias: KernelTensor | None
    hidden: KernelTensor

    @classmethod
    def declare(cls, spec: WholeFfnSpec, function: KernelFunction, rows: int, columns: int) -> "PanelNeurons":
        """Declare memory for x, and for the outputs: `rows` of `columns` each."""
        gate, up = KernelMatrix.optional(function, "gate_w"), KernelMatrix.argument(function, "up_w")
        hidden = function.scratch("hidden", "float32", rows, columns)
        matrices = [matrix for matrix in (gate, up) if matrix is not None]
        # Formats differ in the sums of inputs that they need.
        inputs = {
            matrix.format: panel_inputs(
                function, f"x{number or ''}", spec.rows, spec.dim, matrix, spec.activation_bytes
            )
            for number, matrix in enumerate({matrix.format: matrix for matrix in matrices}.values())
        }
        panels = [PanelMatrix(matrix) for matrix in matrices]
        return cls(spec, panels, inputs, function.get("gate_bias"), function.get("up_bias"), hidden)

    @property
    def panels(self) -> int:
        """The panels of gate, and of up."""
        return self.matrices[0].panels

    @property
    def bytes(self) -> int:
        """Size of gate and up in memory."""
        return sum(panels.matrix.bytes for panels in self.matrices)

    def quantize(self, x: KernelTensor, tokens: Expr) -> None:
        """Take in the first `tokens` rows of x."""
        for inputs in self.inputs.values():
            quantize_tokens(x, tokens, self.spec.dim, inputs)

    def compute(self, taken: tuple[Expr, int], run: TokenRun, column: Column, behind: Expr) -> None:
        """Compute the neurons of panels (first, count) for a run of tokens; those from panel `behind` on come next."""
        first, count = taken
        for number, (panels, emit) in enumerate(zip(self.matrices, self._emits(column), strict=True)):
            is_last = number + 1 == len(self.matrices)
            next_panels = (self.matrices[0], behind) if is_last else (self.matrices[number + 1], first)
            multiply_panel(panels, (first, count), self.inputs[panels.matrix.format], run, emit, next_panels)

    def _emits(self, column: Column) -> list[Emit]:
        """Return what takes the products of each matrix: the last one makes the neurons' outputs."""
        spec, hidden = self.spec, self.hidden
        up = _activated(spec.up_activation if spec.gated else spec.activation, self.up_bias)

        def store_up(token: Expr, neuron: Expr, lanes: int, products: Expr) -> None:
            value, columns = up(neuron, lanes, products), at(column(neuron), lanes)
            hidden[token, columns] = value * hidden[token, columns] if spec.gated else value

        if not spec.gated:
            return [store_up]
        gate = _activated(spec.activation, self.gate_bias)

        def store_gate(token: Expr, neuron: Expr, lanes: int, products: Expr) -> None:
            hidden[token, at(column(neuron), lanes)] = gate(neuron, lanes, products)

        return [store_gate, store_up]

    def count(self, stats: KernelTensor, tokens: Expr) -> None:
        """Add to `stats` the neurons of `tokens` rows of `hidden`, and those whose output is not zero."""
        columns, fired = self.hidden.columns, counter()
        with loop(0, tokens) as token, loop(0, columns) as neuron:
            fired[0] = fired[0] + tirx.Cast("int32", select(self.hidden[token, neuron] != 0.0, 1, 0))
        stats[0] = stats[0] + tirx.Cast("int64", tokens * columns)
        stats[1] = stats[1] + tirx.Cast("int64", fired[0])


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
