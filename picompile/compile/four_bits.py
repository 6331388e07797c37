"""`--quant 4bit`: a format for each matrix, so that the model takes no more bytes than llama.cpp's Q4_K_M of it.

Matrices differ in what 4 bits cost them, and the model in what the error of a matrix costs it. So the bits that Q4_K_M
would take for the same shapes are spent where they make most of the expected loss go away:

    Σ over matrices of sensitivity · Σ (rounded - weight)² / Σ weight²

Perplexity grows with the relative squared error of a matrix, times a constant of the matrix (Malinovskii et al.,
"Pushing the Limits of Large Language Model Quantization via the Linearity Theorem", arXiv 2411.17525). The constants
here are a table by the matrix's role, since no text is read; errors are those of some of its rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import GraphModule

from picompile.compile.matrix_uses import MatrixUse, matrix_uses
from picompile.frontend.captured import Captured
from picompile_passes.formats import BLOCK, FORMATS
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource

# Formats to choose from, by their bits. Kernels read all of them in panels.
CANDIDATES = ("q4_k", "q4_1", "q5", "q5_k", "q6_k", "q8")
# How much of a matrix's relative squared error the model feels. The first and the last eighth of the layers feel more.
SENSITIVITY = {"v": 2.0, "down": 1.5, "o": 1.0, "ffn": 1.0, "qk": 0.7, "head": 4.0, "embedding": 0.5}
_AT_THE_ENDS = 1.5
# Rows of a matrix by which its errors are known, spread over it.
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class _Matrix:
    """A matrix: how many weights it has, what the model feels of its error, and what it is rounded to, by format."""

    parameter: str
    weights: int
    costs: Mapping[str, float]

    def bits(self, form: str) -> float:
        """Return the bits that all of its weights take in a format."""
        return self.weights * FORMATS[form].bits


def choose_four_bits(captured: Captured, graph_module: GraphModule) -> dict[str, str]:
    """Return a format for each matrix of a predicted graph that kernels read in panels, by its parameter."""
    uses = [use for use in matrix_uses(graph_module) if use.in_panels]
    merged: dict[str, list[MatrixUse]] = {}
    for use in uses:
        merged.setdefault(use.parameter, []).append(use)
    layers, weights = captured.facts.layers, captured.weights
    matrices, budget = [], 0.0
    for parameter, group in merged.items():
        size = prod(weights.shape(parameter))
        budget += size * max(_q4_k_m_bits(use, layers) for use in group)
        sensitivity = max(_sensitivity(use, layers) for use in group)
        errors = _errors(weights, parameter)
        matrices.append(_Matrix(parameter, size, {form: sensitivity * error for form, error in errors.items()}))
    return _spend(matrices, budget)


def _sensitivity(use: MatrixUse, layers: int) -> float:
    at_the_ends = use.layer is not None and not layers // 8 <= use.layer < layers - max(1, layers // 8)
    return SENSITIVITY[use.role] * (_AT_THE_ENDS if at_the_ends else 1.0)


def _q4_k_m_bits(use: MatrixUse, layers: int) -> float:
    """Return the bits a weight that llama.cpp's Q4_K_M takes: `llama_tensor_get_type` of llama-quant.cpp.

    Rows that are no whole blocks of 256 have Q5_0 in place of Q4_K, and Q8_0 in place of Q6_K.
    """
    layer = use.layer or 0
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    is_finer = use.role == "head" or (use.role in ("v", "down") and more)
    whole = use.columns % BLOCK == 0
    names = ("Q6_K" if whole else "Q8_0") if is_finer else ("Q4_K" if whole else "Q5_0")
    return {"Q4_K": 4.5, "Q5_0": 5.5, "Q6_K": 6.5625, "Q8_0": 8.5}[names]


def _errors(weights: WeightSource, parameter: str) -> dict[str, float]:
    """Return the relative squared error of some rows of a matrix in each format."""
    matrix = weights.load(parameter)
    rows = matrix[:: max(1, len(matrix) // _SAMPLED_ROWS)][:_SAMPLED_ROWS].to(torch.float32)
    total = float(rows.square().sum()) or 1.0
    return {
        form: float((dequantize_rows(quantize_rows(rows, form), form, rows.shape[1]) - rows).square().sum()) / total
        for form in CANDIDATES
    }


def _spend(matrices: Sequence[_Matrix], budget: float) -> dict[str, str]:
    """Return the formats that cost least within `budget` bits, as far as giving the best next one each time finds them.

    Each begins in the smallest format. The next step is the one that saves most for its bits.
    """
    chosen = {each.parameter: min(each.costs, key=lambda form: FORMATS[form].bits) for each in matrices}
    left = budget - sum(each.bits(chosen[each.parameter]) for each in matrices)
    steps = {each.parameter: list(_steps(each, chosen[each.parameter])) for each in matrices}
    while True:
        best = max(
            (
                (saved / bits, parameter, form, bits)
                for parameter, found in steps.items()
                for saved, bits, form in found[:1]
                if bits <= left
            ),
            default=None,
        )
        if best is None:
            return chosen
        _, parameter, form, bits = best
        chosen[parameter], left = form, left - bits
        steps[parameter].pop(0)


def _steps(matrix: _Matrix, start: str) -> Iterator[tuple[float, float, str]]:
    """Yield what a step to a finer format saves, its bits, and the format: the best for its bits first."""
    current = start
    while True:
        finer = [
            (matrix.costs[current] - matrix.costs[form], matrix.bits(form) - matrix.bits(current), form)
            for form in matrix.costs
        ]
        worth = [step for step in finer if step[0] > 0 and step[1] > 0]
        if not worth:
            return
        step = max(worth, key=lambda each: each[0] / each[1])
        yield step
        current = step[2]
