"""The passes, one a file.

`BUILTIN` says where each one is. `picompile_passes.registry` reads it and imports a pass when it is asked for.
"""

BUILTIN: dict[str, str] = {
    "insert-predictors": "picompile_passes.passes.insert_predictors:InsertPredictors",
    "partition": "picompile_passes.passes.partition:Partition",
    "quantize": "picompile_passes.passes.quantize:Quantize",
}
