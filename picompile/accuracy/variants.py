"""Variants of the model, each with one more lossy part: graph, weights, and calls that are computed differently."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.choices import has_spread_cache
from picompile.predictors.firing import FiringRule
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.formats import GROUP
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import ATTENTION, SPARSE_FFN

Replaced = Mapping[Node, Callable[..., Tensor]]
"""Calls of a graph that are computed in another way, from the same arguments."""


@dataclass(frozen=True)
class Variant:
    """The model with all lossy parts up to one, to run in float32.

    Attributes:
        part: the key of the part that it has more than the variant before.
        title: that part in words.
        remedy: what loses less there, for an error message; empty where there is nothing.
        graph_module: the graph, canonical or later.
        weights: the values of its parameters.
        replaced: calls that are computed in another way.
    """

    part: str
    title: str
    remedy: str
    graph_module: GraphModule
    weights: WeightSource
    replaced: Replaced = field(default_factory=dict)


def silence_below(graph_module: GraphModule, rules: Mapping[int, FiringRule]) -> Replaced:
    """Return feed-forward blocks without the neurons that do not fire, for layers whose rule has a threshold.

    `graph_module` is a predicted graph, or a later one, whose blocks compute every neuron.
    """
    blocks = {node: rules.get(node.meta["layer"], FiringRule()) for node in calls(graph_module.graph, SPARSE_FFN)}
    return {node: _silenced(node, rule) for node, rule in blocks.items() if rule.threshold > 0}


def _silenced(node: Node, rule: FiringRule) -> Callable[..., Tensor]:
    compute: Any = node.target

    def silenced(*operands: Any, **named: Any) -> Tensor:
        block = SparseFfnOperands(*operands, **named)
        fires = rule.fires(block.outputs().abs(), block.down.norm(dim=1))
        result: Tensor = compute(*block._replace(mask=fires, neurons=None))
        return result

    return silenced


def round_cache(graph_module: GraphModule, kv_dtype: str) -> Replaced:
    """Return the attention calls with keys and values as a cache of `kv_dtype`, not f32, gives them back."""
    return {node: _with_rounded_cache(node, kv_dtype) for node in calls(graph_module.graph, ATTENTION)}


def _with_rounded_cache(node: Node, kv_dtype: str) -> Callable[..., Tensor]:
    compute: Any = node.target

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, *others: Any, **named: Any) -> Tensor:
        k, v = (_rounded(rows, kv_heads, kv_dtype) for rows in (k, v))
        result: Tensor = compute(q, k, v, heads, kv_heads, *others, **named)
        return result

    return attend


def _rounded(rows: Tensor, kv_heads: int, kv_dtype: str) -> Tensor:
    """Return keys or values [tokens, kv_heads · width] as the cache gives them back."""
    if kv_dtype == "f16":
        return rows.to(torch.float16).to(torch.float32)
    width = rows.shape[-1] // kv_heads
    if has_spread_cache(kv_dtype):
        rows = _spread(rows)
    packed = quantize_rows(rows.reshape(-1, width), kv_dtype, fit=False)
    rounded = dequantize_rows(packed, kv_dtype, width).reshape(rows.shape)
    return _spread(rounded) if has_spread_cache(kv_dtype) else rounded


def _spread(rows: Tensor) -> Tensor:
    """Return each 32 elements times the orthogonal Hadamard matrix, as q4 stores them; twice, as they were."""
    values: Tensor = rows.reshape(-1, GROUP)
    for distance in (1, 2, 4, 8, 16):
        pairs = values.reshape(-1, GROUP // (2 * distance), 2, distance)
        values = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, GROUP)
    spread: Tensor = (values * GROUP**-0.5).reshape(rows.shape)
    return spread
