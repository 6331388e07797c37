"""Puts a predictor in front of every feed-forward block."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.fx import Node

from picompile_passes.dialect import Activation, parse_activation
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.infra import Pass
from picompile_passes.nodes import arguments, calls
from picompile_passes.operands import FFN, PREDICT, SPARSE_FFN
from picompile_passes.rewriter import Rewriter
from picompile_passes.stages import Stage

KINDS = ("auto", "exact", "none")


@dataclass(frozen=True)
class InsertPredictors(Pass):
    """Tells which neurons fire, with a predictor that needs no training.

    1. `ffn(x, ...)` becomes `sparse_ffn(x, predict(x, weights, kind, threshold), None, ...)`.
    2. kind `exact`: weights are the matrix that decides (gate, or up where there is no gate) and its bias, if any;
       threshold is that of the block's activation, at or below which it gives exactly zero. Lossless.
    3. kind `none`: weights are up alone, and every neuron counts as firing.
    4. kind `auto` is `exact` where the activation can be silent and `none` elsewhere, block by block.
    """

    name: ClassVar[str] = "insert-predictors"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.PREDICTED

    kind: str = field(default="auto", metadata={"help": "predictor: auto, exact or none"})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PassOptionError(f"option kind of pass {self.name}: {self.kind!r} is not one of {', '.join(KINDS)}")

    def rewrite(self, rewriter: Rewriter) -> bool:
        """Applies the rules. Raises `UnsupportedGraphError` where `exact` is asked for and cannot be had."""
        blocks = list(calls(rewriter.graph, FFN))
        for block in blocks:
            self._insert(rewriter, block)
        return bool(blocks)

    def _insert(self, rewriter: Rewriter, block: Node) -> None:
        values = arguments(block)
        layer = block.meta.get("layer")
        weights, kind, threshold = self._predictor(block, values)
        x = values.pop("x")
        mask = rewriter.call(PREDICT, (x, weights, kind, threshold), before=block, sources=(block,), layer=layer)
        sparse = rewriter.call(
            SPARSE_FFN, (x, mask, None, *values.values()), before=block, sources=(block,), layer=layer
        )
        rewriter.replace(block, sparse)

    def _predictor(self, block: Node, values: dict[str, Any]) -> tuple[list[Node], str, float]:
        activation = _activation(block, values["activation"])
        if self.kind == "exact" and not activation.sparse:
            raise UnsupportedGraphError(
                f"predictor exact needs an activation that can be silent, such as relu; {block.name} of "
                f"{_place(block)} uses {activation.text}: use predictor none"
            )
        if self.kind == "none" or not activation.sparse:
            return [values["up"]], "none", 0.0
        side = "up" if values["gate"] is None else "gate"
        deciding = [values[side], values[f"{side}_bias"]]
        return [weight for weight in deciding if weight is not None], "exact", activation.threshold


def _activation(block: Node, text: str) -> Activation:
    try:
        return parse_activation(text)
    except ValueError as error:
        raise UnsupportedGraphError(f"{block.name} of {_place(block)}: {error}") from error


def _place(block: Node) -> str:
    return f"layer {block.meta['layer']}" if "layer" in block.meta else "an unnumbered layer"
