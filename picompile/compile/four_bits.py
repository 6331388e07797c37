"""`--quant 4bit`: a format for each matrix, so that the model takes no more bytes than llama.cpp's Q4_K_M of it.

Matrices differ in what 4 bits cost them, and the model in what the error of a matrix costs it. So the bits that Q4_K_M
would take for the same shapes are spent where they make most of the expected loss go away:

    Σ over matrices of sensitivity · Σ (rounded - weight)² / Σ weight²

Perplexity grows with the relative squared error of a matrix, times a constant of the matrix (Malinovskii et al.,
"Pushing the Limits of Large Language Model Quantization via the Linearity Theorem", arXiv 2411.17525). The constants
here are a table by the matrix's role, since no text is read; errors are those of some of its rows.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.fx import GraphModule

from picompile.choices import CANDIDATES
from picompile.frontend.captured import Captured
from picompile.frontend.matrix_uses import MatrixUse, matrix_uses
from picompile.rounding.budget import least_cost
from picompile_passes.formats import BLOCK, FORMATS
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.weight_source import WeightSource, load_rows

# How much of a matrix's relative squared error the model feels, over what it feels of a gate matrix. The first and the
# last eighth of the layers feel more. Measured with noise: SmolLM2-135M has 1.3, 3.1, 0.3 and 0.3 for v, down, o and
# qk, and 3.1 · layers for its head; Gemma 3 270M has 0.8, 1.4, 0.7, 0.4 and 0.7 · layers.
SENSITIVITY = {"v": 1.0, "down": 2.0, "o": 0.5, "ffn": 1.0, "qk": 0.35}
_OF_ALL_LAYERS = {"head": 1.5, "embedding": 0.3}
_AT_THE_ENDS = 1.5
# How far from the least cost a choice may be: costs are estimates, and proving the last thousandth takes HiGHS 15 s for
# the 170 matrices of a model whose layers are alike.
_GAP = 1e-3
# Rows of a matrix by which its errors are known, spread over it.
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class _Matrix:
    """A matrix: how many weights it has, what the model feels of its error, and what it is rounded to, by format."""

    parameter: str
    weights: int
    costs: Mapping[str, float]


def choose_four_bits(captured: Captured, graph_module: GraphModule, *, hot_by_outputs: bool) -> dict[str, str]:
    """Return a format for each matrix of a predicted graph that kernels read in panels, by its parameter.

    `hot_by_outputs` is as in `CompileConfig`.
    """
    # Routers keep the format that they have in any case.
    found_uses = matrix_uses(graph_module, hot_by_outputs=hot_by_outputs)
    uses = [use for use in found_uses if use.in_panels and use.role != "router"]
    merged: dict[str, list[MatrixUse]] = {}
    for use in uses:
        merged.setdefault(use.parameter, []).append(use)
    layers, weights = captured.facts.layers, captured.weights
    matrices, budget = [], 0.0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # Weights are read by one thread, which a source may need, and rounded by all.
        found = {parameter: pool.submit(_errors, _sampled_rows(weights, parameter)) for parameter in merged}
    for parameter, group in merged.items():
        size, errors = prod(weights.shape(parameter)), found[parameter].result()
        budget += size * max(_q4_k_m_bits(use, layers) for use in group)
        sensitivity = max(_sensitivity(use, layers) for use in group)
        matrices.append(_Matrix(parameter, size, {form: sensitivity * error for form, error in errors.items()}))
    return _spend(matrices, budget)


def _sensitivity(use: MatrixUse, layers: int) -> float:
    if use.role in _OF_ALL_LAYERS:
        return _OF_ALL_LAYERS[use.role] * layers
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


def _sampled_rows(weights: WeightSource, parameter: str) -> Tensor:
    """Return some rows of a matrix, or of a stack of them, float32."""
    rows = prod(weights.shape(parameter)[:-1])
    sampled = torch.arange(0, rows, max(1, rows // _SAMPLED_ROWS))[:_SAMPLED_ROWS]
    return load_rows(weights, parameter, sampled).to(torch.float32, copy=True)


def _errors(rows: Tensor) -> dict[str, float]:
    """Return the relative squared error of rows in each format."""
    total = float(rows.square().sum()) or 1.0
    return {
        form: float((dequantize_rows(quantize_rows(rows, form), form, rows.shape[1]) - rows).square().sum()) / total
        for form in CANDIDATES
    }


def _spend(matrices: Sequence[_Matrix], budget: float) -> dict[str, str]:
    """Return the formats that cost least within `budget` bits, the smallest ones where nothing keeps to it."""
    sizes = [{form: each.weights * FORMATS[form].bits for form in each.costs} for each in matrices]
    smallest = [min(size, key=size.__getitem__) for size in sizes]
    if sum(size[form] for size, form in zip(sizes, smallest, strict=True)) < budget:
        smallest = least_cost([each.costs for each in matrices], sizes, budget, gap=_GAP)
    return {each.parameter: form for each, form in zip(matrices, smallest, strict=True)}
