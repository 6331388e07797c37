"""The passes, one a file.

`BUILTIN` says where each one is. `picompile_passes.registry` reads it and imports a pass when it is asked for.
"""

BUILTIN: dict[str, str] = {
    "flatten-tokens": "picompile_passes.passes.canonicalize.flatten_tokens:FlattenTokens",
    "insert-predictors": "picompile_passes.passes.insert_predictors:InsertPredictors",
    "partition": "picompile_passes.passes.partition:Partition",
    "quantize": "picompile_passes.passes.quantize:Quantize",
    "raise-attention": "picompile_passes.passes.canonicalize.raise_attention:RaiseAttention",
    "raise-ffn": "picompile_passes.passes.canonicalize.raise_ffn:RaiseFFN",
    "raise-linear": "picompile_passes.passes.canonicalize.raise_linear:RaiseLinear",
    "raise-norms": "picompile_passes.passes.canonicalize.raise_norms:RaiseNorms",
    "raise-rotary": "picompile_passes.passes.canonicalize.raise_rotary:RaiseRotary",
    "remove-copies": "picompile_passes.passes.canonicalize.remove_copies:RemoveCopies",
}
