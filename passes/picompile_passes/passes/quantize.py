"""Packs every matrix in a weight format."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.fx import Node

from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.dialect import FORMATS
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, constant_nodes, is_call
from picompile_passes.graph.operands import DEQUANTIZE, MATRICES, PREDICT, QUANTIZE, matrix_operands
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.predictors import predictor_kind
from picompile_passes.weight_formats import predictor_format

_KNOWN = " or ".join(", ".join(FORMATS).rsplit(", ", 1))


@dataclass(frozen=True)
class Quantize(Pass):
    """Packs every matrix in the weight format `format` (f16, q8, q6, q4m, q4), which rounds it.

    1. Every matrix `w` that an embedding, linear, predict or sparse_ffn uses becomes
       `dequantize(quantize(w, format), format, columns)`. Biases, norm weights and tables stay float32.
    2. A matrix that several nodes use (a tied embedding, a gate that also predicts) is packed once.
    3. A matrix that is packed already stays as it is.
    4. Matrices of a predictor's own are packed in the format `predictors`. `auto` is `format`, but q8 where that has
       fewer than 8 bits: errors of 4 bits move scores across the threshold, which lost 3 to 4 % of the firing neurons
       where it was measured.
    """

    name: ClassVar[str] = "quantize"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.QUANTIZED

    default_effect: ClassVar[Effect] = Effect.ROUNDS

    format: str = field(default="q4", metadata={"help": f"weight format: {_KNOWN}"})

    predictors: str = field(default="auto", metadata={"help": f"format of predictors' own weights: auto, {_KNOWN}"})

    def __post_init__(self) -> None:
        for option, known in (("format", (*FORMATS,)), ("predictors", ("auto", *FORMATS))):
            value = getattr(self, option)
            if value not in known:
                raise PassOptionError(
                    f"option {option} of pass {self.name}: {value!r} is not one of {', '.join(known)}"
                )

    def rewrite(self, rewriter: Rewriter) -> None:
        """Apply the rules. Raises `UnsupportedGraphError` for a matrix that depends on the tokens."""
        constants = constant_nodes(rewriter.graph)
        packed: dict[Hashable, Node] = {}
        for user in list(rewriter.graph.nodes):
            for weight in dict.fromkeys(matrix_operands(user)):
                if is_call(weight, DEQUANTIZE):
                    continue
                if weight not in constants:
                    raise UnsupportedGraphError(f"{user.name} multiplies by {weight.name}, which is not a constant")
                key = _constant_key(weight)
                if key not in packed:
                    packed[key] = self._pack(rewriter, weight, self._format_for(user))
                _substitute(rewriter, user, weight, packed[key])

    def _format_for(self, user: Node) -> str:
        """Return the format that the matrices of `user` are packed in."""
        if not is_call(user, PREDICT) or predictor_kind(arguments(user)["kind"]).parameters is None:
            return self.format
        if self.predictors == "auto":
            return predictor_format(self.format)
        return self.predictors

    def _pack(self, rewriter: Rewriter, weight: Node, form: str) -> Node:
        columns = int(weight.meta["val"].shape[1])
        # Right behind the weight, and so ahead of everything that uses it.
        place = weight.next
        data = rewriter.call(QUANTIZE, (weight, form), before=place, sources=(weight,))
        return rewriter.call(DEQUANTIZE, (data, form, columns), before=place, sources=(weight,))


def _substitute(rewriter: Rewriter, user: Node, old: Node, new: Node) -> None:
    """Passes `new` for `old` wherever it is a matrix operand of `user`."""
    values = arguments(user)
    for name in MATRICES[user.target]:  # type: ignore[index]
        value = values[name]
        if value is old:
            rewriter.set_argument(user, name, new)
        elif isinstance(value, (list, tuple)) and old in value:
            rewriter.set_argument(user, name, [new if item is old else item for item in value])


def _constant_key(node: Node) -> Hashable:
    """Equal for nodes of equal value: two reads of one parameter, or equal operators on them."""

    def key(value: Any) -> Hashable:
        if isinstance(value, Node):
            return _constant_key(value)
        return tuple(map(key, value)) if isinstance(value, (list, tuple)) else value

    if node.op == "get_attr":
        return (node.op, node.target)
    return (node.op, node.target, key(node.args), key(tuple(sorted(node.kwargs.items()))))
