"""Packs every matrix in a weight format."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.fx import Graph, Node

from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.formats import FORMATS, head_format, predictor_format
from picompile_passes.formats.panels import block_has_panels
from picompile_passes.graph.nodes import arguments, attribute, constant_nodes, has_real_data, is_call
from picompile_passes.graph.operands import (
    DEQUANTIZE,
    EMBEDDING,
    LINEAR,
    PREDICT,
    QUANTIZE,
    by_neurons,
    by_outputs,
    computes_every_neuron,
    dequantized,
    expert_count,
    makes_choices,
    makes_logits,
    matrix_operands,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.predictors import predictor_kind

# Few bytes, whose errors would make tokens choose other experts.
_ROUTERS = "f16"
_KNOWN = " or ".join(", ".join(FORMATS.builtin).rsplit(", ", 1))


@dataclass(frozen=True)
class Quantize(Pass):
    """Packs every matrix in the weight format `format`, which rounds it.

    1. Every matrix `w` that an embedding, linear, predict or sparse_ffn uses becomes
       `dequantize(quantize(w, format), format, columns)`, in groups of a row. Biases,
       norm weights, limits and tables stay float32.
    2. A matrix that several nodes use (a tied embedding, a gate that also predicts) is packed once.
    3. A matrix that is packed already stays as it is.
    4. Matrices of a predictor's own are packed in the format `predictors`. `auto` is `format`, but q6 where that has 4
       bits: 4-bit errors move scores across the threshold.
    5. A matrix that is made of one parameter in `tensors` is packed in the format that is given there.
    6. The matrix of the output head and those of embeddings are packed in the format `head`. `auto` is `format`, but
       q6 where that has 4 bits: in small models the head's errors cost more than those of all other matrices.
    7. Where a block computes all of its neurons, and its matrices can lie in panels, down is
       `transpose(dequantize(quantize(downᵀ)))`: it is packed in groups of each output's inputs, as a checkpoint has it.
       Of a block of experts it is `moves(dequantize(quantize([experts · D, neurons of one])))` alike, a row for each
       output of each expert.
       In other blocks down is packed by neurons, which are read one by one. Hot and cold blocks are among these;
       with `hot_by_outputs`, hot ones that are in one part are not.
    8. The matrix of a router is packed in f16, unless `tensors` has it.
    """

    name: ClassVar[str] = "quantize"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage] = Stage.QUANTIZED

    default_effect: ClassVar[Effect] = Effect.ROUNDS

    format: str = field(default="q4", metadata={"help": f"weight format: {_KNOWN}"})

    predictors: str = field(default="auto", metadata={"help": "format of predictors' own weights: auto, or a format"})

    head: str = field(default="auto", metadata={"help": "format of head and embeddings: auto, or a format"})

    tensors: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "formats of single matrices, by their parameters", "example": "(lm_head.weight:q8)"},
    )

    hot_by_outputs: bool = field(
        default=False, metadata={"help": "whether down of hot blocks that compute every neuron is packed by outputs"}
    )

    def __post_init__(self) -> None:
        for name, form in self.tensors.items():
            if form not in FORMATS:
                raise PassOptionError(f"option tensors of pass {self.name}: {name} in {form!r}, which is no format")
        for option, others in (("format", ()), ("predictors", ("auto",)), ("head", ("auto",))):
            value = getattr(self, option)
            if value not in others and value not in FORMATS:
                known = ", ".join((*others, *FORMATS))
                raise PassOptionError(f"option {option} of pass {self.name}: {value!r} is not one of {known}")

    def rewrite(self, rewriter: Rewriter) -> None:
        """Apply the rules. Raises `UnsupportedGraphError` for a matrix that depends on the tokens."""
        constants = constant_nodes(rewriter.graph)
        in_head = _head_matrices(rewriter.graph)
        packed: dict[Hashable, Node] = {}
        for user in list(rewriter.graph.nodes):
            down = self._down_by_outputs(user)
            for weight in dict.fromkeys(matrix_operands(user)):
                if is_call(dequantized(weight), DEQUANTIZE):
                    continue
                if weight not in constants:
                    raise UnsupportedGraphError(f"{user.name} multiplies by {weight.name}, which is not a constant")
                is_turned = weight is down
                stored = by_outputs(rewriter, weight, expert_count(user), before=weight.next) if is_turned else weight
                key = _constant_key(stored)
                if key not in packed:
                    packed[key] = self._pack(rewriter, stored, self._format_for(user, stored, key in in_head))
                matrix = packed[key]
                if is_turned:
                    matrix = by_neurons(rewriter, matrix, expert_count(user), before=matrix.next)
                _substitute(rewriter, user, weight, matrix)

    def _down_by_outputs(self, user: Node) -> Node | None:
        """Return the down matrix of a block of which every neuron is always computed, None for any other node."""
        if not computes_every_neuron(user, hot=self.hot_by_outputs):
            return None
        values = arguments(user)
        neurons, dim = (int(size) for size in values["down"].meta["val"].shape)
        matrices = [values[name] for name in ("gate", "up", "down") if values[name] is not None]
        formats = [self._format_for(user, matrix, False) for matrix in matrices]
        return values["down"] if block_has_panels(formats, neurons // max(expert_count(user), 1), dim) else None

    def _format_for(self, user: Node, weight: Node, in_head: bool) -> str:
        """Return the format that the matrix `weight` of `user` is packed in."""
        made_of = _parameters(weight)
        if len(made_of) == 1 and (chosen := self.tensors.get(next(iter(made_of)))) is not None:
            return chosen
        if is_call(user, LINEAR) and makes_choices(user):
            return _ROUTERS
        if in_head:
            return head_format(self.format) if self.head == "auto" else self.head
        if not is_call(user, PREDICT) or predictor_kind(arguments(user)["kind"]).parameters is None:
            return self.format
        return predictor_format(self.format, self.predictors)

    def _pack(self, rewriter: Rewriter, weight: Node, form: str) -> Node:
        columns = int(weight.meta["val"].shape[1])
        # Right behind the weight, and so ahead of everything that uses it.
        place = weight.next
        data = rewriter.call(QUANTIZE, (weight, form), before=place, sources=(weight,))
        return rewriter.call(DEQUANTIZE, (data, form, columns), before=place, sources=(weight,))


def _head_matrices(graph: Graph) -> set[Hashable]:
    """Return the keys of the matrices that embeddings look up, or that the graph's result is computed with."""
    found: set[Hashable] = set()
    for node in graph.nodes:
        if is_call(node, EMBEDDING) or (is_call(node, LINEAR) and makes_logits(node)):
            found |= {_constant_key(weight) for weight in matrix_operands(node)}
    return found


def _parameters(node: Node) -> set[str]:
    """Return the names of the parameters that a constant is made of; tables of rows are none."""
    if node.op == "get_attr":
        return set() if has_real_data(attribute(node.graph.owning_module, str(node.target))) else {str(node.target)}  # type: ignore[arg-type]
    return set[str]().union(*map(_parameters, node.all_input_nodes))


def _substitute(rewriter: Rewriter, user: Node, old: Node, new: Node) -> None:
    """Passes `new` for `old` wherever it is a matrix operand of `user`."""
    values = arguments(user)
    for name, value in values.items():
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
