"""Which rules hold at which stage, and which operators are allowed there."""

from picompile_passes.base import Stage
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    DEQUANTIZE,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LAYER_NORM,
    LINEAR,
    PREDICT,
    QUANTIZE,
    RMS_NORM,
    ROTARY,
    SPARSE_FFN,
    TRANSPOSE,
)
from picompile_passes.verify.masks import check_masks, check_parts, check_predictors
from picompile_passes.verify.rule import Rule
from picompile_passes.verify.structure import (
    check_arguments,
    check_gates,
    check_head,
    check_heads,
    check_layers,
    check_packed,
    check_packed_once,
    check_placeholders,
    check_provenance,
    check_token_path,
    check_unused,
    check_values,
    check_well_formed,
    check_windows,
    operators_rule,
)

_DENSE = frozenset({EMBEDDING, LINEAR, RMS_NORM, LAYER_NORM, ROTARY, ATTENTION, ADD, FFN})
_SPARSE = _DENSE - {FFN} | {PREDICT, SPARSE_FFN}
_MOVES = frozenset({TRANSPOSE, INDEX_SELECT})
_PACKING = _MOVES | {QUANTIZE, DEQUANTIZE}

_CAPTURED = (
    Rule("well-formed", check_well_formed),
    Rule("placeholders", check_placeholders),
    Rule("values", check_values),
)
# Operators before arguments: what comes after reads arguments by the names of the dialect.
_COMMON = (
    Rule("token-path", check_token_path),
    Rule("arguments", check_arguments),
    Rule("heads", check_heads),
    Rule("windows", check_windows),
    Rule("gates", check_gates),
    Rule("unused", check_unused),
    Rule("layers", check_layers),
    Rule("head", check_head),
    Rule("provenance", check_provenance),
)
_PREDICTED = (Rule("masks", check_masks), Rule("predictors", check_predictors))
_PARTITIONED = (*_PREDICTED, Rule("parts", check_parts))
_QUANTIZED = (*_PARTITIONED, Rule("packed", check_packed), Rule("packed-once", check_packed_once))

RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.CAPTURED: _CAPTURED,
    Stage.CANONICAL: (*_CAPTURED, operators_rule(_DENSE, _MOVES), *_COMMON),
    Stage.PREDICTED: (*_CAPTURED, operators_rule(_SPARSE, _MOVES), *_COMMON, *_PREDICTED),
    Stage.PARTITIONED: (*_CAPTURED, operators_rule(_SPARSE, _MOVES), *_COMMON, *_PARTITIONED),
    Stage.QUANTIZED: (*_CAPTURED, operators_rule(_SPARSE, _PACKING), *_COMMON, *_QUANTIZED),
}
