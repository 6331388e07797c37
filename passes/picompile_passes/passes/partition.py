"""Splits feed-forward blocks into a hot and a cold part."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.errors import PassOptionError
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import (
    ADD,
    INDEX_SELECT,
    NEURON_OPERANDS,
    PREDICT,
    SPARSE_FFN,
    expert_count,
    operator_args,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.predictors import predictor_kind


@dataclass(frozen=True)
class Partition(Pass):
    """Splits the blocks of the layers in `hot` (layer → its hot neurons) into a hot and a cold part.

    1. A `sparse_ffn` becomes two and an add. A part's gate, up, down, their biases and the neurons' limits are
       `index_select`s of the whole by the part's neuron table; `down_bias` goes to the hot part. With `squares`, the
       add adds these up as well.
    2. A row-local predictor is split in the same way. Any other stays whole, and the parts name their rows of its mask
       by `neurons`.
    3. Where one part would have no neuron, the block stays as it is and is marked as the other part.
    4. Layers that are not in `hot` stay as they are. A layer that is partitioned already is an error, and so is one of
       experts that would have two parts.
    """

    name: ClassVar[str] = "partition"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    idempotent: ClassVar[bool] = False

    hot: Mapping[int, Sequence[int]] = field(
        default_factory=dict, metadata={"help": "layer → its hot neurons, as in (0:(5,17),1:(3))"}
    )

    def __post_init__(self) -> None:
        for layer, neurons in self.hot.items():
            if len(set(neurons)) != len(neurons):
                twice = Counter(neurons).most_common(1)[0][0]
                raise PassOptionError(f"{_option(layer)}: neuron {twice} is given twice")
        # Sorted, so that equal sets make equal graphs whatever order they came in.
        ordered = {layer: tuple(sorted(map(int, self.hot[layer]))) for layer in sorted(self.hot)}
        object.__setattr__(self, "hot", ordered)

    def rewrite(self, rewriter: Rewriter) -> None:
        """Apply the rules. Raises `PassOptionError` for a layer or a neuron that does not exist."""
        blocks = {block.meta.get("layer"): block for block in calls(rewriter.graph, SPARSE_FFN)}
        for layer, hot in self.hot.items():
            if layer not in blocks:
                raise PassOptionError(f"{_option(layer)}: the graph has no feed-forward block of that number")
            _partition(rewriter, blocks[layer], layer, hot)


def _partition(rewriter: Rewriter, block: Node, layer: int, hot: Sequence[int]) -> None:
    values = arguments(block)
    total = int(values["up"].meta["val"].shape[0])
    outside = [neuron for neuron in hot if not 0 <= neuron < total]
    if outside:
        raise PassOptionError(f"{_option(layer)}: neuron {outside[0]} is not among the layer's 0 to {total - 1}")
    if "neurons" in block.meta:
        raise PassOptionError(f"{_option(layer)}: that layer is partitioned already")
    if len(hot) in (0, total):
        for node in (block, values["mask"]):
            rewriter.annotate(node, neurons="hot" if hot else "cold")
        return
    if expert_count(block):
        raise PassOptionError(f"{_option(layer)}: the neurons of experts cannot be split into hot and cold ones")
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[list(hot)] = True
    parts = [
        _part(rewriter, block, neurons="hot", rows=chosen.nonzero().flatten(), values=values),
        _part(rewriter, block, neurons="cold", rows=(~chosen).nonzero().flatten(), values=values | {"down_bias": None}),
    ]
    rewriter.replace(block, rewriter.call(ADD, parts, before=block, sources=(block,)))


def _part(rewriter: Rewriter, block: Node, neurons: str, rows: torch.Tensor, values: dict[str, Any]) -> Node:
    """One part's predictor and block. `rows` int64 [neurons of the part], `values` the arguments of the whole."""
    layer: int = block.meta["layer"]
    table = rewriter.constant(f"layer_{layer}_{neurons}_neurons", rows, sources=(block,))
    select = _selector(rewriter, block, table)
    predictor = arguments(values["mask"])
    masked: dict[str, Any] = {"neurons": table}
    if predictor_kind(predictor["kind"]).row_local:
        args = predictor | {"weights": [select(weight) for weight in predictor["weights"]]}
        sources = (values["mask"],)
        mask = rewriter.call(PREDICT, operator_args(PREDICT, args), before=block, sources=sources, neurons=neurons)
        masked = {"mask": mask, "neurons": None}
    selected = {name: select(values[name]) for name in NEURON_OPERANDS if values[name] is not None}
    operands = operator_args(SPARSE_FFN, values | selected | masked)
    return rewriter.call(SPARSE_FFN, operands, before=block, sources=(block,), neurons=neurons)


def _selector(rewriter: Rewriter, block: Node, table: Node) -> Callable[[Node], Node]:
    """Selects rows by `table`; one node for each weight, so that what predictor and block share stays shared."""
    made: dict[Node, Node] = {}

    def select(weight: Node) -> Node:
        if weight not in made:
            made[weight] = rewriter.call(INDEX_SELECT, (weight, 0, table), before=block, sources=(weight,))
        return made[weight]

    return select


def _option(layer: object) -> str:
    return f"hot neurons of layer {layer}"
