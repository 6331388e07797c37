"""The table of rules: for each stage the rules that hold, and the operators that are allowed."""

from picompile_passes.base import Stage
from picompile_passes.graph import operands as op
from picompile_passes.verify import masks, squares, structure
from picompile_passes.verify.rule import Rule

_DENSE = frozenset({op.EMBEDDING, op.LINEAR, op.RMS_NORM, op.LAYER_NORM, op.ROTARY, op.ATTENTION, op.ADD, op.FFN}) | {
    op.ELEMENTWISE,
}
_SPARSE = _DENSE - {op.FFN} | {op.PREDICT, op.SPARSE_FFN, op.DIVIDE_BY_RMS}
_PACKING = frozenset({op.QUANTIZE, op.DEQUANTIZE})

_CAPTURED = (
    Rule("well-formed", structure.check_well_formed),
    Rule("placeholders", structure.check_placeholders),
    Rule("values", structure.check_values),
)
# The operators are checked before these rules, which read arguments by the names of the dialect.
_COMMON = (
    Rule("token-path", structure.check_token_path),
    Rule("arguments", structure.check_arguments),
    Rule("heads", structure.check_heads),
    Rule("groups", structure.check_groups),
    Rule("expressions", structure.check_expressions),
    Rule("windows", structure.check_windows),
    Rule("gates", structure.check_gates),
    Rule("unused", structure.check_unused),
    Rule("layers", structure.check_layers),
    Rule("head", structure.check_head),
    Rule("provenance", structure.check_provenance),
)
_PREDICTED = (
    Rule("masks", masks.check_masks),
    Rule("predictors", masks.check_predictors),
    Rule("limits", masks.check_limits),
    Rule("squares", squares.check_squares),
)
_PARTITIONED = (*_PREDICTED, Rule("parts", masks.check_parts))
_QUANTIZED = (*_PARTITIONED, Rule("packed", structure.check_packed), Rule("packed-once", structure.check_packed_once))

RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.CAPTURED: _CAPTURED,
    Stage.CANONICAL: (*_CAPTURED, structure.operators_rule(_DENSE), *_COMMON),
    Stage.PREDICTED: (*_CAPTURED, structure.operators_rule(_SPARSE), *_COMMON, *_PREDICTED),
    Stage.PARTITIONED: (*_CAPTURED, structure.operators_rule(_SPARSE), *_COMMON, *_PARTITIONED),
    Stage.QUANTIZED: (*_CAPTURED, structure.operators_rule(_SPARSE, _PACKING), *_COMMON, *_QUANTIZED),
}
