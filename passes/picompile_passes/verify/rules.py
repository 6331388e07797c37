"""The table of rules: for each stage the rules that hold, and the operators that are allowed."""

from picompile_passes.base import Stage
from picompile_passes.verify import masks, squares, structure
from picompile_passes.verify.rule import Rule

_CAPTURED = (
    Rule("well-formed", structure.check_well_formed),
    Rule("placeholders", structure.check_placeholders),
    Rule("values", structure.check_values),
)
# The operators are checked before these rules, which read arguments by the names of the dialect.
_COMMON = (
    Rule("token-path", structure.check_token_path),
    Rule("arguments", structure.check_arguments),
    Rule("unused", structure.check_unused),
    Rule("layers", structure.check_layers),
    Rule("head", structure.check_head),
    Rule("provenance", structure.check_provenance),
)
# Passes for canonical graphs may run before layers that were captured once are repeated.
_PREDICTED = (
    Rule("all-layers", structure.check_all_layers),
    Rule("masks", masks.check_masks),
    Rule("predictors", masks.check_predictors),
    Rule("squares", squares.check_squares),
)
_PARTITIONED = (*_PREDICTED, Rule("parts", masks.check_parts))
_QUANTIZED = (*_PARTITIONED, Rule("packed", structure.check_packed), Rule("packed-once", structure.check_packed_once))

RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.CAPTURED: _CAPTURED,
    Stage.CANONICAL: (*_CAPTURED, structure.operators_rule("dense"), *_COMMON),
    Stage.PREDICTED: (*_CAPTURED, structure.operators_rule("sparse"), *_COMMON, *_PREDICTED),
    Stage.PARTITIONED: (*_CAPTURED, structure.operators_rule("sparse"), *_COMMON, *_PARTITIONED),
    Stage.QUANTIZED: (*_CAPTURED, structure.operators_rule("sparse", "packing"), *_COMMON, *_QUANTIZED),
}
