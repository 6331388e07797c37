"""Puts a predictor in front of every feed-forward block."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.fx import Node

from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.dialect import Activation, parse_activation
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import (
    DIVIDE_BY_RMS,
    FFN,
    INPUTS,
    NEURON_LIMITS,
    PREDICT,
    PREDICTORS,
    SPARSE_FFN,
    expert_count,
    gating_weights,
    operator_args,
    stream_of,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.predictors import PREDICTOR_KINDS, PredictorKind, predictor_kind


@dataclass(frozen=True)
class InsertPredictors(Pass):
    """Puts a predictor in front of every feed-forward block, which computes only the neurons predicted to fire.

    1. `ffn(x, ...)` becomes `sparse_ffn(x, predict(x, weights, kind, threshold), None, ...)`.
    2. kind `exact`: weights are the gating matrix (gate, or up where there is no gate) and its bias, if any; threshold
       is that of the block's activation, at or below which its value is exactly zero. Lossless.
    3. kind `none`: weights are up alone, and every neuron counts as firing.
    4. kind `auto` is `exact` where the activation can be silent and `none` elsewhere, block by block.
    5. kind `sign`: weights are the gating matrix alone.
    6. kinds `learned` and `learned-relu`: weights are new parameters `predictors.layers.LAYER.fc1`, `fc2` and `bias`,
       whose values come from the weight source; fc1 has as many rows as `ranks` says. `inputs` says what they read: x,
       what the norm that makes x reads (`stream`), or the x of the layer before (`previous`).
    7. In a block of experts a predictor gets the `gains` of the block, and names neurons of chosen experts alone.
    8. `ffn(x, ..., norm_eps)` becomes `divide_by_rms(sparse_ffn(x, ..., squares), down_bias, neurons, norm_eps)`:
       silent neurons add nothing to the sum of squares.
    9. A layer in `gate_limits` or `output_limits` gets these operands, float32 [F]: new parameters
       `predictors.layers.LAYER.gate_limits` and `output_limits`, whose values come from the weight source. The block
       then leaves out neurons whose activated gate, or whose output, is at most its limit in magnitude.

    `kinds`, `ranks`, `inputs` and `thresholds` are by layer; a layer that is not in `kinds` has `kind`. The kinds other
    than `auto`, `exact` and `none`, and limits, may skip neurons that fire, which changes the logits.

    The mask that a `predict` makes becomes kernel arguments in picompile_codegen's `lowering/ffn.py`: `lower_predict`
    writes it to a buffer, and `lower_sparse_ffn` passes that to the block's kernel. With kind `exact` there is no
    buffer: the block's own kernel reads the gating matrix and decides.
    """

    name: ClassVar[str] = "insert-predictors"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[Stage] = Stage.PREDICTED

    kind: str = field(
        default="auto", metadata={"help": "predictor: auto, exact, none, learned, learned-relu, sign or a plug-in's"}
    )
    kinds: Mapping[int, str] = field(
        default_factory=dict,
        metadata={"help": "layer → its predictor, where that is another than kind", "example": "(1:learned,2:sign)"},
    )
    ranks: Mapping[int, int] = field(
        default_factory=dict,
        metadata={"help": "layer → rank of its predictor, for every learned one", "example": "(1:32)"},
    )
    inputs: Mapping[int, str] = field(
        default_factory=dict,
        metadata={
            "help": "layer → what its learned predictor reads: block, stream or previous",
            "example": "(1:previous)",
        },
    )
    thresholds: Mapping[int, float] = field(
        default_factory=dict,
        metadata={
            "help": "layer → above what a neuron is computed: a logit where learned (0), a share of signs (0.5)",
            "example": "(1:-0.5,2:0.55)",
        },
    )
    gate_limits: tuple[int, ...] = field(
        default=(),
        metadata={"help": "layers that leave out neurons of a small activated gate", "example": "(0,1)"},
    )
    output_limits: tuple[int, ...] = field(
        default=(), metadata={"help": "layers that leave out neurons of a small output", "example": "(0,1)"}
    )

    def __post_init__(self) -> None:
        """Raise `PassOptionError` for options that fit no graph, `RegistryError` where two kinds share a name."""
        for option, kind in (("kinds", str), ("ranks", int), ("inputs", str), ("thresholds", float)):
            # Sorted, so that equal options make equal passes whatever order they came in.
            given = {layer: kind(value) for layer, value in sorted(getattr(self, option).items())}
            object.__setattr__(self, option, given)
        for option in NEURON_LIMITS:
            object.__setattr__(self, option, tuple(sorted({int(layer) for layer in getattr(self, option)})))
        known = ("auto", *PREDICTOR_KINDS)
        self._check_choice("kind", {None: self.kind}, known)
        self._check_choice("kinds", self.kinds, known)
        self._check_choice("inputs", self.inputs, INPUTS)
        for layer, rank in self.ranks.items():
            if rank < 1:
                raise self._wrong("ranks", f"{rank} is not 1 or more", layer)
        for layer, threshold in self.thresholds.items():
            if not math.isfinite(threshold):
                raise self._wrong("thresholds", f"{threshold} is not finite", layer)

    @property
    def effect(self) -> Effect:
        """Exact where all kinds are lossless and there are no limits; else neurons that fire may be skipped."""
        has_limits = bool(self.gate_limits or self.output_limits)
        kinds = {self.kind, *self.kinds.values()} - {"auto"}
        lossless = not has_limits and all(predictor_kind(kind).lossless for kind in kinds)
        return Effect.EXACT if lossless else Effect.SKIPS

    def rewrite(self, rewriter: Rewriter) -> None:
        """Apply the rules.

        Raises `UnsupportedGraphError` where `exact` is asked for and the activation is never silent, `PassOptionError`
        for an option of a missing layer, one that the layer's predictor does not take, or one that it lacks, and for
        limits that the layer's block cannot have.
        """
        blocks = list(calls(rewriter.graph, FFN))
        inputs = {_layer(block): arguments(block)["x"] for block in blocks}
        for option in ("kinds", "ranks", "inputs", "thresholds", *NEURON_LIMITS) if blocks else ():
            for layer in sorted(set(getattr(self, option)) - inputs.keys()):
                raise self._wrong(option, "the graph has no feed-forward block of that number", layer)
        for block in blocks:
            self._insert(rewriter, block, inputs)

    def _insert(self, rewriter: Rewriter, block: Node, inputs: Mapping[Any, Node]) -> None:
        values, layer = arguments(block), _layer(block)
        activation = _activation(block, values["activation"])
        kind = self._kind(block, activation)
        source = self._input(layer, kind, inputs)
        threshold = activation.threshold if kind.name == "exact" else self.thresholds.get(layer, kind.threshold)
        weights, gains = self._weights(rewriter, block, kind, source), None if kind.in_block else values["gains"]
        predictor = {"x": source, "weights": weights, "kind": kind.name, "threshold": threshold, "gains": gains}
        mask = rewriter.call(PREDICT, operator_args(PREDICT, predictor), before=block, sources=(block,))
        x, eps = values.pop("x"), values.pop("norm_eps")
        bias = values["down_bias"]
        operands = values if eps is None else values | {"down_bias": None}
        limits = self._limits(rewriter, block)
        operands = {"x": x, "mask": mask, "neurons": None, **operands, "squares": eps is not None, **limits}
        sparse = rewriter.call(SPARSE_FFN, operator_args(SPARSE_FFN, operands), before=block, sources=(block,))
        if eps is not None:
            division = (sparse, bias, int(values["up"].meta["val"].shape[0]), eps)
            sparse = rewriter.call(DIVIDE_BY_RMS, division, before=block, sources=(block,))
        rewriter.replace(block, sparse)

    def _kind(self, block: Node, activation: Activation) -> PredictorKind:
        """The kind for `block`. Raises for options that it does not take."""
        layer = _layer(block)
        name = self.kinds.get(layer, self.kind)
        if name == "auto":
            name = "exact" if activation.sparse else "none"
        if name == "exact" and not activation.sparse:
            raise UnsupportedGraphError(
                f"predictor exact needs an activation that can be silent, such as relu; {block.name} of "
                f"{_place(block)} uses {activation.text}: use predictor none"
            )
        kind = predictor_kind(name)
        if layer in self.ranks and not kind.has_rank:
            raise self._wrong("ranks", f"predictor {name} has no rank", layer)
        if layer not in self.ranks and kind.has_rank:
            raise self._wrong("ranks", f"predictor {name} needs one", layer)
        if layer in self.thresholds and kind.lossless:
            raise self._wrong("thresholds", f"predictor {name} takes none", layer)
        return kind

    def _input(self, layer: Any, kind: PredictorKind, inputs: Mapping[Any, Node]) -> Node:
        """Return the value that the predictor of `layer` reads. `inputs` are the x of all blocks, by layer."""
        asked, x = self.inputs.get(layer, "block"), inputs[layer]
        if asked == "block":
            return x
        if kind.parameters is None:
            raise self._wrong("inputs", f"predictor {kind.name} reads the block's own input only", layer)
        found = stream_of(x) if asked == "stream" else inputs.get(layer - 1)
        if found is None:
            why = (
                "the block's input is not from a norm" if asked == "stream" else "there is no block in the layer before"
            )
            raise self._wrong("inputs", f"{asked} is not available: {why}", layer)
        return found

    def _limits(self, rewriter: Rewriter, block: Node) -> dict[str, Node | None]:
        """Return the limits of the block's neurons, new parameters. Raises for a block that cannot have them."""
        values, layer = arguments(block), _layer(block)
        asked = [option for option in NEURON_LIMITS if layer in getattr(self, option)]
        if "gate_limits" in asked and values["gate"] is None:
            raise self._wrong("gate_limits", "the block has no gate; give its limits in output_limits", layer)
        if asked and values["norm_eps"] is not None:
            # A limit would be of outputs before the norm, which divides them by what all of them are.
            raise self._wrong(asked[0], "the block normalizes its neurons, which cannot have limits", layer)
        if asked and expert_count(block):
            raise self._wrong(asked[0], "the block is one of experts, whose neurons cannot have limits", layer)
        shape = [int(values["up"].meta["val"].shape[0])]
        prefix = f"{PREDICTORS}{layer}."
        made = {name: rewriter.parameter(prefix + name, shape, sources=(block,)) for name in asked}
        return {name: made.get(name) for name in NEURON_LIMITS}

    def _weights(self, rewriter: Rewriter, block: Node, kind: PredictorKind, source: Node) -> list[Node]:
        values, layer = arguments(block), _layer(block)
        if kind.name == "none":
            return [values["up"]]
        if kind.parameters is None:
            return gating_weights(values, with_bias=kind.reads_bias)
        sizes = {
            "F": int(values["up"].meta["val"].shape[0]),
            "D": int(source.meta["val"].shape[1]),
            "R": self.ranks.get(layer, 0),
        }
        shapes = {name: [sizes[letter] for letter in letters] for name, letters in kind.parameters.items()}
        return [
            rewriter.parameter(f"{PREDICTORS}{layer}.{name}", shape, sources=(block,)) for name, shape in shapes.items()
        ]

    def _check_choice(self, option: str, given: Mapping[Any, str], known: tuple[str, ...]) -> None:
        for layer, value in given.items():
            if value not in known:
                raise self._wrong(option, f"{value!r} is not one of {', '.join(known)}", layer)

    def _wrong(self, option: str, fault: str, layer: int | None = None) -> PassOptionError:
        of_layer = "" if layer is None else f"layer {layer}: "
        return PassOptionError(f"option {option} of pass {self.name}: {of_layer}{fault}")


def _layer(block: Node) -> Any:
    return block.meta.get("layer")


def _activation(block: Node, text: str) -> Activation:
    try:
        return parse_activation(text)
    except ValueError as error:
        raise UnsupportedGraphError(f"{block.name} of {_place(block)}: {error}") from error


def _place(block: Node) -> str:
    return f"layer {block.meta['layer']}" if "layer" in block.meta else "an unnumbered layer"
